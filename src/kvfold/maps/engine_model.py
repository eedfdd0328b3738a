"""Run a transformers model with maps in kvfold's engine: an attention function sends its q, k and v
to the step's attention context.

Shapes: N tokens of a step; Hq / Hk query / KV heads, dv head dim of values; R numbers of a cache
entry.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
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
from kvfold.ops.common.recording import Weights
from kvfold.ops.maps import EntryMaps, OutputMaps, score_space
from kvfold.utils.errors import SettingError

_forward = local()
_projections: "WeakValueDictionary[int, LayerProjections]" = WeakValueDictionary()
_PROJECTIONS, _HANDLE = "_kvfold_served", "_kvfold_handle"  # attributes of a module


class LayerProjections:
    """The maps of one attention module, and its description for attention backends.

    handle int64 [1], on the CPU: a unique id. It is an argument of the custom op, so that one graph
    of torch.compile serves all layers of a class.
    """

    numbers: ClassVar[Iterator[int]] = count()

    def __init__(self, maps: Maps, layer: LayerAttention) -> None:
        self.maps, self.layer = maps, layer
        self.entry_maps = None if isinstance(maps, RopeMaps) else _entry_maps(maps, layer)
        self.scale = 1.0  # factor of queries: the module's scaling over the plan's
        self.key_constant: Tensor | None = None  # [Hk, d], see `lack_constant_of`
        number = next(self.numbers)
        self.handle = torch.tensor([number])
        _projections[number] = self

    def lack_constant_of(self, mean: Tensor) -> None:
        """Set what stored keys lack in all tokens, `key_constant`, so that exact keys can lack it,
        too: the shift, and the part of the mean key [Hk, d] that the maps drop. Keys before RoPE
        lack nothing."""
        maps = self.maps
        if not isinstance(maps, RopeMaps):
            mean = mean.to(maps.key_up)
            stored = torch.einsum("hdr,hd->hr", maps.key_down, mean) - maps.key_shift
            self.key_constant = mean - torch.einsum("hdr,hr->hd", maps.key_up, stored)

    @cached_property
    def weights(self) -> Weights | None:
        """All tensors that `score_space` and attention over pages read, in an order that all layers
        share; None for maps whose projections are not recorded (`ops.common.recording`)."""
        maps = self.entry_maps
        if maps is None:
            return None
        tensors = [maps.key_up, maps.key_down, maps.key_shift, maps.value_down, maps.value_shift]
        packed = () if maps.packed is None else maps.packed
        tensors += [x for x in packed if isinstance(x, Tensor)]
        return Weights([*tensors, *self.layer.weights.tensors])

    def score_space(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Project the tokens of a step: queries [N, Hq, d], keys [N, Hk, d] and values [N, Hk, dv]
        at positions int64 [N], which keys before RoPE need.

        Returns queries [Hq, N, r] that score stored keys, and the cache entries [N, R]. k and v are
        None if another layer stores them (vLLM's KV sharing; the engine refuses such models); then
        the entries are None.
        """
        if self.entry_maps is not None:
            return score_space(self.entry_maps, q, k, v)
        queries = self.maps.queries(q.transpose(0, 1)[None])[0]
        if k is None or v is None:
            return queries, None
        batch_positions = None if positions is None else positions[None]
        return queries, self._entries(
            k.transpose(0, 1)[None], v.transpose(0, 1)[None], batch_positions
        )

    def _entries(self, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        """Cache entries [N, R] of keys [1, Hk, N, d] and values [1, Hk, N, dv] at positions [1,
        N]."""
        layer = self.layer
        keys, values = (x.transpose(1, 2) for x in self.maps.latents(k, v, positions))
        keys = layer.key_columns.compact(keys).flatten(2)
        if layer.spec.latents[0].side == "kv":
            return keys[0]
        return torch.cat((keys, layer.value_columns.compact(values).flatten(2)), -1)[0]


class StepCache(AttentionContext):
    """Takes the place of a transformers cache in a step: `update` returns keys and values
    unchanged, and `attend` goes to the context of the current step. One object serves all steps, so
    that compiled code sees the same one each time."""

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return k, v

    def keep_exact(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._current().keep_exact(layer, q, k, v)

    def attend(self, layer: LayerAttention, q: Tensor, entries: Tensor) -> Tensor:
        return self._current().attend(layer, q, entries)

    def _current(self) -> AttentionContext:
        context: AttentionContext | None = getattr(_forward, "context", None)
        assert context is not None, "a model of an engine runs inside `forward_context` only"
        return context


STEP_CACHE = StepCache()


@contextmanager
def forward_context(context: AttentionContext) -> Iterator[StepCache]:
    """Context manager: attention of a model prepared by `install` runs in `context` (as vLLM's
    `set_forward_context`)."""
    previous = getattr(_forward, "context", None)
    _forward.context = context
    try:
        yield STEP_CACHE
    finally:
        _forward.context = previous


def check_servable(model: Any, layers: Sequence[AttentionLayer]) -> None:
    """Raises SettingError for attention that the engine does not compute, for a model with a
    recurrent state, and for one that computes its positions itself."""
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
                " not support: use kvfold.attach and transformers"
            )


def served_spec(spec: CacheSpec) -> CacheSpec:
    """The spec with values="rebuilt": values stay latents, and attention outputs are projected up,
    because the output projection is the model's own."""
    return replace(spec, layers=tuple(replace(x, values="rebuilt") for x in spec.layers))


def served_layer(
    index: int,
    spec: CacheSpec,
    maps: Maps,
    window: int | None,
    sinks: Tensor | None = None,
    tables: dict[bytes, RotaryTable] | None = None,
) -> LayerProjections:
    """The projections of one layer; its `layer` describes them to attention backends.

    index: layer number in `spec`.
    spec: from `served_spec`.
    window: sliding window in tokens (None: full attention).
    sinks [Hq]: learned sink scores, or None.
    tables: RoPE tables by their angles, shared by layers.
    """
    layer, tables = spec.layers[index], {} if tables is None else tables
    description = LayerAttention(
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
    return LayerProjections(maps, description)


def rotated_maps(
    maps: Maps, layer: LayerSpec, bits: int | None, number_format: type[Format]
) -> Maps:
    """Maps whose stored numbers are rotated (Hadamard) for a number format, within the tiers that
    share a scale."""
    keys, values = (
        [tier_rotation(tiers(x, bits, number_format)) for x in latents]
        for latents in (layer.key_latents, layer.value_latents)
    )
    return maps.to(torch.float64).rotated(keys, values)


def install(
    model: Any,
    layers: Sequence[AttentionLayer],
    sidecar: Sidecar,
    spec: CacheSpec,
    bits: int | None,
    hadamard_for: type[Format] | None,
    key_means: Sequence[Tensor] | None = None,
) -> list[LayerAttention]:
    """Install projections and the paged attention function into the engine's own copy of a model,
    in place.

    layers: attention layers of the original model.
    spec: from `served_spec`.
    bits: of stored numbers; None: as planned.
    hadamard_for: the format that stored numbers are rotated for, or None.
    key_means: mean keys [Hk, d] of each layer, for an exact window; None: there is none.

    Returns the layers' descriptions for attention backends.
    """
    descriptions = []
    tables: dict[bytes, RotaryTable] = {}
    for index, (layer, layer_spec) in enumerate(zip(layers, spec.layers, strict=True)):
        maps = sidecar.maps[layer.name]
        if hadamard_for is not None:
            maps = rotated_maps(maps, layer_spec, bits, hadamard_for)
        maps = maps.to(model.device, model.dtype)
        projections = served_layer(index, spec, maps, layer.window, layer.sinks, tables)
        if layer.scaling is not None:
            projections.scale = layer.scaling / spec.geometry.scaling
        if key_means is not None:
            projections.lack_constant_of(key_means[index])
        module = model.get_submodule(layer.name)
        module.__dict__ |= {_PROJECTIONS: projections, _HANDLE: projections.handle}
        descriptions.append(projections.layer)
    if PAGED not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(PAGED, _attention)
    return descriptions


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
    """Fields of `LayerAttention` that reconstruct keys before RoPE. tables: RoPE tables of earlier
    layers, by their angles."""
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
    """Attention function for transformers. Takes q [1, Hq, N, d], attends in the step's context,
    returns [1, N, Hq, dv]."""
    inputs = query, key, value, plain_positions(position_ids), getattr(module, _HANDLE)
    if torch.compiler.is_compiling():
        return torch.ops.kvfold.served_attention(*inputs), None
    return _attend(*inputs), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None, handle: Tensor
) -> Tensor:
    """Attention of the layer with this handle."""
    projections = _projections[int(handle)]
    if projections.scale != 1:
        query = query * projections.scale
    q, entries = projections.score_space(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        None if positions is None else positions[0],
    )
    assert entries is not None, "each layer of an engine's model stores its own"
    constant = projections.key_constant
    exact_key = key if constant is None else key - constant[:, None]
    STEP_CACHE.keep_exact(projections.layer, query, exact_key, value)
    out = STEP_CACHE.attend(projections.layer, q[None], entries[None])
    return out.unflatten(-1, (query.shape[1], -1))


# A custom op, so that torch.compile does not trace into attention.
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
