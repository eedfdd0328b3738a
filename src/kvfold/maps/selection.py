"""Select the layers of a model that get maps.

One plan covers layers with the same heads. In a model where only some layers have a sliding window,
those layers stay uncompressed if they hold at most MAX_WINDOWED_SHARE of the cache at LONG_CONTEXT
tokens. So do layers whose heads differ from those of the layers that hold most of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.maps.layers import AttentionLayer
from kvfold.models.rotary import position_limit

SHORT_CONTEXT, LONG_CONTEXT = 8192, 32768  # context lengths for which shares are reported
# Layers with a sliding window stay uncompressed if they hold at most this share of the cache
# of a long context.
MAX_WINDOWED_SHARE = 1 / 6


@dataclass(frozen=True, kw_only=True)
class LayerSelection:
    """The layers that get maps, and those that do not.

    layers: get maps, one entry per module.
    kv_shared: use the keys and values of another layer, and its maps if it has any (vLLM:
        kv_sharing_target).
    sliding_window, other_shape: stay uncompressed, because of a short window or different heads.
    with_cache: all layers that have a KV cache.
    """

    layers: Sequence[AttentionLayer]
    kv_shared: Sequence[AttentionLayer]
    sliding_window: Sequence[AttentionLayer]
    other_shape: Sequence[AttentionLayer]
    with_cache: Sequence[AttentionLayer]

    @property
    def uncompressed(self) -> list[AttentionLayer]:
        """Attention layers without maps of their own, KV-shared ones included."""
        return [*self.sliding_window, *self.other_shape, *self.kv_shared]

    def uncompressed_share(self, tokens: int) -> float:
        """Share of the original cache that the layers without maps hold in a context of `tokens`
        tokens."""
        return cache_share([*self.sliding_window, *self.other_shape], self.with_cache, tokens)

    def summary(self) -> str | None:
        """A sentence for users about the layers that stay uncompressed; None if there are none."""
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
            f" they hold {held} tokens of the original cache"
        )


def select_layers(
    config: Any, layers: Sequence[AttentionLayer], windows: bool = False
) -> LayerSelection:
    """Select the layers of a model that get maps.

    config: of the model.
    windows: also compress layers with a short sliding window, if their heads allow it.
    """
    with_cache = [x for x in layers if x.source == x.name]
    positions = position_limit(config) or LONG_CONTEXT
    tokens = min(LONG_CONTEXT, positions)
    sliding_window = [x for x in with_cache if x.window is not None]
    mixed = 0 < len(sliding_window) < len(with_cache)
    if windows or not mixed or cache_share(sliding_window, with_cache, tokens) > MAX_WINDOWED_SHARE:
        sliding_window = []
    candidates = [x for x in with_cache if x not in sliding_window]
    shapes = dict.fromkeys(x.shape for x in candidates)
    shape = max(
        shapes,
        key=lambda kind: _numbers([x for x in candidates if x.shape == kind], tokens),
    )
    planned = {x.module: x for x in candidates if x.shape == shape}
    return LayerSelection(
        layers=list(planned.values()),
        kv_shared=[x for x in layers if x.source != x.name],
        sliding_window=sliding_window,
        other_shape=[x for x in candidates if x.shape != shape],
        with_cache=with_cache,
    )


def cache_share(
    layers: Sequence[AttentionLayer], all_layers: Sequence[AttentionLayer], tokens: int
) -> float:
    """Share of a context's cache that `layers` hold, of what `all_layers` hold. tokens: length of
    the context."""
    return _numbers(layers, tokens) / _numbers(all_layers, tokens)


def _numbers(layers: Sequence[AttentionLayer], tokens: int) -> int:
    """Numbers that layers store for a context of `tokens` tokens."""
    widths = [x.num_kv_heads * (x.head_dim + x.value_dim) for x in layers]
    lengths = [tokens if x.window is None else min(tokens, x.window) for x in layers]
    return sum(width * length for width, length in zip(widths, lengths, strict=True))
