"""Attention of a rank's tokens to the tokens of all ranks: an all-to-all exchange, attention, and
another exchange.

Shapes: n tokens of this rank, N of all, P ranks; R numbers of a cache entry.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.ops.maps import with_mean
from kvfold.parallel.attend import attend, message
from kvfold.parallel.shares import HeadShare


class UlyssesContext(AttentionContext):
    """Attention of all layers in one prefill (Ulysses; ZDC §5.3).

    shares: P shares per layer.
    counts: tokens of each rank, in the order of the prompt.
    keep_entries: keep the cache entries [n, R] of each layer in `entries`.
    """

    def __init__(
        self,
        shares: Sequence[tuple[HeadShare, ...]],
        counts: Sequence[int],
        group: dist.ProcessGroup,
        keep_entries: bool,
    ) -> None:
        self.shares, self.counts, self.group = shares, counts, group
        self.keep_entries, self.rank = keep_entries, dist.get_rank(group)
        first = sum(counts[: self.rank])
        self.tokens = range(first, first + counts[self.rank])
        self.entries: list[Tensor] = []

    def attend(self, layer: LayerAttention, q: Tensor, rows: Tensor) -> Tensor:
        shares = self.shares[layer.index]
        if self.keep_entries:
            self.entries.append(rows[0])
        my_share, num_tokens = shares[self.rank], len(self.tokens)
        sent = [message(layer, share, q, rows[0], self.tokens) for share in shares]
        received = self._all_tokens(layer, sent)
        outputs, lse = attend(layer, my_share, received, self._ranks_tokens(layer))
        if lse is not None:
            self._rank_tokens(lse)
        sizes = [num_tokens * share.output_width for share in shares]
        returned = self._exchange(outputs.split(list(self.counts)), sizes)
        heads: dict[int, Tensor] = {}
        for share, x in zip(shares, returned.split(sizes), strict=True):
            parts = x.view(num_tokens, share.output_width).split(share.output_ranks, 1)
            heads |= zip(share.heads, parts, strict=True)
        out = torch.cat([heads[head] for head in sorted(heads)], 1)[None]
        if (maps := layer.output_maps) is None:
            return out
        return with_mean(maps, out.unflatten(2, (len(maps.mean), maps.queries, -1)))

    def _all_tokens(self, layer: LayerAttention, sent: Sequence[Tensor]) -> Tensor:
        """Exchange messages [n, .] for each rank: those of all tokens for this rank [N, W]."""
        width = self.shares[layer.index][self.rank].width
        received = self._exchange(sent, [count * width for count in self.counts])
        return received.view(sum(self.counts), width)

    def _ranks_tokens(self, layer: LayerAttention) -> bool:
        """Whether tokens are ranked by this layer's attention."""
        return False

    def _rank_tokens(self, lse: Tensor) -> None:
        """Rank tokens by the log-sum-exps [H, N] of this rank's heads."""
        raise NotImplementedError

    def _exchange(self, blocks: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """All-to-all: send each rank its block, without padding. Returns the received numbers as
        one vector.

        sizes[i]: numbers to receive from rank i.
        """
        sent = torch.cat([block.flatten() for block in blocks])
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(
            received, sent, list(sizes), [block.numel() for block in blocks], group=self.group
        )
        return received
