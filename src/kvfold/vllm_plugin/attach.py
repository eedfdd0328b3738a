"""Attach maps to vLLM's own models: their attention then reads and writes kvfold's cache.

No model class and no weight is replaced. After vLLM has loaded a model, the attention layers with
maps get another implementation, another backend and another size of a token's cache entry.
Everything else, and how the model is split over processes, stays vLLM's.

Shapes: N tokens of a step; Hq / Hk query / KV heads of this process, d, dv head dims of keys and
values; R numbers of a token's cache entry.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from kvfold.attention.window import ExactTokens
from kvfold.config import CacheConfig
from kvfold.layout import CacheSpec, Geometry
from kvfold.maps.engine_model import LayerProjections, served_layer, served_spec
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import TOKENS
from kvfold.maps.plain import Means, full_spec, mean_positions, plain_maps
from kvfold.maps.sidecar import Sidecar
from kvfold.models.rotary import RotaryTable, position_limit
from kvfold.vllm_plugin.backend import CachedImpl, KVFoldBackend, KVFoldMetadata
from kvfold.vllm_plugin.exact import check_window, exact_blocks, share_blocks
from kvfold.vllm_plugin.guard import guard_logits
from kvfold.vllm_plugin.layer import slot_fields
from kvfold.vllm_plugin.model_cache import ModelCache, check_served, parse_settings
from kvfold.vllm_plugin.probe import AttentionInputs, can_probe, layer_device, record_inputs
from kvfold.vllm_plugin.profiling import profile_memory
from kvfold.vllm_plugin.tensor_parallel import ProcessShare

PLUGIN = "kvfold's plugin for vLLM"


class MappedImpl(CachedImpl):
    """Attention of one layer with maps.

    model_cache: the model's cache.
    index: of the layer in it.
    projections: the layer's maps, for this process.
    inputs: recorded ones for a few tokens, for the trial.
    """

    def __init__(
        self,
        layer: Attention,
        model_cache: ModelCache,
        index: int,
        projections: LayerProjections,
        inputs: AttentionInputs,
    ) -> None:
        self.num_heads, self.head_size = layer.num_heads, layer.head_size
        self.num_kv_heads, self.scale = layer.num_kv_heads, layer.impl.scale
        self.model_cache, self.index, self.projections = model_cache, index, projections
        spec = model_cache.spec
        self.heads = model_cache.share.gathered_heads(spec.geometry, spec.layers[index])
        self.reads_only = layer.kv_sharing_target_layer_name is not None
        self.maps = projections.layer
        self.inputs = inputs

    def forward(
        self,
        layer: Attention,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Tensor,
        attn_metadata: KVFoldMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [N, Hq, d], key [N, Hk, d], value [N, Hk, dv] -> output [N, Hq, dv]. key and value
        may be None if another layer stores them."""
        if attn_metadata is None:
            for blocks, metadata in self.profiling_steps(output, kv_cache):
                self.forward(layer, query, key, value, blocks, metadata, output)
            return output.zero_()
        tokens, has_window = attn_metadata.num_tokens, self.model_cache.cache.window > 0
        context = attn_metadata.begin(exact_blocks if has_window else None)
        positions = context.positions if self.maps.reconstructs_keys else None
        if not self.reads_only:
            key, value = key[:tokens], value[:tokens]
        query, out = query[:tokens], output[:tokens].view(tokens, -1)
        exact = exact_cache = None
        if attn_metadata.exact is not None:
            kv_cache, exact_cache = self.model_cache.blocks_of_layer(
                kv_cache, attn_metadata.exact.cache, self.index, context.view.layout.page
            )
            exact = self.exact_tokens(query, key, value)
        context.project_and_attend(
            self.maps,
            kv_cache,
            lambda: self.score_space(query, key, value, positions),
            [query] if self.reads_only else [query, key, value],
            self.projections.weights if self.heads is None else None,  # no gathering is recorded
            out,
            exact,
            exact_cache,
        )
        return output

    def sample_inputs(self, positions: Tensor) -> tuple[Tensor, Tensor, ExactTokens | None]:
        """The recorded inputs, repeated."""
        index = torch.arange(len(positions), device=positions.device) % len(self.inputs.query)
        query, key, value = (x[index] for x in self.inputs)
        q, entries = self.score_space(query, key, value, positions)
        assert entries is not None
        has_window = self.model_cache.cache.window > 0
        return q, entries, self.exact_tokens(query, key, value) if has_window else None

    def score_space(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Queries [Hq, N, r] in score space, and cache entries [N, R] (None if another layer stores
        them). positions int64 [N]: of the tokens, for keys stored before RoPE."""
        if self.reads_only:
            return self.projections.score_space(query, None, None)
        return self.projections.score_space(query, key, self.gather_values(value), positions)

    def exact_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> ExactTokens:
        """Keys lack the constants that stored keys lack."""
        constant = self.projections.key_constant
        if constant is not None:
            key = key - constant
        return ExactTokens(*(x.transpose(0, 1) for x in (query, key, value)))

    def gather_values(self, value: Tensor) -> Tensor:
        """Values [N, h, dv] of all heads that this process's value latents depend on."""
        if self.heads is None:
            return value
        return tensor_model_parallel_all_gather(value.contiguous(), 1)[:, self.heads]


def attach(model: nn.Module, vllm_config: VllmConfig, settings: Any) -> None:
    """Attach maps to the attention layers of a model that vLLM has loaded.

    settings: `kvfold` in `--additional-config`.

    Raises ValueError for maps of another model, and for layers that cannot have maps.
    """
    maps, cache = parse_settings(settings)
    check_served(vllm_config)
    layers = dict(attention_layers(model))
    if not layers:
        raise ValueError(
            f"{PLUGIN}: no layer of {type(model).__name__} calls vLLM's attention (it stores keys"
            " and values in another way, as multi-head latent attention does): leave kvfold out of"
            " --additional-config"
        )
    if cache.window:
        check_window(cache.window, layers.values(), vllm_config)
    if maps is None or cache.window:
        model_config = vllm_config.model_config
        limit = position_limit(model_config.hf_text_config)
        positions = mean_positions(limit or model_config.max_model_len)
        spread = record_inputs(model, vllm_config, layers, positions)
    if maps is None:
        attach_plain_maps(MapsBinding(layers, spread, vllm_config, cache))
    else:
        inputs = record_inputs(model, vllm_config, layers, torch.arange(TOKENS))
        attach_sidecar(MapsBinding(layers, inputs, vllm_config, cache), Sidecar.load(maps))
    if cache.window:
        attach_window(cache.window, layers, spread, vllm_config)
    profile_memory(vllm_config)
    guard_logits(model, vllm_config.model_config)
    if vllm_config.model_config.is_hybrid:
        start_recurrent_layers(vllm_config)


def start_recurrent_layers(vllm_config: VllmConfig) -> None:
    """Choose the kernels of Mamba states.

    vLLM 0.32 fails to do so if layers store different numbers of bytes: it looks for states only at
    the top level of the cache groups, and then they are nested.
    """
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend

    layers = get_layers_from_vllm_config(vllm_config, MambaBase)
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in layers.values()]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    initialize_mamba_ssu_backend(vllm_config.mamba_config, SimpleNamespace(kv_cache_groups=groups))


