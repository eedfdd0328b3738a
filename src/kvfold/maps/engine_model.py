"""A model with maps in an engine: what its attention is asked goes to a context.

Shapes: N tokens of a step; Hq / Hk query / KV heads, dv head dim of values; R numbers of a row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from itertools import count
from threading import local
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.attention.base import AttentionContext, Columns, LayerAttention
from kvfold.layout import CacheSpec, Geometry, LayerSpec
from kvfold.layout.formats.base import Format
from kvfold.layout.pages import tiers
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import AttentionLayer, is_recurrent, plain_positions
from kvfold.maps.rope_maps import RopeMaps
from kvfold.maps.sidecar import Sidecar
from kvfold.models.adapter import PAGED, decoder_of
from kvfold.models.foldable import check_causal
from kvfold.models.rotary import RotaryTable
from kvfold.models.rotate import tier_rotation
from kvfold.ops.maps import EntryMaps, OutputMaps, score_space
from kvfold.utils.errors import SettingError

_forward = local()
_projections: "WeakValueDictionary[int, LayerProjections]" = WeakValueDictionary()
_PROJECTIONS, _HANDLE = "_kvfold_served", "_kvfold_handle"  # of a module, in its __dict__


class LayerProjections:
    """One attention module's maps, as attention sees the layer. handle int64 [1], on the host: a
    number of its own, as code that is compiled for all layers of a class is told of one."""

    numbers: ClassVar[Iterator[int]] = count()

    def __init__(self, maps: Maps, layer: LayerAttention) -> None:
        self.maps, self.layer = maps, layer
        self.entry_maps = None if isinstance(maps, RopeMaps) else _entry_maps(maps, layer)
        self.scale = 1.0  # of its scores, times the plan's
        number = next(self.numbers)
        self.handle = torch.tensor([number])
        _projections[number] = self

    def score_space(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Queries [N, Hq, d], keys [N, Hk, d] and values [N, Hk, dv] of tokens at positions int64
        [N], which keys before RoPE need: queries [Hq, N, r] that score what is stored, and the
        tokens' cache entries [N, R]. k and v may be None where another layer stores them, then
        so are the entries."""
        if self.entry_maps is not None:
            return score_space(self.entry_maps, q, k, v)
        queries = self.maps.queries(q.transpose(0, 1)[None])[0]
        if k is None or v is None:
            return queries, None
        places = None if positions is None else positions[None]
        return queries, self._entries(k.transpose(0, 1)[None], v.transpose(0, 1)[None], places)

    def _entries(self, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        """Of keys [1, Hk, N, d] and values [1, Hk, N, dv] at positions [1, N]: [N, R]."""
        layer = self.layer
        keys, values = (x.transpose(1, 2) for x in self.maps.latents(k, v, positions))
        keys = layer.key_columns.compact(keys).flatten(2)
        if layer.spec.latents[0].side == "kv":
            return keys[0]
        return torch.cat((keys, layer.value_columns.compact(values).flatten(2)), -1)[0]


class StepCache(AttentionContext):
    """Of the step that runs, in the place of a transformers cache: keys and values pass through.
    One for all steps, so that compiled code meets the same one in each."""

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return k, v

    def attend(self, layer: LayerAttention, q: Tensor, rows: Tensor) -> Tensor:
        context = getattr(_forward, "context", None)
        assert context is not None, "an engine's model runs with a context alone"
        out: Tensor = context.attend(layer, q, rows)
        return out


STEP_CACHE = StepCache()


@contextmanager
def forward_context(context: AttentionContext) -> Iterator[StepCache]:
    """Around a forward of a model as of `install`: its attention is the context's."""
    before = getattr(_forward, "context", None)
    _forward.context = context
    try:
        yield STEP_CACHE
    finally:
        _forward.context = before


def check_servable(model: Any, layers: Sequence[AttentionLayer]) -> None:
    """Raises SettingError for attention that no kernel of the engine computes, and for a model that
    keeps a state beside its cache or counts positions itself."""
    if is_recurrent(model):
        raise SettingError(
            f"model type {model.config.model_type!r} has recurrent layers, whose state the engine"
            " does not keep: use kvfold.attach and transformers, or vLLM"
        )
    if "position_ids" not in signature(decoder_of(model).forward).parameters:
        raise SettingError(
            f"model type {model.config.model_type!r} takes no `position_ids`, by which the engine"
            " says where tokens are: use kvfold.attach and transformers"
        )
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if "chunked_attention" in kinds:
        raise SettingError(
            f"model type {model.config.model_type!r} has layers whose tokens see their own chunk of"
            " the sequence alone, which the engine does not know: use kvfold.attach and"
            " transformers"
        )
    for layer in layers:
        check_causal(layer.module, layer.name)
        if layer.source != layer.name:
            raise SettingError(
                f"{layer.name} reads the keys and values of {layer.source}, which the engine does"
                " not know: use kvfold.attach and transformers"
            )


def served_spec(spec: CacheSpec) -> CacheSpec:
    """A plan whose values are mapped back behind attention, as no W_O is at hand."""
    return replace(spec, layers=tuple(replace(x, values="rebuilt") for x in spec.layers))


def served_layer(
    index: int,
    spec: CacheSpec,
    maps: Maps,
    window: int | None,
    sinks: Tensor | None = None,
    tables: dict[bytes, RotaryTable] | None = None,
) -> LayerProjections:
    """A layer of a plan `served_spec` by its number and maps, as attention sees it. window: tokens
    that a query sees (None: all); sinks [Hq]: scores that stand beside a query head's, or None;
    tables: of RoPE by angles, which layers share."""
    layer, tables = spec.layers[index], {} if tables is None else tables
    seen = LayerAttention(
        index=index,
        spec=layer,
        geometry=spec.geometry,
        window=window,
        fixed_rope=True,
        has_sinks=sinks is not None,
        key_columns=Columns(layer, layer.key_latents),
        value_columns=Columns(layer, layer.value_latents),
        value_up=maps.value_up.contiguous(),
        output_maps=_output_maps(maps, layer, spec.geometry),
        output=maps.value_up.new_empty(0),
        sinks=None if sinks is None else sinks.detach().to(maps.value_up.device, torch.float32),
        **_reconstructed(maps, tables),
    )
    return LayerProjections(maps, seen)


def rotated_maps(maps: Maps, layer: LayerSpec, bits: int | None, turns: type[Format]) -> Maps:
    """Maps whose stored numbers are rotated for a format, within the tiers that share a scale."""
    keys, values = (
        [tier_rotation(tiers(x, bits, turns)) for x in latents]
        for latents in (layer.key_latents, layer.value_latents)
    )
    return maps.to(torch.float64).rotated(keys, values)


def install(
    model: Any,
    layers: Sequence[AttentionLayer],
    sidecar: Sidecar,
    spec: CacheSpec,
    bits: int | None,
    turns: type[Format] | None,
) -> list[LayerAttention]:
    """Let a model that is an engine's own attend through contexts. layers: as its original's, by
    name; spec: as `served_spec`; bits: of what is stored, None as planned; turns: the format that
    numbers are rotated for, or None. Returns the layers as attention sees them."""
    found = []
    tables: dict[bytes, RotaryTable] = {}
    for index, (layer, own) in enumerate(zip(layers, spec.layers, strict=True)):
        maps = sidecar.maps[layer.name]
        if turns is not None:
            maps = rotated_maps(maps, own, bits, turns)
        maps = maps.to(model.device, model.dtype)
        served = served_layer(index, spec, maps, layer.window, layer.sinks, tables)
        if layer.scaling is not None:
            served.scale = layer.scaling / spec.geometry.scaling
        module = model.get_submodule(layer.name)
        module.__dict__ |= {_PROJECTIONS: served, _HANDLE: served.handle}
        found.append(served.layer)
    if PAGED not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(PAGED, _attention)
    return found


def _entry_maps(maps: Maps, layer: LayerAttention) -> EntryMaps:
    return EntryMaps(
        key_up=maps.key_up,
        key_down=maps.key_down,
        key_shift=maps.key_shift,
        value_down=maps.value_down,
        value_shift=maps.value_shift,
        key_ranks=tuple(layer.key_columns.ranks),
        value_ranks=tuple(layer.value_columns.ranks),
        head_dim=maps.value_mean.shape[1],
        queries=layer.geometry.queries_per_kv,
    )


def _output_maps(maps: Maps, layer: LayerSpec, geometry: Geometry) -> OutputMaps:
    columns = Columns(layer, layer.value_latents)
    return OutputMaps(
        value_up=maps.value_ups,
        mean=maps.value_mean,
        ranks=tuple(columns.head_ranks(1)),
        queries=geometry.queries_per_kv,
    )


def _reconstructed(maps: Maps, tables: dict[bytes, RotaryTable]) -> dict[str, Any]:
    """What reconstructs keys before RoPE. tables: of layers so far, by their angles."""
    if not isinstance(maps, RopeMaps):
        return {"key_up": None, "key_mean": None, "rope": None}
    angles = maps.rotation.inv_freq.cpu().numpy().tobytes()
    rope = tables.setdefault(angles, RotaryTable(maps.rotation, "default"))
    return {"key_up": maps.key_up.contiguous(), "key_mean": maps.key_mean, "rope": rope}


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    position_ids: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of q [1, Hq, N, d] through the step's context: [1, N, Hq, dv]."""
    how = query, key, value, plain_positions(position_ids), getattr(module, _HANDLE)
    if torch.compiler.is_compiling():
        return torch.ops.kvfold.served_attention(*how), None
    return _attend(*how), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None, handle: Tensor
) -> Tensor:
    """Of the layer with this handle."""
    served = _projections[int(handle)]
    if served.scale != 1:
        query = query * served.scale
    q, entries = served.score_space(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        None if positions is None else positions[0],
    )
    assert entries is not None, "each layer of an engine's model stores its own"
    out = STEP_CACHE.attend(served.layer, q[None], entries[None])
    return out.unflatten(-1, (query.shape[1], -1))


# An operation of PyTorch's, so that torch.compile leaves attention whole, whatever a step needs.
@torch.library.custom_op(
    "kvfold::served_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? positions, Tensor handle) -> Tensor",
)
def _operation(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None, handle: Tensor
) -> Tensor:
    return _attend(query, key, value, positions, handle)


@_operation.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None, handle: Tensor
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
