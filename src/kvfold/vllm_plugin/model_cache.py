"""What a model's tokens store under vLLM: by its config.json and the settings of a server."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from kvfold.config import CacheConfig
from kvfold.hub.checkpoint import KVFoldConfig
from kvfold.layout import CacheSpec
from kvfold.layout.formats import format_of
from kvfold.layout.pages import CacheLayout, cache_layout
from kvfold.maps.engine_model import rotated_maps
from kvfold.maps.layer_maps import Maps
from kvfold.models.families import family_of
from kvfold.vllm_plugin.tensor_parallel import Share

MAPS = "maps"
SERVED = ("bits", "rotate", "sub_group", "zeros")  # of CacheConfig
# The others, and the way out.
REFUSED = {
    "evict": "vLLM has one block table for all heads of a layer, so nothing can be evicted by "
    "head; leave it out, or serve the model with kvfold.LLM",
    "format": "numbers that wait in 16 bits, as kivi's do, fit no block that sequences share; "
    "leave it out, or serve the model with kvfold.LLM",
    "kv_bytes": "vLLM gives the cache its memory: set --gpu-memory-utilization, on a CPU "
    "VLLM_CPU_KVCACHE_SPACE",
    "page": "a page is a block of vLLM's: set --block-size",
}
REFUSED["keep_tokens"] = REFUSED["max_cache_tokens"] = REFUSED["repair"] = REFUSED["evict"]
REFUSED["residual"] = REFUSED["format"]


def settings(given: Any) -> tuple[str | None, CacheConfig]:
    """Maps, if any, and the cache of `--additional-config '{"kvfold": {...}}'`. Raises ValueError
    for what is no such setting, or is not served under vLLM."""
    if not isinstance(given, Mapping):
        raise ValueError(
            f"kvfold in --additional-config must be an object of settings; got {given!r}"
        )
    others = {name: value for name, value in given.items() if name != MAPS}
    for name in others:
        if name not in SERVED:
            why = REFUSED.get(name, "there is no such setting")
            raise ValueError(
                f"kvfold in --additional-config: {name}: {why}. Legal: {', '.join((MAPS, *SERVED))}"
            )
    maps = given.get(MAPS)
    if maps is not None and not isinstance(maps, str):
        raise ValueError(
            f"kvfold in --additional-config: maps must be a folder or a name; got {maps!r}"
        )
    return maps, CacheConfig(**others)


def check_served(vllm_config: Any) -> None:
    """Raises ValueError for features of vLLM's that these caches cannot be used with."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    problem = None
    if cache.cache_dtype != "auto":
        problem = (
            f"--kv-cache-dtype {cache.cache_dtype}: kvfold packs the cache itself; leave it out and"
            ' set bits, as in --additional-config \'{"kvfold": {"bits": 4}}\''
        )
    elif parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        problem = (
            "context parallelism cuts sequences, which kvfold's kernels read whole: leave it out"
        )
    if problem is not None:
        raise ValueError(f"kvfold's plugin for vLLM: {problem}")


@dataclass(frozen=True, eq=False)
class StoredCache:
    """A model's cache. config: transformers', of a folded checkpoint, else None; spec: of the whole
    model; turn: whether numbers that share a scale are rotated at load; dtype: of the model; share:
    of this process."""

    config: Any
    spec: CacheSpec
    turn: bool
    cache: CacheConfig
    dtype: torch.dtype
    share: Share

    @classmethod
    def of(cls, config: Any, cache: CacheConfig, dtype: torch.dtype, share: Share) -> "StoredCache":
        """Raises ValueError for a checkpoint's spec that is damaged, or was made for another model,
        and for heads that the processes cannot share."""
        found = config.quantization_config
        artifact = KVFoldConfig(**found) if isinstance(found, Mapping) else found
        geometry, spec = family_of(config).geometry(config), artifact.spec
        if spec.geometry != geometry:
            raise ValueError(
                f"config.json describes {geometry} but its cache spec was made for "
                f"{spec.geometry}; the checkpoint's files do not belong together"
            )
        if spec.hybrid is not None:
            raise ValueError(
                "this checkpoint's rows have two widths (`hybrid`), and vLLM's blocks hold one: "
                "serve it with kvfold, or compress the model without `hybrid`"
            )
        turn = cache.rotate and ((cache.bits or 16) < 16 or spec.planned)
        for index, layer in enumerate(spec.layers):
            share.check(geometry, layer, index)
        return cls(config, spec, turn, cache, dtype, share)

    @classmethod
    def mapped(
        cls, spec: CacheSpec, cache: CacheConfig, dtype: torch.dtype, share: Share
    ) -> "StoredCache":
        """Of a model with maps beside its weights. spec: as `maps.engine_model.served_spec`. Raises
        ValueError for heads that the processes cannot share."""
        for index, layer in enumerate(spec.layers):
            share.check(spec.geometry, layer, index)
        turn = cache.rotate and ((cache.bits or 16) < 16 or spec.planned)
        return cls(None, spec, turn, cache, dtype, share)

    def turned(self, index: int, maps: Maps) -> Maps:
        """A layer's maps, whose numbers are rotated where they are stored in few bits."""
        if not self.turn:
            return maps
        return rotated_maps(maps, self.spec.layers[index], self.cache.bits, self.format)

    @property
    def format(self) -> Any:
        return format_of(self.cache.format)

    @cached_property
    def own(self) -> CacheSpec:
        """Of this process."""
        return self.share.of_spec(self.spec)

    def layout(self, block: int) -> CacheLayout:
        """The pages of this process, of blocks of so many tokens."""
        return _layout(self, self.share, block)

    def block_bytes(self, layer: int, block: int) -> int:
        """Of a layer's block of so many tokens: equal in all processes, as vLLM wants it, whose
        heads may differ."""
        shares = [Share(rank, self.share.size) for rank in range(self.share.size)]
        found = (_layout(self, share, block).groups_of_layer(layer) for share in shares)
        return max(sum(group.layout.page_bytes for group in groups) for groups in found)


@lru_cache
def _layout(stored: StoredCache, share: Share, block: int) -> CacheLayout:
    cache = stored.cache
    return cache_layout(
        share.of_spec(stored.spec),
        page=block,
        itemsize=stored.dtype.itemsize,
        bits=cache.bits,
        sub_group=cache.sub_group,
        zeros=cache.zeros,
        format=cache.format,
    )
