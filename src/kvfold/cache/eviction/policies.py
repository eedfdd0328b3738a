"""Eviction policies: what a row is worth, how a budget is shared, and how large it is.

A policy says which observed queries count, how their attention is summed into a *metric* of each
row, and how the pages that are kept are shared between groups. `evict` carries it out. To ablate,
edit a policy: `dataclasses.replace(kv_compress(), window=32, power=1)`.

A policy has the name of a method where it does what its authors published, to the differences that
docs/methods.md lists; other settings of it have a suffix.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

Scope = Literal["group", "layer", "pyramid", "all"]
Score = Literal["attention", "recency", "random"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How rows are scored and how groups share the budget. Lengths are tokens.

    window: the last prompt queries that are observed (None: all of the prompt's).
    power: 1 sums attention, 2 squared attention (KV-Compress §4.3).
    exclude: v of KV-Compress eq. 19: a query counts for keys at least v positions before it.
    pool: width of the max-pool over neighbours in position order, odd (eq. 8); 1 is off.
    scope: who shares the pages that are kept. `group`: every group as many; `layer`: every layer
        as many a group, its groups compete (Ada-KV); `pyramid`: fewer the deeper the layer, its
        groups alike (PyramidKV); `all`: all groups of all layers compete (KV-Compress).
    score: `attention` evicts the lowest metric, `recency` the oldest token, `random` any.
    sinks, recent: first and last tokens that are never evicted. recent_share: the share of what a
        sequence may keep that its last tokens are, in [0, 1) (H2O).
    floor: what part of an even share of its unit's pages a group has for sure, in [0, 1]; the rest
        is shared as groups compete (the safeguard alpha of Ada-KV).
    page: rows of a page that the method was published with; None: it has no say.
    continual: queries of generated tokens add to the metric too (eq. 20). Without it generated
        tokens have none, so compress once only, after the prompt: a later round evicts them first.
    """

    name: str
    window: int | None = None
    power: Literal[1, 2] = 1
    exclude: int = 0
    pool: int = 1
    scope: Scope = "group"
    score: Score = "attention"
    sinks: int = 0
    recent: int = 0
    recent_share: float = 0.0
    floor: float = 0.0
    continual: bool = False
    page: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 query, got {self.window}; None is all")
        if self.power not in (1, 2):
            raise ValueError(f"power must be 1 (sum) or 2 (sum of squares), got {self.power}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool must be odd to have a middle, got {self.pool}; 1 is off")
        if self.scope not in get_args(Scope):
            raise ValueError(f"scope must be one of {_list(get_args(Scope))}; got {self.scope!r}")
        if self.score not in get_args(Score):
            raise ValueError(f"score must be one of {_list(get_args(Score))}; got {self.score!r}")
        for field in ("exclude", "sinks", "recent"):
            if (value := getattr(self, field)) < 0:
                raise ValueError(f"{field} must be at least 0 tokens, got {value}; 0 is off")
        if not 0 <= self.recent_share < 1:
            raise ValueError(f"recent_share must be in [0, 1), got {self.recent_share}; 0 is off")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], got {self.floor}; 0 is off")

    def protected_recent(self, tokens: int) -> int:
        """Last tokens that are never evicted where a group may keep `tokens` on average: `recent`,
        its share of them, and those too young for a fair metric."""
        share = int(tokens * self.recent_share)
        return max(self.recent, share, self.window or 0, self.exclude)


def kv_compress() -> Policy:
    """KV-Compress, KVC-w8-L2 (§4.3, §5.2): last 8 queries, squared, all groups compete."""
    return Policy(name="kv-compress", window=8, power=2, pool=7, scope="all", continual=True)


def kv_compress_full() -> Policy:
    """KV-Compress, KVC-full-L2 (§4.3, §5.2): all queries but the first 10, squared, no pooling.

    The last 32 tokens are protected, as in its released experiments.
    """
    return Policy(
        name="kv-compress-full", power=2, exclude=10, scope="all", recent=32, continual=True
    )


def kvc_w8() -> Policy:
    """KVC-w8-L2 in pages of 16 (KV-Compress §5.1; released with the last 8 tokens protected)."""
    return replace(kv_compress(), name="kvc-w8", page=16)


