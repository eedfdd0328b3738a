"""How much of the cache a sequence may keep."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that one sequence may keep in all groups together: `pages`, or `bytes` of pages."""

    pages: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.pages is None) == (self.bytes is None):
            raise ValueError(
                f"a budget is either pages or bytes, got pages={self.pages} and bytes={self.bytes};"
                " set one of them"
            )
        for field in ("pages", "bytes"):
            if (value := getattr(self, field)) is not None and value < 0:
                raise ValueError(f"{field} must be at least 0, got {value}; 0 keeps what it must")

    @property
    def limit(self) -> int:
        """The number that is set."""
        limit = self.bytes if self.pages is None else self.pages
        assert limit is not None
        return limit

    @classmethod
    def max_cache_tokens(cls, tokens: int, page: int, num_groups: int) -> "Budget":
        """A budget of `tokens` entries per group on average (C of KV-Compress §3.3), rounded up to
        whole pages."""
        if tokens < 1:
            raise ValueError(
                f"max_cache_tokens must be at least 1, got {tokens}; None evicts nothing"
            )
        return cls(pages=-(-tokens // page) * num_groups)

    @classmethod
    def keep_tokens(cls, fraction: float, lengths: Tensor | Sequence[int], page: int) -> "Budget":
        """A budget of `fraction` of the present entries, `lengths` [G], rounded up to whole pages
        in each group.

        Pass the pool's `host_lengths`: lengths on a device cost a synchronisation.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"keep_tokens must be in (0, 1], got {fraction}; 1 evicts nothing")
        pages = torch.as_tensor(lengths).double() * fraction / page
        return cls(pages=int((pages - 1e-9).ceil().sum()))  # 1e-9: 0.07 * 100 is just above 7
