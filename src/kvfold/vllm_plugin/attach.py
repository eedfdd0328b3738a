"""Maps beside the weights under vLLM: its own models attend through kvfold's cache.

No model class and no weight is replaced. Once vLLM has loaded a model, the attention layers that
have maps get another implementation, another backend and another size of a token's cache entry;
everything else of the model, and how it is split over processes, stays vLLM's.

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

from kvfold.config import CacheConfig
from kvfold.layout import CacheSpec, Geometry
from kvfold.maps.engine_model import LayerProjections, served_layer, served_spec
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import TOKENS
from kvfold.maps.plain import Means, full_spec, mean_positions, plain_maps
from kvfold.maps.sidecar import Sidecar
from kvfold.models.rotary import RotaryTable, position_limit
from kvfold.vllm_plugin.backend import CachedImpl, KVFoldBackend, KVFoldMetadata
from kvfold.vllm_plugin.guard import guard_logits
from kvfold.vllm_plugin.layer import slot_of
from kvfold.vllm_plugin.model_cache import StoredCache, check_served, settings
from kvfold.vllm_plugin.probe import Seen, can_be_asked, layer_device, watch
from kvfold.vllm_plugin.profiling import profile_memory
from kvfold.vllm_plugin.tensor_parallel import Share

PLUGIN = "kvfold's plugin for vLLM"


class MappedImpl(CachedImpl):
    """Attention of one layer over what its maps store.

    stored: the model's cache; index: of the layer in it; served: its maps, for this process; seen:
    of a few tokens, for a trial.
    """

    def __init__(
        self,
        layer: Attention,
        stored: StoredCache,
        index: int,
        served: LayerProjections,
        seen: Seen,
    ) -> None:
        self.num_heads, self.head_size = layer.num_heads, layer.head_size
        self.num_kv_heads, self.scale = layer.num_kv_heads, layer.impl.scale
        self.stored, self.index, self.served = stored, index, served
        self.heads = stored.share.gathered(stored.spec.geometry, stored.spec.layers[index])
        self.reads_only = layer.kv_sharing_target_layer_name is not None
        self.maps = served.layer
        self.seen = seen

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
        may be None where another layer stores them."""
        if attn_metadata is None:
            for blocks, metadata in self.profiled(output, kv_cache):
                self.forward(layer, query, key, value, blocks, metadata, output)
            return output.zero_()
        tokens = attn_metadata.num_tokens
        context = attn_metadata.begin()
        positions = context.positions if self.maps.reconstructs_keys else None
        if not self.reads_only:
            key, value = key[:tokens], value[:tokens]
        q, entries = self.score_space(query[:tokens], key, value, positions)
        context.attend(self.maps, kv_cache, q, entries, output[:tokens].view(tokens, -1))
        return output

    def sample(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tokens that were seen, again and again."""
        index = torch.arange(len(positions), device=positions.device) % len(self.seen.query)
        query, key, value = (x[index] for x in self.seen)
        q, entries = self.score_space(query, key, value, positions)
        assert entries is not None
        return q, entries

    def score_space(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Queries [Hq, N, r] that score stored keys, and the entries [N, R] of tokens at positions
        int64 [N], which keys before RoPE need; None where another layer stores them."""
        if self.reads_only:
            return self.served.score_space(query, None, None)
        return self.served.score_space(query, key, self.gathered(value), positions)

    def gathered(self, value: Tensor) -> Tensor:
        """Values of the heads that this process's latents are made from [N, h, dv]."""
        if self.heads is None:
            return value
        return tensor_model_parallel_all_gather(value.contiguous(), 1)[:, self.heads]


def attach(model: nn.Module, vllm_config: VllmConfig, given: Any) -> None:
    """Let the attention layers of a model that vLLM has loaded store what is given as `kvfold` in
    `--additional-config`. Raises ValueError for maps of another model, and for layers that cannot
    have maps."""
    maps, cache = settings(given)
    check_served(vllm_config)
    layers = dict(attention_layers(model))
    if not layers:
        raise ValueError(
            f"{PLUGIN}: no layer of {type(model).__name__} calls vLLM's attention (its keys and"
            " values are stored otherwise, as those of multi-head latent attention are): leave"
            " kvfold out of --additional-config"
        )
    if maps is None:
        model_config = vllm_config.model_config
        limit = position_limit(model_config.hf_text_config)
        positions = mean_positions(limit or model_config.max_model_len)
        seen = watch(model, vllm_config, layers, positions)
        bind_plain(Binding(layers, seen, vllm_config, cache))
    else:
        seen = watch(model, vllm_config, layers, torch.arange(TOKENS))
        bind(Binding(layers, seen, vllm_config, cache), Sidecar.load(maps))
    profile_memory(vllm_config)
    guard_logits(model, vllm_config.model_config)
    if vllm_config.model_config.is_hybrid:
        start_recurrent_layers(vllm_config)


def start_recurrent_layers(vllm_config: VllmConfig) -> None:
    """Choose the kernels of Mamba's states, which vLLM 0.32 forgets where layers store unlike
    numbers of bytes: it looks for states among groups of layers, and not inside of such groups."""
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend

    layers = get_layers_from_vllm_config(vllm_config, MambaBase)
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in layers.values()]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    initialize_mamba_ssu_backend(vllm_config.mamba_config, SimpleNamespace(kv_cache_groups=groups))


