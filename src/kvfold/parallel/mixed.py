"""An exchange of two ranks: full-rank messages of important tokens, low-rank ones of the others.

A layer's exchange comes before its attention, by which it would rank tokens (ZDC §5.2). So tokens
go by the latest ranking: a layer that follows a leader uses its leader's, as in the paper; a leader
uses that of the layer before, since neighbouring layers often agree (ZDC's O4). The first layer
sends all tokens at full rank. The paper does not say how a leader's tokens are sent.

Shapes: n tokens of this rank, N of all, P ranks; H query heads of this rank, W numbers of a
message.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from kvfold.attention.base import LayerAttention
from kvfold.attention.hybrid import denominators
from kvfold.layout import CacheSpec, LayerSpec
from kvfold.parallel.context import UlyssesContext
from kvfold.parallel.shares import HeadShare, low_rank_columns, num_important, ranking_layers


class MixedRankContext(UlyssesContext):
    """Attention of all layers in one prefill, with unimportant tokens at a low rank: their queries,
    keys and values lose their last numbers, for their own rank too. Then all numbers of ranks
    compute the same. Outputs are sent whole.

    spec: with `hybrid`, by denominators. The other arguments are those of UlyssesContext.
    """

    def __init__(
        self,
        shares: Sequence[tuple[HeadShare, ...]],
        counts: Sequence[int],
        group: dist.ProcessGroup,
        keep_entries: bool,
        spec: CacheSpec,
    ) -> None:
        super().__init__(shares, counts, group, keep_entries)
        assert spec.hybrid is not None and spec.low_rank is not None, "all tokens store the same"
        self.hybrid, self.low_rank = spec.hybrid, spec.low_rank
        self.ranking_layers = ranking_layers(spec.hybrid)
        self.order: Tensor | None = None  # int64 [N], tokens from the most important on

    def _all_tokens(self, layer: LayerAttention, sent: Sequence[Tensor]) -> Tensor:
        if self.order is None:
            return super()._all_tokens(layer, sent)
        num_tokens, shares = sum(self.counts), self.shares[layer.index]
        count = num_important(self.hybrid.important[layer.index], num_tokens)
        important = torch.zeros(num_tokens, dtype=torch.bool, device=self.order.device)
        important[self.order[:count]] = True
        masks = important.split(list(self.counts))
        nums_full = torch.stack([mask.sum() for mask in masks]).tolist()

        low_rank, width = self.low_rank.layers[layer.index], shares[self.rank].width
        columns = [_columns(share, low_rank, important.device) for share in shares]
        mine, my_columns = masks[self.rank], columns[self.rank]
        blocks = [_packed(x, mine, x_columns) for x, x_columns in zip(sent, columns, strict=True)]
        sizes = zip(nums_full, self.counts, strict=True)
        numbers = [full * width + (size - full) * len(my_columns) for full, size in sizes]
        received = self._exchange(blocks, numbers).split(numbers)
        unpacked = [
            _unpacked(block, mask, full, my_columns, width)
            for block, mask, full in zip(received, masks, nums_full, strict=True)
        ]
        return torch.cat(unpacked)

    def _ranks_tokens(self, layer: LayerAttention) -> bool:
        return layer.index in self.ranking_layers

    def _rank_tokens(self, lse: Tensor) -> None:
        """Each rank gets the denominators of its own tokens from the ranks of all heads, and tells
        all ranks their sum: they sort the same numbers."""
        parts = denominators(lse[None])[0].split(list(self.counts))
        num_ranks, num_tokens = len(self.counts), len(self.tokens)
        of_ranks = self._exchange(parts, [num_tokens] * num_ranks).view(num_ranks, num_tokens)
        mine = denominators(of_ranks[None])[0]
        importance = self._exchange([mine] * num_ranks, self.counts)
        self.order = importance.argsort(descending=True, stable=True)


@lru_cache(maxsize=4096)
def _columns(share: HeadShare, low_rank: LayerSpec, device: torch.device) -> Tensor:
    """Columns of a share's message that are sent for unimportant tokens."""
    return torch.tensor(low_rank_columns(share, low_rank), dtype=torch.int64, device=device)


def _packed(messages: Tensor, important: Tensor, columns: Tensor) -> Tensor:
    """Messages [n, W] as one vector: those of important tokens (bool [n]), then `columns` of the
    others."""
    return torch.cat([messages[important].flatten(), messages[~important][:, columns].flatten()])


def _unpacked(
    block: Tensor, important: Tensor, num_important: int, columns: Tensor, width: int
) -> Tensor:
    """Inverse of `_packed`, with zeros for what was not sent: [n, width]."""
    messages, middle = block.new_zeros(len(important), width), num_important * width
    messages[important] = block[:middle].view(num_important, width)
    unimportant = (~important).nonzero()
    messages[unimportant, columns] = block[middle:].view(len(unimportant), len(columns))
    return messages
