"""Attention of a rank's tokens to all ranks' tokens: two exchanges, and attention between them.

Shapes: n tokens of this rank, N of all, P ranks; R numbers of a row.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.parallel.attend import attend, message
from kvfold.parallel.shares import HeadShare


class UlyssesContext(AttentionContext):
    """All layers' attention in one prefill (Ulysses; ZDC §5.3).

    shares: P of every layer; counts: tokens of every rank, in the order of the prompt; rows: of
    every layer as it is stored [n, R], kept where they are asked for.
    """

    def __init__(
        self,
        shares: Sequence[tuple[HeadShare, ...]],
        counts: Sequence[int],
        group: dist.ProcessGroup,
        keep_rows: bool,
    ) -> None:
        self.shares, self.counts, self.group = shares, counts, group
        self.keep_rows, self.rank = keep_rows, dist.get_rank(group)
        first = sum(counts[: self.rank])
        self.tokens = range(first, first + counts[self.rank])
        self.rows: list[Tensor] = []

    def attend(self, layer: LayerAttention, q: Tensor, rows: Tensor) -> Tensor:
        shares = self.shares[layer.index]
        if self.keep_rows:
            self.rows.append(rows[0])
        mine, own = shares[self.rank], len(self.tokens)
        sent = [message(layer, share, q, rows[0], self.tokens) for share in shares]
        received = self._exchange(sent, [count * mine.width for count in self.counts])
        answers = attend(layer, mine, received.view(sum(self.counts), mine.width))
        sizes = [own * share.output_width for share in shares]
        back = self._exchange(answers.split(list(self.counts)), sizes)
        heads: dict[int, Tensor] = {}
        for share, x in zip(shares, back.split(sizes), strict=True):
            parts = x.view(own, share.output_width).split(share.output_ranks, 1)
            heads |= zip(share.heads, parts, strict=True)
        return torch.cat([heads[head] for head in sorted(heads)], 1)[None]

    def _exchange(self, blocks: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Send every rank its block, nothing padded: sizes[i] numbers of every rank i, flat."""
        sent = torch.cat([block.flatten() for block in blocks])
        found = sent.new_empty(sum(sizes))
        dist.all_to_all_single(
            found, sent, list(sizes), [block.numel() for block in blocks], group=self.group
        )
        return found
