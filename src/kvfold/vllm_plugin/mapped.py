"""Maps beside the weights under vLLM: its own models attend through kvfold's cache.

No model class and no weight is replaced. Once vLLM has loaded a model, the attention layers that
have maps get another implementation, another backend and another size of a token's cache entry;
everything else of the model, and how it is split over processes, stays vLLM's.

Shapes: N tokens of a step; Hq / Hk query / KV heads of this process, d, dv head dims of keys and
values; R numbers of a token's cache entry.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from kvfold.config import CacheConfig
from kvfold.models.finite import probe_ids
from kvfold.seam.layers import TOKENS
from kvfold.seam.maps import Maps
from kvfold.seam.served import Served, served_layer, served_spec
from kvfold.seam.sidecar import Sidecar
from kvfold.spec import CacheSpec, Geometry
from kvfold.vllm_plugin.backend import CachedImpl, KVFoldBackend, KVFoldMetadata
from kvfold.vllm_plugin.shares import Share
from kvfold.vllm_plugin.stored import StoredCache, check_served, settings

PLUGIN = "kvfold's plugin for vLLM"


class MappedImpl(CachedImpl):
    """Attention of one layer over what its maps store.

    stored: the model's cache; index: of the layer in it; served: its maps, for this process; share:
    which heads are this process's; reads_only: whether another layer stores its keys and values.
    """

    def __init__(
        self, layer: Attention, stored: StoredCache, index: int, served: Served, reads_only: bool
    ) -> None:
        self.num_heads, self.head_size = layer.num_heads, layer.head_size
        self.num_kv_heads, self.scale = layer.num_kv_heads, layer.impl.scale
        self.stored, self.index, self.served = stored, index, served
        self.heads = stored.share.gathered(stored.spec.geometry, stored.spec.layers[index])
        self.reads_only = reads_only
        self.maps = served.layer
        self.watched = False
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None  # of a step without a cache

    def forward(
        self,
        layer: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KVFoldMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [N, Hq, d], key [N, Hk, d], value [N, Hk, dv] -> output [N, Hq, dv]."""
        if attn_metadata is None:  # memory is measured, before there are blocks
            if self.watched:
                self.seen = query.clone(), key.clone(), value.clone()
            return output.zero_()
        tokens = attn_metadata.num_tokens
        q, entries = self.score_space(query[:tokens], key[:tokens], value[:tokens])
        attended = output.new_empty(tokens, output.shape[1] * output.shape[2])
        attn_metadata.begin().attend(self.maps, kv_cache, q, entries, attended)
        output[:tokens] = attended.view(tokens, *output.shape[1:]) + self.means
        return output

    def sample(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tokens that were seen, again and again."""
        assert self.seen is not None, "no step was watched"
        index = torch.arange(len(positions), device=positions.device) % len(self.seen[0])
        q, entries = self.score_space(*(x[index] for x in self.seen))
        assert entries is not None
        return q, entries

    def seen_of_all(self) -> tuple[Tensor, Tensor]:
        """Keys [Hk, N, d] and values [Hk, N, dv] that were seen, of all processes' heads."""
        assert self.seen is not None, "no step was watched"
        size, heads = self.stored.share.size, self.stored.spec.geometry.num_kv_heads
        if size == 1:
            return self.seen[1].transpose(0, 1), self.seen[2].transpose(0, 1)
        from vllm.distributed import tensor_model_parallel_all_gather

        key, value = (tensor_model_parallel_all_gather(x, 1) for x in self.seen[1:])
        step = max(1, size // heads)  # processes with the same head
        return key[:, ::step].transpose(0, 1), value[:, ::step].transpose(0, 1)

    @property
    def means(self) -> Tensor:
        """What is added to each query head's output [Hq, dv]."""
        maps = self.served.maps
        return maps.value_mean.repeat_interleave(self.num_heads // maps.num_heads, 0)

    def score_space(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Queries [Hq, N, r] that score stored keys, and the tokens' cache entries [N, R], None
        where another layer stores them."""
        q = self.served.maps.queries(query.transpose(0, 1)[None])[0]
        if self.reads_only:
            return q, None
        value = self.gathered(value)
        entries = self.served.rows(key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        return q, entries[0]

    def gathered(self, value: Tensor) -> Tensor:
        """Values of the heads that this process's latents are made from [N, h, dv]."""
        if self.heads is None:
            return value
        from vllm.distributed import tensor_model_parallel_all_gather

        return tensor_model_parallel_all_gather(value.contiguous(), 1)[:, self.heads]


def attach(model: nn.Module, vllm_config: VllmConfig, given: Any) -> None:
    """Let the attention layers of a model that vLLM has loaded store what is given as `kvfold` in
    `--additional-config`. Raises ValueError for maps of another model, and for
    layers that cannot have maps."""
    model_config = vllm_config.model_config
    maps, cache = settings(given)
    check_served(vllm_config)
    layers = dict(attention_layers(model))
    if maps is None:
        raise NotImplementedError
    sidecar = Sidecar.load(maps)
    names = bind(layers, sidecar, vllm_config, cache)
    watch(model, vllm_config, {name: layer.impl for name, layer in names.items()})
    if vllm_config.parallel_config.pipeline_parallel_size == 1 and not model_config.is_hybrid:
        for name, layer in names.items():
            sidecar.check_base(name, *layer.impl.seen_of_all())


def attention_layers(model: nn.Module) -> Iterator[tuple[int, Attention]]:
    """The decoder's attention layers by number. Raises ValueError where two have the same."""
    seen: dict[int, str] = {}
    for module in model.modules():
        if not isinstance(module, Attention) or module.attn_type != AttentionType.DECODER:
            continue
        index = extract_layer_index(module.layer_name)
        if index in seen:
            raise ValueError(
                f"{PLUGIN}: {seen[index]} and {module.layer_name} have the same number, so maps"
                " cannot be told apart; use transformers with kvfold.attach"
            )
        seen[index] = module.layer_name
        yield index, module


@torch.inference_mode()
def watch(model: nn.Module, vllm_config: VllmConfig, impls: Mapping[str, MappedImpl]) -> None:
    """Let layers see their own queries, keys and values of the tokens by which a base is told,
    where attention gives nothing."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise NotImplementedError
    device = layer_device()
    ids = torch.tensor(probe_ids(model_config.get_vocab_size(), TOKENS), device=device)
    positions = torch.arange(TOKENS, device=device)
    if model_config.uses_mrope:
        positions = positions.expand(3, -1)
    for impl in impls.values():
        impl.watched = True
    try:
        with set_forward_context(None, vllm_config, num_tokens=TOKENS, skip_compiled=True):
            model(input_ids=ids, positions=positions)
    finally:
        for impl in impls.values():
            impl.watched = False


def bind(
    layers: Mapping[int, Attention], sidecar: Sidecar, vllm_config: VllmConfig, cache: CacheConfig
) -> dict[str, Attention]:
    """Give layers by number the maps of a sidecar; returns them by the names of their maps. Raises
    ValueError."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    share = Share(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
    stored = StoredCache.mapped(
        served_spec(sidecar.spec), cache, vllm_config.model_config.dtype, share
    )
    places = {_number(name): (index, name) for index, name in enumerate(sidecar.maps)}
    if left := sorted(set(places) - set(layers)):
        raise ValueError(
            f"{PLUGIN}: maps were made for {places[left[0]][1]}, which is no attention layer that"
            f" vLLM gives a cache of keys and values; it has layers {sorted(layers)}: take the maps"
            " of this model"
        )
    for number, (index, name) in places.items():
        layer = layers[number]
        check_heads(layer, stored.spec.geometry, share, name)
        _give(layer, stored, index, sidecar.maps[name])
    return {name: layers[number] for number, (_, name) in places.items()}


def _number(name: str) -> int:
    """Of a layer, in its module's name."""
    return extract_layer_index(name)


def _give(layer: Attention, stored: StoredCache, index: int, maps: Maps) -> None:
    """One layer's maps become its attention."""
    stock = layer.impl
    spec, share = stored.spec, stored.share
    own = share.of_spec(spec)
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
    )
    reads_only = layer.kv_sharing_target_layer_name is not None
    layer.impl = MappedImpl(layer, stored, index, served, reads_only)
    layer.attn_backend = KVFoldBackend
    layer.kv_cache_dtype, layer.query_quant = "auto", None
    layer.get_kv_cache_spec = lambda config: cache_spec(layer, config)


def layer_device() -> torch.device:
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)


def cache_spec(layer: Attention, vllm_config: VllmConfig) -> KVCacheSpec:
    """What vLLM allocates for a layer with maps: opaque bytes a token."""
    impl = layer.impl
    assert isinstance(impl, MappedImpl)
    block = vllm_config.cache_config.block_size
    slot: dict[str, Any] = {
        "block_size": block,
        "num_kv_heads": 1,
        "head_size": impl.stored.block_bytes(impl.index, block) // block,
        "head_size_v": 0,
        "dtype": torch.int8,
    }
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
    stock = layer.impl
    if getattr(stock, "alibi_slopes", None) is not None:
        raise ValueError(
            f"{PLUGIN}: {layer.layer_name} adds biases of ALiBi to its scores, which kvfold's"
            " kernels do not know; use transformers with kvfold.attach"
        )
    if getattr(stock, "sinks", None) is not None:
        raise ValueError(
            f"{PLUGIN}: {layer.layer_name} has sinks beside its scores, which kvfold's kernels do"
            " not know; use transformers with kvfold.attach"
        )


def mapped_layers(model: nn.Module) -> Iterator[AttentionLayerBase]:
    """A model's layers that have maps."""
    for module in model.modules():
        if isinstance(module, Attention) and isinstance(module.impl, MappedImpl):
            yield module
