"""A transformers cache that stores mapped keys and values.

The first attention with maps that gets a cache puts `_update` in the place of the cache's own
method. What was stored is then never read without the maps that it was stored by: a cache knows the
maps of each of its layers, also when it is copied, pickled, or used after the maps were taken away.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import Cache

from kvfold.maps.rope_maps import RopeMaps
from kvfold.models.positions import check_exact, fit_static
from kvfold.utils.errors import SettingError

_NEXT = "_kvfold_next"  # what a cache's next update is mapped by
_FILLED = "_kvfold_filled"  # by layer: the digest of the maps that its entries were stored by


def map_next_update(cache: Cache, bound: Any, positions: Tensor | None) -> None:
    """Let the next update of a cache map keys and values, by the maps of one attention module.
    positions: of their tokens."""
    if _FILLED not in cache.__dict__:
        setattr(cache, _FILLED, {})
        cache.update = partial(_update, cache)  # type: ignore[method-assign]
    setattr(cache, _NEXT, (bound, positions))


def _update(
    cache: Any, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """`Cache.update`, of mapped keys and values where the module that calls has maps."""
    (bound, positions), filled = getattr(cache, _NEXT), getattr(cache, _FILLED)
    setattr(cache, _NEXT, (None, None))
    digest = None if bound is None else bound.digest
    if layer_idx not in filled:
        empty = layer_idx >= len(cache.layers) or not cache.get_seq_length(layer_idx)
        was = digest if empty else None
    else:
        was = filled[layer_idx]
    if was != digest:
        raise SettingError(
            f"layer {layer_idx} of this cache was filled {_how(was)} and would be read"
            f" {_how(digest)}: start with a new, empty cache"
        )
    if bound is not None:
        if isinstance(bound.maps, RopeMaps):
            check_exact(cache, layer_idx, "maps made with recipe 'swift'")
        key, value = bound.placed(key).stored(key, value, positions)
        if layer_idx not in filled:
            fit_static(cache, layer_idx, key, value)
            filled[layer_idx] = digest
    found: tuple[Tensor, Tensor] = type(cache).update(cache, key, value, layer_idx, *args, **kwargs)
    return found


def _how(digest: str | None) -> str:
    return "without maps" if digest is None else f"with maps {digest[:8]}"