def attention_layers(model: nn.Module) -> Iterator[tuple[int, Attention]]:
    """The decoder's attention layers by number. Raises ValueError where two have the same."""
    seen: dict[int, str] = {}
    for module in model.modules():
        if not isinstance(module, Attention) or module.attn_type != AttentionType.DECODER:
            continue
        if type(module) is not Attention:
            raise ValueError(
                f"{PLUGIN}: {module.layer_name} is a {type(module).__name__}, which kvfold's"
                " kernels do not know: leave kvfold out of --additional-config"
            )
        index = extract_layer_index(module.layer_name)
        if index in seen:
            raise ValueError(
                f"{PLUGIN}: {seen[index]} and {module.layer_name} have the same number, so maps"
                " cannot be told apart; use transformers with kvfold.attach"
            )
        seen[index] = module.layer_name
        yield index, module


class Binding:
    """What gives a model's layers their maps, one after another.

    layers: by number; seen: what each is asked of a few tokens.
    """

    def __init__(
        self,
        layers: Mapping[int, Attention],
        seen: Mapping[int, Seen],
        vllm_config: VllmConfig,
        cache: CacheConfig,
    ) -> None:
        self.layers, self.seen, self.config, self.cache = layers, seen, vllm_config, cache
        self.share = Share(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        self.mixed = stores_unlike(layers.values(), vllm_config)
        self.tables: dict[bytes, RotaryTable] = {}

    def stored(self, spec: CacheSpec) -> StoredCache:
        """The cache of a plan as of `StoredCache.mapped`. Raises ValueError."""
        return StoredCache.mapped(spec, self.cache, self.config.model_config.dtype, self.share)

    def readers(self, number: int) -> dict[int, Attention]:
        """The layers by number that read what a layer stores, itself included."""
        return {x: layer for x, layer in self.layers.items() if source_of(x, layer) == number}

    def give(self, number: int, stored: StoredCache, index: int, maps: Maps) -> None:
        """A layer's maps, number `index` of the cache, to all that read what it stores."""
        for reader, layer in self.readers(number).items():
            _give(layer, stored, index, maps, self.seen[reader], self.mixed, self.tables)


def bind(binding: Binding, sidecar: Sidecar) -> None:
    """Give layers the maps of a sidecar. Raises ValueError."""
    layers, vllm_config = binding.layers, binding.config
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    stored = binding.stored(served_spec(sidecar.spec))
    places = {extract_layer_index(x): (index, x) for index, x in enumerate(sidecar.maps)}
    own = set(places)
    if parallel.pipeline_parallel_size > 1:
        own &= set(range(*model_config.get_layers_start_end_indices(parallel)))
    if left := sorted(own - set(layers)):
        raise ValueError(
            f"{PLUGIN}: maps were made for {places[left[0]][1]}, which is no attention layer that"
            f" vLLM gives a cache of keys and values; it has layers {sorted(layers)}: take the maps"
            " of this model"
        )
    geometry = stored.spec.geometry
    for number in own:
        for layer in binding.readers(number).values():
            check_heads(layer, geometry, binding.share, places[number][1])
            check_servable(layer)
    if can_be_asked(vllm_config) and own:
        heads = geometry.num_kv_heads
        sidecar.check_base({places[x][1]: binding.seen[x].of_all(heads) for x in own})
    for number in own:
        index, name = places[number]
        binding.give(number, stored, index, sidecar.maps[name])


def bind_plain(binding: Binding) -> None:
    """Give all layers maps that drop nothing, for a cache of few bits. Raises ValueError."""
    layers, vllm_config = binding.layers, binding.config
    kinds: dict[Geometry, list[int]] = defaultdict(list)
    for number, layer in layers.items():
        check_servable(layer)
        if source_of(number, layer) == number:
            kinds[geometry_of(layer, vllm_config)].append(number)
    for geometry, numbers in kinds.items():
        stored = binding.stored(full_spec(geometry, len(numbers)))
        for index, number in enumerate(numbers):
            keys, values = binding.seen[number].of_all(geometry.num_kv_heads)
            means = Means.of(
                keys,
                values,
                capped=geometry.softcap is not None,
                sinks=getattr(layers[number].impl, "sinks", None) is not None,
            )
            if not can_be_asked(vllm_config):
                means = Means(means.keys * 0, means.values * 0)
            binding.give(number, stored, index, plain_maps(means))


def source_of(number: int, layer: Attention) -> int:
    """The layer whose keys and values a layer reads, itself in most models, by number."""
    target = layer.kv_sharing_target_layer_name
    return number if target is None else extract_layer_index(target)


def stores_unlike(layers: Iterable[Attention], vllm_config: VllmConfig) -> bool:
    """Whether a model's layers store states, or windows, beside whole sequences, each for itself:
    vLLM 0.32 does not start where they share them in blocks that hold all layers."""
    layers = list(layers)
    windows = {layer.sliding_window for layer in layers}
    if any(layer.kv_sharing_target_layer_name is not None for layer in layers):
        return False
    return bool(vllm_config.model_config.is_hybrid) or len(windows) > 1


def geometry_of(layer: Attention, vllm_config: VllmConfig) -> Geometry:
    """Of all processes' heads."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model_config.get_total_num_kv_heads()
    size = parallel.tensor_parallel_size
    if max(1, heads // size) != layer.num_kv_heads:  # layers unlike the model's config
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


def _give(
    layer: Attention,
    stored: StoredCache,
    index: int,
    maps: Maps,
    seen: Seen,
    mixed: bool,
    tables: dict[bytes, RotaryTable],
) -> None:
    """One layer's maps become its attention. tables: of RoPE, which layers share."""
    stock = layer.impl
    spec, share = stored.spec, stored.share
    own = stored.own
    geometry = replace(
        own.geometry,
        scaling=stock.scale,
        softcap=getattr(stock, "logits_soft_cap", None) or None,
    )
    served = served_layer(
        index,
        CacheSpec(geometry=geometry, layers=own.layers),
        share.of_maps(stored.turned(index, maps), spec.geometry, spec.layers[index]).to(
            layer_device(), stored.dtype
        ),
        layer.sliding_window,
        getattr(stock, "sinks", None),
        tables,
    )
    layer.impl = MappedImpl(layer, stored, index, served, seen)
    layer.attn_backend = backend_of(stored, mixed)
    layer.kv_cache_dtype, layer.query_quant = "auto", None
    layer.get_kv_cache_spec = lambda config: cache_spec(layer, config)


def backend_of(stored: StoredCache, mixed: bool) -> type[KVFoldBackend]:
    """A backend for all layers of one kind: vLLM gives layers of one backend that store as many
    bytes the same metadata. mixed: whether other layers of the model store something else, such as
    states or windows."""
    name = f"{KVFoldBackend.__name__}_{id(stored):x}"
    base = BlockwiseBackend if mixed else KVFoldBackend
    return type(name, (base,), {"__module__": __name__})


class BlockwiseBackend(KVFoldBackend):
    """Asks vLLM for blocks that hold all layers, one after another. In its default layout, layers
    that store fewer bytes than others would be padded to as many."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        from vllm.v1.kv_cache_interface import KVCacheLayout  # from 0.28 on

        return KVCacheLayout.BLHNC, KVCacheLayout.LBHNC


def cache_spec(layer: Attention, vllm_config: VllmConfig) -> KVCacheSpec:
    """What vLLM allocates for a layer with maps: opaque bytes a token."""
    impl = layer.impl
    assert isinstance(impl, MappedImpl)
    slot = slot_of(impl.stored, impl.index, vllm_config)
    if layer.sliding_window is not None:
        return SlidingWindowSpec(sliding_window=layer.sliding_window, **slot)
    return FullAttentionSpec(**slot)


def check_heads(layer: Attention, geometry: Geometry, share: Share, name: str) -> None:
    """Raises ValueError where a layer's heads are not those that its maps were made for."""
    heads = len(share.queries(geometry)), len(share.heads(geometry))
    wanted = (*heads, geometry.head_dim)
    has = layer.num_heads, layer.num_kv_heads, layer.head_size
    if wanted != has:
        raise ValueError(
            f"{PLUGIN}: maps of {name} are for {wanted[0]} query heads, {wanted[1]} KV heads and"
            f" {wanted[2]} numbers a head in this process; {layer.layer_name} has {has[0]},"
            f" {has[1]} and {has[2]}: take the maps of this model"
        )


def check_servable(layer: Attention) -> None:
    """Raises ValueError for attention that no kernel of kvfold's computes."""
    stock = layer.impl
    if getattr(stock, "alibi_slopes", None) is not None:
        raise ValueError(
            f"{PLUGIN}: {layer.layer_name} adds biases of ALiBi to its scores, which kvfold's"
            " kernels do not know; use transformers with kvfold.attach"
        )
    if layer.head_size_v != layer.head_size:
        raise ValueError(
            f"{PLUGIN}: keys of {layer.layer_name} have {layer.head_size} numbers a head and values"
            f" {layer.head_size_v}; kvfold serves heads alike: leave kvfold out of"
            " --additional-config"
        )
