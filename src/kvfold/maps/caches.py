"""Make a transformers cache store projected keys and values.

The first attention module with maps that gets a cache replaces the cache's `update` method. The
cache remembers which maps each layer was stored with, also after it is copied or pickled or the
maps are removed, and refuses to be read with other maps.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import Cache

from kvfold.maps.rope_maps import RopeMaps
from kvfold.models.positions import check_exact, fit_static
from kvfold.utils.errors import SettingError

_NEXT = "_kvfold_next"  # attribute of a cache: the maps and positions of its next update
_FILLED = "_kvfold_filled"  # attribute of a cache: by layer, digest of the maps it was stored with


def map_next_update(cache: Cache, attached: Any, positions: Tensor | None) -> None:
    """Set the maps of one attention module for the next update of a cache. positions: of the new
    tokens; None if unknown."""
    if _FILLED not in cache.__dict__:
        setattr(cache, _FILLED, {})
        cache.update = partial(_update, cache)  # type: ignore[method-assign]
    setattr(cache, _NEXT, (attached, positions))


def _update(
    cache: Any, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """`Cache.update` that projects keys and values first, if the calling module has maps."""
    (attached, positions), filled = getattr(cache, _NEXT), getattr(cache, _FILLED)
    setattr(cache, _NEXT, (None, None))
    digest = None if attached is None else attached.digest
    if layer_idx not in filled:
        empty = layer_idx >= len(cache.layers) or not cache.get_seq_length(layer_idx)
        previous = digest if empty else None
    else:
        previous = filled[layer_idx]
    if previous != digest:
        raise SettingError(
            f"layer {layer_idx} of this cache was filled {_how(previous)} and would be read"
            f" {_how(digest)}: start with a new, empty cache"
        )
    if attached is not None:
        if isinstance(attached.maps, RopeMaps):
            check_exact(cache, layer_idx, "maps made with recipe 'swift'")
        key, value = attached.placed(key).stored(key, value, positions)
        if layer_idx not in filled:
            fit_static(cache, layer_idx, key, value)
            filled[layer_idx] = digest
    updated: tuple[Tensor, Tensor] = type(cache).update(
        cache, key, value, layer_idx, *args, **kwargs
    )
    return updated


def _how(digest: str | None) -> str:
    return "without maps" if digest is None else f"with maps {digest[:8]}"
