"""Maps attached to a transformers model: its cache stores mapped keys and values, and its attention
function maps queries and outputs.

Of a model without a cache the attention function maps keys and values too. Shapes as in `maps`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.errors import SettingError
from kvfold.seam.layers import (
    SeamLayer,
    check_layers,
    own_eager,
    seam_layers,
    set_attention,
)
from kvfold.seam.maps import Maps
from kvfold.seam.sidecar import Sidecar

PREFIX = "kvfold_over_"
_STATE = "_kvfold_seam"  # of a module, in its __dict__


class Bound:
    """The maps of one attention module, where it is. stored: whether the keys and values that its
    attention gets next come from a cache."""

    def __init__(self, maps: Maps) -> None:
        self.maps, self.stored = maps, False
        self._placed: dict[Any, Maps] = {}

    def placed(self, like: Tensor) -> Maps:
        """The maps in a tensor's dtype and on its device."""
        key = like.dtype, like.device
        if key not in self._placed:
            self._placed[key] = self.maps.to(like)
        return self._placed[key]


class MappedCache:
    """A transformers cache as one attention sees it: what it stores is mapped."""

    def __init__(self, cache: Cache, bound: Bound) -> None:
        self._cache, self._bound = cache, bound

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # models ask which cache they have
        return type(self._cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        maps = self._bound.placed(key)
        self._bound.stored = True
        return self._cache.update(maps.keys(key), maps.values(value), *args, **kwargs)


def attach(model: Any, maps: Sidecar | Path | str) -> Callable[[], None]:
    """Let a causal LM's cache store what a sidecar, or a folder that holds one, says.

    The model is changed in place, its weights are not. Returns what takes the maps away again.
    Raises SettingError for maps of another model, or a model that has maps already.
    """
    sidecar = maps if isinstance(maps, Sidecar) else Sidecar.load(maps)
    if any(_STATE in module.__dict__ for module in model.modules()):
        raise SettingError(
            "`model` has maps already: take them away first, by what attach returned"
        )
    layers = seam_layers(model)
    check_layers(model, layers)
    sidecar.check(layers)
    return bind(model, layers, sidecar.maps)


def bind(model: Any, layers: Sequence[SeamLayer], maps: Mapping[str, Maps]) -> Callable[[], None]:
    """Attach maps of modules by name, unseen. Layers that read another's keys and values share its
    maps."""
    bounds = {name: Bound(own) for name, own in maps.items()}
    undo: list[Callable[[], None]] = []
    for layer in layers:
        if layer.source not in bounds:
            continue
        module, bound = layer.module, bounds[layer.source]
        module.__dict__[_STATE] = bound
        undo.append(partial(module.__dict__.pop, _STATE, None))
        if layer.name == layer.source:
            hook = module.register_forward_pre_hook(partial(_give_cache, bound), with_kwargs=True)
            undo.append(hook.remove)
    before = set_attention(model, mapped_attention)

    def detach() -> None:
        for step in undo:
            step()
        for config, own in before:
            config._attn_implementation = own

    return detach


def mapped_attention(base: str) -> str:
    """The name of an attention function that maps, around one of transformers'."""
    if base.startswith(PREFIX):
        return base
    name = PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention, base))
        if base in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _give_cache(
    bound: Bound, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a mapped view in the place of the cache among a module's arguments."""
    bound.stored = False
    view = partial(_view, bound)
    return tuple(map(view, args)), {name: view(value) for name, value in kwargs.items()}


def _view(bound: Bound, value: Any) -> Any:
    return MappedCache(value, bound) if isinstance(value, Cache) else value


def _attention(
    base: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """transformers' attention `base` of a module, over what its maps store."""
    mask = attention_mask
    inner = own_eager(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
    bound = module.__dict__.get(_STATE)
    if bound is None:
        found: tuple[Tensor, Any] = inner(module, query, key, value, mask, *args, **kwargs)
        return found
    maps = bound.placed(query)
    if not bound.stored:
        key, value = maps.keys(key), maps.values(value)
    q = maps.queries(query)
    out, weights = inner(module, q, key, maps.per_head(value), mask, *args, **kwargs)
    return maps.outputs(out), weights
