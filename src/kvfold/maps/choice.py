"""Which layers of a model get maps, and what the others hold of its cache.

A plan is of layers alike in their heads. Layers whose sliding window is short hold little of a long
context and are left as they are. So are those with other heads than the layers that hold most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.maps.layers import SeamLayer
from kvfold.models.rotary import position_limit

SHORT, LONG = 8192, 32768  # tokens of the contexts whose shares are told; LONG decides
LITTLE = 1 / 6  # of the cache at LONG tokens, which layers with a window may hold and be left


@dataclass(frozen=True, kw_only=True)
class Choice:
    """layers: those that get maps, one a module; readers: read the keys and values of others, whose
    maps they share where these have any; windowed, unlike: layers that are left, with a short
    window, or with other heads; all of a model's layers that store."""

    layers: Sequence[SeamLayer]
    readers: Sequence[SeamLayer]
    windowed: Sequence[SeamLayer]
    unlike: Sequence[SeamLayer]
    stores: Sequence[SeamLayer]

    @property
    def left(self) -> list[SeamLayer]:
        """That call attention and are not planned, readers included."""
        return [*self.windowed, *self.unlike, *self.readers]

    def share_left(self, tokens: int) -> float:
        """Of the numbers that the cache has at a context of so many tokens."""
        return share([*self.windowed, *self.unlike], self.stores, tokens)

    def words(self) -> str | None:
        """What is left, for users; None where nothing is."""
        parts = []
        if self.windowed:
            windows = sorted({x.window for x in self.windowed if x.window is not None})
            sizes = " and ".join(map(str, windows))
            parts.append(f"{len(self.windowed)} with a sliding window of {sizes} tokens")
        if self.unlike:
            parts.append(f"{len(self.unlike)} with other heads than {self.layers[0].name}")
        if not parts:
            return None
        held = ", ".join(f"{self.share_left(x):.0%} at {x}" for x in (SHORT, LONG))
        count = len(self.windowed) + len(self.unlike)
        return (
            f"{count} of {len(self.stores)} layers are left as they are, {' and '.join(parts)}:"
            f" they hold {held} tokens of the uncompressed cache"
        )


def choose(config: Any, layers: Sequence[SeamLayer], windows: bool = False) -> Choice:
    """The layers of a model that get maps. config: of the model; windows: also plan layers whose
    window is short, where their heads are like the others'."""
    stores = [x for x in layers if x.source == x.name]
    positions = position_limit(config) or LONG
    tokens = min(LONG, positions)
    windowed = [x for x in stores if x.window is not None]
    some = 0 < len(windowed) < len(stores)
    if windows or not some or share(windowed, stores, tokens) > LITTLE:
        windowed = []
    rest = [x for x in stores if x not in windowed]
    kinds = dict.fromkeys(x.shape for x in rest)
    shape = max(kinds, key=lambda kind: _numbers([x for x in rest if x.shape == kind], tokens))
    planned = {x.module: x for x in rest if x.shape == shape}
    return Choice(
        layers=list(planned.values()),
        readers=[x for x in layers if x.source != x.name],
        windowed=windowed,
        unlike=[x for x in rest if x.shape != shape],
        stores=stores,
    )


def share(part: Sequence[SeamLayer], stores: Sequence[SeamLayer], tokens: int) -> float:
    """The numbers that some layers store of a context, over those of all."""
    return _numbers(part, tokens) / _numbers(stores, tokens)


def _numbers(layers: Sequence[SeamLayer], tokens: int) -> int:
    """That layers store of a context of so many tokens."""
    widths = [x.num_kv_heads * (x.head_dim + x.value_dim) for x in layers]
    lengths = [tokens if x.window is None else min(tokens, x.window) for x in layers]
    return sum(width * length for width, length in zip(widths, lengths, strict=True))