def kvc_w32() -> Policy:
    """KVC-w32-L2 in pages of 16 (KV-Compress §5.2; released with the last 32 tokens protected)."""
    return replace(kvc_w8(), name="kvc-w32", window=32)


def kvc_w32_l1() -> Policy:
    """KVC-w32-L1 in pages of 16: the same without squares (KV-Compress table 2)."""
    return replace(kvc_w32(), name="kvc-w32-l1", power=1)


def kvc_full() -> Policy:
    """KVC-full-L2 in pages of 16 (KV-Compress §5.1)."""
    return replace(kv_compress_full(), name="kvc-full", page=16)


def snapkv() -> Policy:
    """SnapKV: the last 32 queries, max-pooled over 7 (released LongBench runs, w32_k7_maxpool)."""
    return Policy(name="snapkv", window=32, pool=7, continual=True)


def snapkv_w8() -> Policy:
    """SnapKV with the window 8 and pool 7 of KV-Compress §5.1."""
    return replace(snapkv(), name="snapkv-w8", window=8)


def h2o() -> Policy:
    """H2O: attention summed over all queries, the same budget everywhere, half of it for the most
    recent tokens (equal `heavy_ratio` and `recent_ratio` in its released scripts)."""
    return Policy(name="h2o", recent_share=0.5, continual=True)


def h2o_r32() -> Policy:
    """H2O with 32 recent tokens whatever the budget."""
    return replace(h2o(), name="h2o-r32", recent=32, recent_share=0.0)


def pyramidkv() -> Policy:
    """PyramidKV: SnapKV with budgets that fall linearly from the first layer to the last."""
    return Policy(name="pyramidkv", window=8, pool=7, scope="pyramid", continual=True)


def ada_snapkv() -> Policy:
    """Ada-SnapKV: SnapKV with one budget a layer, for which its groups compete, but for a fifth of
    it that they share evenly (released LongBench runs, w32_k7_maxpool, floor_alpha 0.2)."""
    return replace(snapkv(), name="ada-snapkv", scope="layer", floor=0.2)


def ada_snapkv_w8() -> Policy:
    """Ada-SnapKV with the window 8 and pool 7 of KV-Compress §5.1, without the safeguard."""
    return replace(ada_snapkv(), name="ada-snapkv-w8", window=8, floor=0.0)


def streaming() -> Policy:
    """StreamingLLM: the first 4 tokens and the most recent ones."""
    return Policy(name="streaming", score="recency", sinks=4)


def random() -> Policy:
    """Rows drawn at random in every group: the baseline that any metric has to beat."""
    return Policy(name="random", score="random")


POLICIES: dict[str, Callable[[], Policy]] = {
    "kv-compress": kv_compress,
    "kv-compress-full": kv_compress_full,
    "kvc-w8": kvc_w8,
    "kvc-w32": kvc_w32,
    "kvc-w32-l1": kvc_w32_l1,
    "kvc-full": kvc_full,
    "snapkv": snapkv,
    "snapkv-w8": snapkv_w8,
    "h2o": h2o,
    "h2o-r32": h2o_r32,
    "pyramidkv": pyramidkv,
    "ada-snapkv": ada_snapkv,
    "ada-snapkv-w8": ada_snapkv_w8,
    "streaming": streaming,
    "random": random,
}


def get(name: str) -> Policy:
    """The policy called `name`. Raises ValueError for an unknown one."""
    if name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; policies: {_list(POLICIES)}")
    return POLICIES[name]()


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one sequence may keep, all groups together: `pages`, or `bytes` of pages."""

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
        """`tokens` rows a group on average (C of KV-Compress §3.3), rounded up to whole pages."""
        if tokens < 1:
            raise ValueError(
                f"max_cache_tokens must be at least 1, got {tokens}; None evicts nothing"
            )
        return cls(pages=-(-tokens // page) * num_groups)

    @classmethod
    def keep_tokens(cls, fraction: float, lengths: Tensor | Sequence[int], page: int) -> "Budget":
        """`fraction` of the rows present, `lengths` [G] of them, rounded up to pages in each group.

        Give the pool's host lengths: lengths on a device cost a synchronisation.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"keep_tokens must be in (0, 1], got {fraction}; 1 evicts nothing")
        pages = torch.as_tensor(lengths).double() * fraction / page
        return cls(pages=int((pages - 1e-9).ceil().sum()))  # 0.07 * 100 is a hair above 7


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
