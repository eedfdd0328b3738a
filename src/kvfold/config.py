"""Recipes and run settings as frozen dataclasses; the CLI is generated from them."""

from dataclasses import dataclass
from typing import Literal

from kvfold.formats import format_of

Share = Literal["head", "group", "joint", "kv"]

DEFAULT_KEEP = 0.5  # share of the cache that stays where no size is asked for


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a cache is compressed along its dimensions.

    basis: which directions (see compression.bases). keys, values: how many heads share a latent:
    one (`head`), `group_size` (`group`), all (`joint`), or all heads' keys and values together
    (`kv`, set on both). ranks: how the budget is spent (see compression.ranks). equal_ranks: all
    latents of W_K in a layer, and all of W_V, get one rank (ranks 'fisher', Palu §4.1). gradients:
    weigh errors by the loss's gradient. reduce: prune and cluster rows before the SVD (ZDC §5.1).
    centroids: of its k-means, for each of q, k and v (None: see statistics.reduce). skip_layers:
    layers that stay whole, counted from 0. skip_threshold: so do those whose cumulative condition
    number has a log10 above it (ranks 'condition', LoRC §6.2).
    """

    name: str
    basis: str
    keys: Share = "head"
    values: Share = "head"
    ranks: str = "greedy"
    equal_ranks: bool = False
    group_size: int = 4
    gradients: bool = False
    reduce: bool = False
    centroids: int | None = None
    skip_layers: tuple[int, ...] = ()
    skip_threshold: float | None = None

    def __post_init__(self) -> None:
        if (self.keys == "kv") != (self.values == "kv"):
            raise ValueError("keys='kv' and values='kv' go together: one latent serves both")
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        if self.centroids is not None and (not self.reduce or self.centroids < 1):
            raise ValueError(
                f"centroids must be at least 1 and needs reduce=True, got {self.centroids} and "
                f"reduce={self.reduce}"
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How a running engine stores tokens: bits, pages, and what it evicts.

    kv_bytes: size of the pool (None: a share of what is free). page: rows a page (None: 32, or what
    the policy was published with). bits: of every stored number, or None for what the checkpoint
    plans (16 where it plans nothing). zeros: store a zero beside the scale (asymmetric). sub_group:
    most numbers that share a scale (None: all of a latent, with kivi 32). rotate: turn numbers that
    share a scale first, so that they are alike. format: a name of formats.FORMATS; kivi: keys per
    channel of a page, values per token, with zeros and not turned. residual: the last 1 to
    `residual` tokens wait in 16 bits, until that many are packed at once (None: none, with kivi
    128); a multiple of page. evict: name of a policy; keep_tokens or max_cache_tokens: what each
    sequence may keep.
    """

    kv_bytes: int | None = None
    page: int | None = None
    bits: int | None = None
    zeros: bool = False
    sub_group: int | None = None
    rotate: bool = True
    format: str = "integers"
    residual: int | None = None
    evict: str | None = None
    keep_tokens: float | None = None
    max_cache_tokens: int | None = None

    def __post_init__(self) -> None:
        limited = self.keep_tokens is not None or self.max_cache_tokens is not None
        if limited and self.evict is None:
            raise ValueError(
                "keep_tokens and max_cache_tokens need a policy that says what goes: set evict, "
                "such as evict='kv-compress'"
            )
        chosen = format_of(self.format)
        if not chosen.plans and self.bits in (None, 16):
            raise ValueError(
                f"format={self.format!r} quantises all numbers, so bits must be less than 16; got "
                f"{self.bits}: set bits to one of {', '.join(map(str, chosen.widths))}, or leave "
                "format out"
            )
        if self.evict is not None and self.packs_pages:
            by_format = f"format={self.format!r}"
            what = by_format if chosen.per_channel else f"residual={self.residual}"
            raise ValueError(
                f"{what} and evict={self.evict!r} exclude each other: tokens are packed together "
                "in their order, so they cannot move to other pages. Leave one of them out"
            )
        if self.kv_bytes is not None and self.kv_bytes < 1:
            raise ValueError(f"kv_bytes must be at least 1, got {self.kv_bytes}")

    @property
    def packs_pages(self) -> bool:
        """Whether tokens are packed together, whole pages at once, and stay in their order."""
        return self.residual is not None or format_of(self.format).per_channel