def attention_layers(model: nn.Module) -> Iterator[tuple[int, Attention]]:
    """The decoder's attention layers by number. Raises ValueError if two have the same number."""
    names: dict[int, str] = {}
    for module in model.modules():
        if not isinstance(module, Attention) or module.attn_type != AttentionType.DECODER:
            continue
        if type(module) is not Attention:
            raise ValueError(
                f"{PLUGIN}: {module.layer_name} is a {type(module).__name__}, which kvfold's"
                " kernels do not support: leave kvfold out of --additional-config"
            )
        index = extract_layer_index(module.layer_name)
        if index in names:
            raise ValueError(
                f"{PLUGIN}: {names[index]} and {module.layer_name} have the same number, so their"
                " maps cannot be told apart; use transformers with kvfold.attach"
            )
        names[index] = module.layer_name
        yield index, module


class MapsBinding:
    """Attaches maps to a model's layers.

    layers: by number.
    inputs: of each layer, for a few tokens.
    """

    def __init__(
        self,
        layers: Mapping[int, Attention],
        inputs: Mapping[int, AttentionInputs],
        vllm_config: VllmConfig,
        cache: CacheConfig,
    ) -> None:
        self.layers, self.inputs, self.config, self.cache = layers, inputs, vllm_config, cache
        self.share = ProcessShare(
            get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        )
        self.blockwise = needs_blockwise(layers.values(), vllm_config)
        self.tables: dict[bytes, RotaryTable] = {}

    def model_cache(self, spec: CacheSpec) -> ModelCache:
        """The cache of layers with this spec. Raises ValueError."""
        return ModelCache.from_maps(spec, self.cache, self.config.model_config.dtype, self.share)

    def readers(self, number: int) -> dict[int, Attention]:
        """The layers by number that read what layer `number` stores, itself included."""
        return {x: layer for x, layer in self.layers.items() if source_layer(x, layer) == number}

    def attach_maps(self, number: int, model_cache: ModelCache, index: int, maps: Maps) -> None:
        """Attach the maps of layer `number`, which is layer `index` of the cache, to all layers
        that read what it stores."""
        for reader, layer in self.readers(number).items():
            _attach_layer(
                layer, model_cache, index, maps, self.inputs[reader], self.blockwise, self.tables
            )


