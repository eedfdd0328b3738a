"""Attach maps to a transformers model: its cache then stores projected keys and values.

The model's attention function is wrapped, so that it projects queries and outputs too. If a forward
has no cache, the attention function also projects keys and values. Shapes as in `layer_maps`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.maps.caches import map_next_update
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import (
    AttentionLayer,
    eager_attention,
    plain_positions,
    set_attention,
    unwrapped,
)
from kvfold.maps.rope_maps import RopeMaps
from kvfold.maps.sidecar import Sidecar
from kvfold.models.families import check_decoder
from kvfold.utils.errors import SettingError

PREFIX = "kvfold_over_"
_ATTACHED = "_kvfold_maps"  # attribute of a module


class AttachedMaps:
    """The maps of one attention module, cached per dtype and device."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps.with_stored_shape()
        self.digest = self.maps.digest()
        self._placed: dict[Any, Maps] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention functions that a pickled model names: another process may not have
        registered them."""
        self.__dict__.update(state)
        for base in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()):
            if not base.startswith("paged|"):
                mapped_attention(base)

    def placed(self, like: Tensor) -> Maps:
        """The maps with the dtype and device of `like`."""
        key = like.dtype, like.device
        if key in self._placed:
            return self._placed[key]
        if torch.compiler.is_exporting():
            return self.maps.to(like.device, like.dtype)  # tensors of a trace alone
        return self.place(like.dtype, like.device)

    def place(self, dtype: torch.dtype, device: torch.device) -> Maps:
        """Copy the maps to a dtype and device. Code that torch.compile traces reads these
        copies."""
        with torch.inference_mode(False):  # else training could not use them later
            maps = self._placed[dtype, device] = self.maps.to(device, dtype)
        return maps


def attach(model: Any, maps: Sidecar | Path | str) -> Callable[[], None]:
    """Attach maps to a loaded causal LM, so that its KV cache stores projected keys and values.

    maps: a `Sidecar`, a folder of maps, or a hub repository "USER/NAME" or "USER/NAME@REVISION".

    Changes the model in place, but not its weights. Layers without maps store what they did before.
    Numbers with planned bits are stored in the model's dtype. Returns a function that removes the
    maps, as `detach` does. Raises SettingError for maps of another model, and for a model that has
    maps already.
    """
    sidecar = maps if isinstance(maps, Sidecar) else Sidecar.load(maps)
    model = unwrapped(model)
    check_decoder(model)
    if _attached_maps(model):
        raise SettingError(
            "`model` has maps already: take them away first, with kvfold.detach(model)"
        )
    return attach_maps(model, sidecar.layers_of(model), sidecar.maps)


def detach(model: Any) -> None:
    """Remove the maps from a model, or from a copy of one. Raises SettingError for a model without
    maps."""
    model = unwrapped(model)
    check_decoder(model)
    if not _attached_maps(model):
        raise SettingError("`model` has no maps to take away: kvfold.attach gives it some")
    for module in model.modules():
        module.__dict__.pop(_ATTACHED, None)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _check_text_positions or getattr(hook, "func", None) is _before_attention:
                del module._forward_pre_hooks[key]
                del module._forward_pre_hooks_with_kwargs[key]
    set_attention(model, lambda name: name.removeprefix(PREFIX))


def _attached_maps(model: Any) -> list[AttachedMaps]:
    """The maps of a model's attention modules, of those that have any."""
    return [
        module.__dict__[_ATTACHED] for module in model.modules() if _ATTACHED in module.__dict__
    ]


def attach_maps(
    model: Any, layers: Sequence[AttentionLayer], maps: Mapping[str, Maps]
) -> Callable[[], None]:
    """Attach maps to the modules that `maps` names, without checking that they fit. Layers that
    share another layer's keys and values use its maps. Returns a function that removes them. Raises
    SettingError, and then leaves the model unchanged."""
    set_attention(model, mapped_attention)
    attached = {name: AttachedMaps(module_maps) for name, module_maps in maps.items()}
    for layer in layers:
        module, layer_maps = layer.module, attached.get(str(layer.source))
        if layer_maps is not None:
            module.__dict__[_ATTACHED] = layer_maps
            layer_maps.place(layer.keys.dtype, layer.keys.device)
        if layer.name == layer.source:
            module.register_forward_pre_hook(
                partial(_before_attention, layer_maps), with_kwargs=True
            )
    if any(isinstance(x, RopeMaps) for x in maps.values()):
        for module in (x for x in model.modules() if hasattr(x, "mrope_section")):
            module.register_forward_pre_hook(_check_text_positions, with_kwargs=True)

    def remove() -> None:
        if not set(attached.values()).isdisjoint(
            _attached_maps(model)
        ):  # not those of a later attach
            detach(model)

    return remove


def mapped_attention(base: str) -> str:
    """Register a wrapper around one of transformers' attention functions, which applies maps;
    return its name. Raises SettingError for continuous batching."""
    if base.startswith(PREFIX):
        return base
    if base.startswith("paged|"):
        raise SettingError(
            f"attention {base!r} stores keys and values itself, so maps cannot act: take the maps"
            " away first, with kvfold.detach(model), or generate without continuous batching"
        )
    name = PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention, base))
        if base in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _before_attention(
    attached: AttachedMaps | None, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Forward pre-hook of an attention module: tell the caches among its arguments which maps the
    next `update` applies, None for a module without maps."""
    config = module.config
    if not config._attn_implementation.startswith(PREFIX):  # set_attn_implementation was called
        config._attn_implementation = mapped_attention(config._attn_implementation)
    positions = plain_positions(kwargs.get("position_ids"))
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache):
            map_next_update(value, attached, positions)


def _check_text_positions(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook. Raises SettingError if a token has several positions, as image tokens of
    multimodal RoPE [3, B, T] have."""
    for x in (*args, *kwargs.values()):
        is_positions = isinstance(x, Tensor) and x.dim() == 3 and not x.is_floating_point()
        if is_positions and not torch.equal(x, x[:1].expand_as(x)):
            raise SettingError(
                "tokens of images or videos are rotated by three positions each, and maps of keys"
                " before RoPE know one: give text alone, or make maps with recipe 'swift'"
            )


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
    """Call transformers' attention function `base` on projected queries, keys and values."""
    inner = eager_attention(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
    attached = module.__dict__.get(_ATTACHED)
    if attached is None:
        unmapped: tuple[Tensor, Any] = inner(
            module, query, key, value, attention_mask, *args, **kwargs
        )
        return unmapped
    maps = attached.placed(query)
    if not maps.are_stored(key, value):
        positions = plain_positions(kwargs.get("position_ids"))
        key, value = maps.stored(key, value, positions)
    query, key, value = maps.attended(query, key, value)
    out, weights = inner(module, query, key, value, attention_mask, *args, **kwargs)
    return maps.outputs(out), weights
