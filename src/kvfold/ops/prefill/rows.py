"""Keys and values of a prefill chunk, and which of them a query sees. Shapes as in `prefill`."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVView:
    """Keys or values of every KV head inside one tensor.

    Token s of head h of sequence b begins at element b * data.stride(0) + s * data.stride(1) +
    starts[h] of `data` [B, S, ...] and has ranks[h] numbers. Heads may share numbers.
    """

    data: Tensor
    starts: tuple[int, ...]
    ranks: tuple[int, ...]

    def head(self, number: int) -> Tensor:
        """Return one head's keys or values, a view [B, S, rank]."""
        size = (*self.data.shape[:2], self.ranks[number])
        first = self.data.storage_offset() + self.starts[number]
        return self.data.as_strided(size, (*self.data.stride()[:2], 1), first)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Which tokens each query sees: token s of head h if s < counts[b, owner[h]] and query - window
    < position <= query.

    counts: int [B, G], tokens stored per group. owner: group of every KV head. positions: int32
        [B, G, S] of the tokens; None: a token's position is its index. queries: int [B, T],
        positions of the queries, ascending. window: sliding window, in tokens.
    """

    counts: Tensor
    owner: tuple[int, ...]
    positions: Tensor | None
    queries: Tensor
    window: int | None = None

    def of(self, group: int, size: int) -> Tensor:
        """Return which of the first `size` tokens of a group each query sees: bool [B, T, S]."""
        row = torch.arange(size, device=self.queries.device)
        position = (row if self.positions is None else self.positions[:, group])[..., None, :]
        exists, queries = row < self.counts[:, group, None], self.queries[..., None]
        seen = exists[:, None] & (position <= queries)
        return seen if self.window is None else seen & (position > queries - self.window)
