"""Which layers of a model get maps, and what the others hold of its cache.

A plan is of layers alike in their heads. Layers whose sliding window is short hold little of a long
context and are left as they are. So are those with other heads than the layers that hold most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.maps.layers import AttentionLayer
from kvfold.models.rotary import position_limit

SHORT_CONTEXT, LONG_CONTEXT = (
    8192,
    32768,
)  # tokens of the contexts whose shares are told; LONG decides
MAX_WINDOWED_SHARE = (
    1 / 6
)  # of the cache at LONG tokens, which layers with a window may hold and be left


@dataclass(frozen=True, kw_only=True)
class LayerSelection:
    """layers: those that get maps, one a module; readers: read the keys and values of others, whose
    maps they share where these have any; windowed, unlike: layers that are left, with a short
    window, or with other heads; all of a model's layers that store."""

    layers: Sequence[AttentionLayer]
    kv_shared: Sequence[AttentionLayer]
    sliding_window: Sequence[AttentionLayer]
    other_shape: Sequence[AttentionLayer]
    with_cache: Sequence[AttentionLayer]

    @property
    def uncompressed(self) -> list[AttentionLayer]:
        """That call attention and are not planned, readers included."""
        return [*self.sliding_window, *self.other_shape, *self.kv_shared]

    def uncompressed_share(self, tokens: int) -> float:
        """Of the numbers that the cache has at a context of so many tokens."""
        return cache_share([*self.sliding_window, *self.other_shape], self.with_cache, tokens)

    def summary(self) -> str | None:
        """What is left, for users; None where nothing is."""
        parts = []
        if self.sliding_window:
            windows = sorted({x.window for x in self.sliding_window if x.window is not None})
            sizes = " and ".join(map(str, windows))
            parts.append(f"{len(self.sliding_window)} with a sliding window of {sizes} tokens")
        if self.other_shape:
            parts.append(f"{len(self.other_shape)} with other heads than {self.layers[0].name}")
        if not parts:
            return None
        held = ", ".join(
            f"{self.uncompressed_share(x):.0%} at {x}" for x in (SHORT_CONTEXT, LONG_CONTEXT)
        )
        count = len(self.sliding_window) + len(self.other_shape)
        return (
            f"{count} of {len(self.with_cache)} layers are left as they are, {' and '.join(parts)}:"
            f" they hold {held} tokens of the uncompressed cache"
        )


def select_layers(
    config: Any, layers: Sequence[AttentionLayer], windows: bool = False
) -> LayerSelection:
    """The layers of a model that get maps. config: of the model; windows: also plan layers whose
    window is short, where their heads are like the others'."""
    stores = [x for x in layers if x.source == x.name]
    positions = position_limit(config) or LONG_CONTEXT
    tokens = min(LONG_CONTEXT, positions)
    windowed = [x for x in stores if x.window is not None]
    some = 0 < len(windowed) < len(stores)
    if windows or not some or cache_share(windowed, stores, tokens) > MAX_WINDOWED_SHARE:
        windowed = []
    rest = [x for x in stores if x not in windowed]
    kinds = dict.fromkeys(x.shape for x in rest)
    shape = max(kinds, key=lambda kind: _numbers([x for x in rest if x.shape == kind], tokens))
    planned = {x.module: x for x in rest if x.shape == shape}
    return LayerSelection(
        layers=list(planned.values()),
        kv_shared=[x for x in layers if x.source != x.name],
        sliding_window=windowed,
        other_shape=[x for x in rest if x.shape != shape],
        with_cache=stores,
    )


def cache_share(
    part: Sequence[AttentionLayer], stores: Sequence[AttentionLayer], tokens: int
) -> float:
    """The numbers that some layers store of a context, over those of all."""
    return _numbers(part, tokens) / _numbers(stores, tokens)


def _numbers(layers: Sequence[AttentionLayer], tokens: int) -> int:
    """That layers store of a context of so many tokens."""
    widths = [x.num_kv_heads * (x.head_dim + x.value_dim) for x in layers]
    lengths = [tokens if x.window is None else min(tokens, x.window) for x in layers]
    return sum(width * length for width, length in zip(widths, lengths, strict=True))