def attach_sidecar(binding: MapsBinding, sidecar: Sidecar) -> None:
    """Attach the maps of a sidecar. Raises ValueError."""
    layers, vllm_config = binding.layers, binding.config
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    model_cache = binding.model_cache(served_spec(sidecar.spec))
    places = {extract_layer_index(x): (index, x) for index, x in enumerate(sidecar.maps)}
    numbers = set(places)
    if parallel.pipeline_parallel_size > 1:
        numbers &= set(range(*model_config.get_layers_start_end_indices(parallel)))
    if missing := sorted(numbers - set(layers)):
        raise ValueError(
            f"{PLUGIN}: maps were made for {places[missing[0]][1]}, which is no attention layer"
            f" with a KV cache in vLLM; the model has layers {sorted(layers)}: take the maps of"
            " this model"
        )
    geometry = model_cache.spec.geometry
    for number in numbers:
        for layer in binding.readers(number).values():
            check_heads(layer, geometry, binding.share, places[number][1])
            check_servable(layer)
    if can_probe(vllm_config) and numbers:
        heads = geometry.num_kv_heads
        sidecar.check_base({places[x][1]: binding.inputs[x].all_heads(heads) for x in numbers})
    for number in numbers:
        index, name = places[number]
        binding.attach_maps(number, model_cache, index, sidecar.maps[name])


def attach_plain_maps(binding: MapsBinding) -> None:
    """Attach maps that drop no dimensions to all layers, for a low-bit cache. Raises ValueError."""
    layers, vllm_config = binding.layers, binding.config
    kinds: dict[Geometry, list[int]] = defaultdict(list)
    for number, layer in layers.items():
        check_servable(layer)
        if source_layer(number, layer) == number:
            kinds[geometry_of(layer, vllm_config)].append(number)
    for geometry, numbers in kinds.items():
        model_cache = binding.model_cache(full_spec(geometry, len(numbers)))
        for index, number in enumerate(numbers):
            keys, values = binding.inputs[number].all_heads(geometry.num_kv_heads)
            means = Means.of(
                keys,
                values,
                capped=geometry.softcap is not None,
                sinks=getattr(layers[number].impl, "sinks", None) is not None,
            )
            if not can_probe(vllm_config):
                means = Means(means.keys * 0, means.values * 0)
            binding.attach_maps(number, model_cache, index, plain_maps(means))


def attach_window(
    window: int,
    layers: Mapping[int, Attention],
    inputs: Mapping[int, AttentionInputs],
    vllm_config: VllmConfig,
) -> None:
    """Give layers with maps blocks of exact tokens. inputs: of tokens that are far apart.

    Raises ValueError for a model some of whose layers have no maps, or maps of another cache.
    """
    impls = {number: layer.impl for number, layer in layers.items()}
    mapped = {x: impl for x, impl in impls.items() if isinstance(impl, MappedImpl)}
    caches = {id(impl.model_cache): impl.model_cache for impl in mapped.values()}
    if len(mapped) < len(layers) or len(caches) > 1:
        raise ValueError(
            f"{PLUGIN}: window={window}: some layers of this model have no maps, or other heads"
            " than others, and with an exact window all layers must store alike: leave `window` out"
        )
    (model_cache,) = caches.values()
    model_cache.check_compressed()
    for number, impl in mapped.items():
        key, value = (x.transpose(0, 1) for x in (inputs[number].key, inputs[number].value))
        means = Means.of(key, value, capped=False, sinks=impl.maps.has_sinks)
        impl.projections.lack_constant_of(means.keys)
    share_blocks({x.layer_name: x for x in layers.values()}, model_cache, vllm_config)


def source_layer(number: int, layer: Attention) -> int:
    """The number of the layer whose keys and values a layer reads: in most models its own."""
    target = layer.kv_sharing_target_layer_name
    return number if target is None else extract_layer_index(target)


def needs_blockwise(layers: Iterable[Attention], vllm_config: VllmConfig) -> bool:
    """Whether blocks of vLLM should hold all layers, one after another (`BlockwiseBackend`).

    True if some layers store recurrent states or windows instead of whole sequences. False if
    layers share keys and values: vLLM 0.32 then does not start with such blocks.
    """
    layers = list(layers)
    windows = {layer.sliding_window for layer in layers}
    if any(layer.kv_sharing_target_layer_name is not None for layer in layers):
        return False
    return bool(vllm_config.model_config.is_hybrid) or len(windows) > 1


