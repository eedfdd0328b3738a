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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from kvfold.config import CacheConfig
from kvfold.models.finite import probe_ids
from kvfold.models.rotary import RotaryTable
from kvfold.seam.layers import TOKENS
from kvfold.seam.maps import Maps
from kvfold.seam.plain import Means, full_spec, mean_positions, plain_maps
from kvfold.seam.served import Served, served_layer, served_spec
from kvfold.seam.sidecar import Sidecar
from kvfold.spec import CacheSpec, Geometry
from kvfold.vllm_plugin.backend import CachedImpl, KVFoldBackend, KVFoldMetadata
from kvfold.vllm_plugin.guard import guard_logits
from kvfold.vllm_plugin.layer import slot_of
from kvfold.vllm_plugin.shares import Share
from kvfold.vllm_plugin.stored import StoredCache, check_served, settings

PLUGIN = "kvfold's plugin for vLLM"


class Seen(NamedTuple):
    """What a layer's attention is asked of a few tokens, by the heads of this process: query
    [N, Hq, d], key [N, Hk, d], value [N, Hk, dv]."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, layer: Attention, device: torch.device) -> "Seen":
        make = torch.Generator(device).manual_seed(0)
        shapes = (
            (layer.num_heads, layer.head_size),
            (layer.num_kv_heads, layer.head_size),
            (layer.num_kv_heads, layer.head_size_v),
        )
        return cls(
            *(
                torch.randn(TOKENS, *x, generator=make, device=device).to(layer.dtype)
                for x in shapes
            )
        )

    def of_all(self, heads: int) -> tuple[Tensor, Tensor]:
        """Keys [heads, N, d] and values [heads, N, dv] of all processes' KV heads."""
        size = get_tensor_model_parallel_world_size()
        every = max(1, size // heads)  # so many processes have the same head
        key, value = self.key, self.value
        if size > 1:
            key, value = (tensor_model_parallel_all_gather(x, 1)[:, ::every] for x in (key, value))
        return key.transpose(0, 1), value.transpose(0, 1)


class Recorder:
    """In the place of an attention's implementation: attention that gives nothing, and keeps what
    it was asked."""

    seen: Seen

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        output: Tensor,
        **__: Any,
    ) -> Tensor:
        if key is None:  # another layer's
            key = value = query[:, :0]
        self.seen = Seen(query.clone(), key.clone(), value.clone())
        return output.zero_()


class MappedImpl(CachedImpl):
    """Attention of one layer over what its maps store.

    stored: the model's cache; index: of the layer in it; served: its maps, for this process; seen:
    of a few tokens, for a trial.
    """

    def __init__(
        self, layer: Attention, stored: StoredCache, index: int, served: Served, seen: Seen
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
        if attn_metadata is None:  # memory is measured, before there are blocks
            return output.zero_()
        tokens = attn_metadata.num_tokens
        context = attn_metadata.begin()
        positions = context.positions if self.maps.rebuilds_keys else None
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
        limit = getattr(model_config.hf_text_config, "max_position_embeddings", None)
        positions = mean_positions(limit or model_config.max_model_len)
        seen = watch(model, vllm_config, layers, positions)
        bind_plain(layers, seen, vllm_config, cache)
    else:
        seen = watch(model, vllm_config, layers, torch.arange(TOKENS))
        bind(layers, seen, Sidecar.load(maps), vllm_config, cache)
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


@torch.inference_mode()
def watch(
    model: nn.Module, vllm_config: VllmConfig, layers: Mapping[int, Attention], positions: Tensor
) -> dict[int, Seen]:
    """What layers by number are asked of the tokens `probe_ids`, where attention gives nothing in
    any layer, as `seam.layers.seam_layers` asks a model of transformers. positions
    int64 [N]: of the tokens. Random numbers stand for it where nothing can be asked."""
    model_config, device = vllm_config.model_config, layer_device()
    if not can_be_asked(vllm_config):
        return {number: Seen.random(layer, device) for number, layer in layers.items()}
    ids = torch.tensor(probe_ids(model_config.get_vocab_size(), len(positions)), device=device)
    positions = positions.to(device)
    if model_config.uses_mrope:
        positions = positions.expand(3, -1)
    stock = {number: layer.impl for number, layer in layers.items()}
    recorders = {number: Recorder() for number in layers}
    try:
        for number, layer in layers.items():
            layer.impl = recorders[number]
        with set_forward_context(None, vllm_config, num_tokens=len(ids), skip_compiled=True):
            model(input_ids=ids, positions=positions)
    finally:
        for number, layer in layers.items():
            layer.impl = stock[number]
    return {number: recorder.seen for number, recorder in recorders.items()}


def can_be_asked(vllm_config: VllmConfig) -> bool:
    """Whether a model can run before it has a cache: not one with recurrent layers, nor a part of
    one (pipeline parallelism)."""
    parts = vllm_config.parallel_config.pipeline_parallel_size
    return parts == 1 and not vllm_config.model_config.is_hybrid


def bind(
    layers: Mapping[int, Attention],
    seen: Mapping[int, Seen],
    sidecar: Sidecar,
    vllm_config: VllmConfig,
    cache: CacheConfig,
) -> None:
    """Give layers by number the maps of a sidecar. Raises ValueError."""
    share = Share(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    stored = StoredCache.mapped(served_spec(sidecar.spec), cache, model_config.dtype, share)
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
    tables: dict[bytes, RotaryTable] = {}
    geometry, mixed = stored.spec.geometry, stores_unlike(layers.values(), vllm_config)
    told = can_be_asked(vllm_config)
    for number in own:
        check_heads(layers[number], geometry, share, places[number][1])
        check_servable(layers[number])
    if told and own:
        heads = geometry.num_kv_heads
        sidecar.check_base({places[x][1]: seen[x].of_all(heads) for x in own})
    for number, layer in layers.items():
        source = source_of(number, layer)
        if source in own:
            index, name = places[source]
            _give(layer, stored, index, sidecar.maps[name], seen[number], mixed, tables)


def bind_plain(
    layers: Mapping[int, Attention],
    seen: Mapping[int, Seen],
    vllm_config: VllmConfig,
    cache: CacheConfig,
) -> None:
    """Give all layers by number maps that drop nothing, for a cache of few bits. Raises
    ValueError."""
    share = Share(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
    mixed = stores_unlike(layers.values(), vllm_config)
    kinds: dict[Geometry, list[int]] = defaultdict(list)
    tables: dict[bytes, RotaryTable] = {}
    for number, layer in layers.items():
        check_servable(layer)
        if source_of(number, layer) == number:
            kinds[geometry_of(layer, vllm_config)].append(number)
    for geometry, numbers in kinds.items():
        spec = full_spec(geometry, len(numbers))
        stored = StoredCache.mapped(spec, cache, vllm_config.model_config.dtype, share)
        for index, number in enumerate(numbers):
            keys, values = seen[number].of_all(geometry.num_kv_heads)
            means = Means.of(
                keys,
                values,
                capped=geometry.softcap is not None,
                sinks=getattr(layers[number].impl, "sinks", None) is not None,
            )
            if not can_be_asked(vllm_config):
                means = Means(means.keys * 0, means.values * 0)
            maps = plain_maps(means)
            for reader, layer in layers.items():
                if source_of(reader, layer) == number:
                    _give(layer, stored, index, maps, seen[reader], mixed, tables)


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


def layer_device() -> torch.device:
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)


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