def geometry_of(layer: Attention, vllm_config: VllmConfig) -> Geometry:
    """The geometry of a layer, with the heads of all processes."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model_config.get_total_num_kv_heads()
    size = parallel.tensor_parallel_size
    if max(1, heads // size) != layer.num_kv_heads:  # the layer differs from the model's config
        heads = layer.num_kv_heads * size
    return Geometry(
        hidden_size=model_config.get_hidden_size(),
        num_query_heads=layer.num_heads * size,
        num_kv_heads=heads,
        head_dim=layer.head_size,
        num_layers=0,
        rope=True,
        key_norm=True,
        scaling=layer.impl.scale,
        softcap=getattr(layer.impl, "logits_soft_cap", None) or None,
    )


def _attach_layer(
    layer: Attention,
    model_cache: ModelCache,
    index: int,
    maps: Maps,
    inputs: AttentionInputs,
    blockwise: bool,
    tables: dict[bytes, RotaryTable],
) -> None:
    """Replace one layer's attention. tables: RoPE tables that layers share."""
    original_impl = layer.impl
    spec, share = model_cache.spec, model_cache.share
    local_spec = model_cache.local_spec
    geometry = replace(
        local_spec.geometry,
        scaling=original_impl.scale,
        softcap=getattr(original_impl, "logits_soft_cap", None) or None,
    )
    projections = served_layer(
        index,
        CacheSpec(geometry=geometry, layers=local_spec.layers),
        share.local_maps(model_cache.rotated(index, maps), spec.geometry, spec.layers[index]).to(
            layer_device(), model_cache.dtype
        ),
        layer.sliding_window,
        getattr(original_impl, "sinks", None),
        tables,
    )
    layer.impl = MappedImpl(layer, model_cache, index, projections, inputs)
    layer.attn_backend = backend_of(model_cache, blockwise)
    layer.kv_cache_dtype, layer.query_quant = "auto", None
    layer.get_kv_cache_spec = lambda config: cache_spec(layer, config)


def backend_of(model_cache: ModelCache, blockwise: bool) -> type[KVFoldBackend]:
    """An attention backend class for layers with the same cache.

    vLLM gives the same metadata to layers that have one backend and store the same number of bytes,
    so each cache needs a class of its own. blockwise: as `needs_blockwise`.
    """
    name = f"{KVFoldBackend.__name__}_{id(model_cache):x}"
    base = BlockwiseBackend if blockwise else KVFoldBackend
    return type(name, (base,), {"__module__": __name__})


class BlockwiseBackend(KVFoldBackend):
    """Asks vLLM for blocks that hold all layers, one after another. In vLLM's default layout,
    layers that store fewer bytes than others are padded."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        from vllm.v1.kv_cache_interface import KVCacheLayout  # from 0.28 on

        return KVCacheLayout.BLHNC, KVCacheLayout.LBHNC


def cache_spec(layer: Attention, vllm_config: VllmConfig) -> KVCacheSpec:
    """What vLLM allocates for a layer with maps: opaque bytes per token."""
    impl = layer.impl
    assert isinstance(impl, MappedImpl)
    fields = slot_fields(impl.model_cache, impl.index, vllm_config)
    if layer.sliding_window is not None:
        return SlidingWindowSpec(sliding_window=layer.sliding_window, **fields)
    return FullAttentionSpec(**fields)


def check_heads(layer: Attention, geometry: Geometry, share: ProcessShare, name: str) -> None:
    """Raises ValueError if a layer's heads differ from those that its maps were made for."""
    heads = len(share.query_heads(geometry)), len(share.kv_heads(geometry))
    wanted = (*heads, geometry.head_dim)
    actual = layer.num_heads, layer.num_kv_heads, layer.head_size
    if wanted != actual:
        raise ValueError(
            f"{PLUGIN}: maps of {name} are for {wanted[0]} query heads, {wanted[1]} KV heads and"
            f" {wanted[2]} numbers a head in this process; {layer.layer_name} has {actual[0]},"
            f" {actual[1]} and {actual[2]}: take the maps of this model"
        )


def check_servable(layer: Attention) -> None:
    """Raises ValueError for attention that kvfold's kernels do not support."""
    original_impl = layer.impl
    if getattr(original_impl, "alibi_slopes", None) is not None:
        raise ValueError(
            f"{PLUGIN}: {layer.layer_name} adds ALiBi biases to its scores, which kvfold's"
            " kernels do not support; use transformers with kvfold.attach"
        )
    if layer.head_size_v != layer.head_size:
        raise ValueError(
            f"{PLUGIN}: keys of {layer.layer_name} have {layer.head_size} numbers per head and"
            f" values {layer.head_size_v}; kvfold needs heads of one size: leave kvfold out of"
            " --additional-config"
        )
