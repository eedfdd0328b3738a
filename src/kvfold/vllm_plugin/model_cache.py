"""The compressed cache of a model under vLLM: its spec, its settings and its size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from kvfold.config import PAGE, CacheConfig
from kvfold.hub.checkpoint import KVFoldConfig
from kvfold.layout import CacheSpec
from kvfold.layout.formats import format_of
from kvfold.layout.pages import UNIT, CacheLayout, cache_layout, with_window
from kvfold.maps.engine_model import rotated_maps
from kvfold.maps.layer_maps import Maps
from kvfold.models.families import family_of
from kvfold.vllm_plugin.connectors import check_connectors
from kvfold.vllm_plugin.tensor_parallel import ProcessShare

MAPS = "maps"
SERVED = ("bits", "rotate", "sub_group", "zeros", "window")  # supported fields of CacheConfig
# Fields that are not supported: the reason, and the way out.
REFUSED = {
    "evict": "vLLM has one block table for all heads of a layer, so heads cannot evict "
    "different tokens; leave it out, or serve the model with kvfold.LLM",
    "format": "tokens that wait in 16 bits until they are packed, as with kivi, need blocks that "
    "no other sequence shares; leave it out, or serve the model with kvfold.LLM",
    "kv_bytes": "vLLM gives the cache its memory: set --gpu-memory-utilization, on a CPU "
    "VLLM_CPU_KVCACHE_SPACE",
    "page": "a page is a block of vLLM: set --block-size",
}
REFUSED["keep_tokens"] = REFUSED["max_cache_tokens"] = REFUSED["repair"] = REFUSED["evict"]
REFUSED["residual"] = REFUSED["format"]
EXACT_BLOCK = 16  # exact tokens of a block, with a window


def parse_settings(config: Any) -> tuple[str | None, CacheConfig]:
    """The maps (None: none) and the cache settings of `--additional-config '{"kvfold": {...}}'`.

    Raises ValueError for unknown settings, and for those that are not supported under vLLM.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"kvfold in --additional-config must be an object of settings; got {config!r}"
        )
    cache_settings = {name: value for name, value in config.items() if name != MAPS}
    for name in cache_settings:
        if name not in SERVED:
            why = REFUSED.get(name, "there is no such setting")
            raise ValueError(
                f"kvfold in --additional-config: {name}: {why}. Legal: {', '.join((MAPS, *SERVED))}"
            )
    maps = config.get(MAPS)
    if maps is not None and not isinstance(maps, str):
        raise ValueError(
            f"kvfold in --additional-config: maps must be a folder or a name; got {maps!r}"
        )
    return maps, CacheConfig(**cache_settings)


def check_served(vllm_config: Any) -> None:
    """Raises ValueError for vLLM features that do not work with a compressed cache."""
    check_connectors(vllm_config)
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    problem = None
    if cache.cache_dtype != "auto":
        problem = (
            f"--kv-cache-dtype {cache.cache_dtype}: kvfold packs the cache itself; leave it out and"
            ' set bits, as in --additional-config \'{"kvfold": {"bits": 4}}\''
        )
    elif parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        problem = (
            "context parallelism splits sequences, and kvfold's kernels need whole ones: leave it "
            "out"
        )
    if problem is not None:
        raise ValueError(f"kvfold's plugin for vLLM: {problem}")


@dataclass(frozen=True, eq=False)
class ModelCache:
    """A model's compressed cache.

    config: the transformers config of a folded checkpoint; None for a model with maps.
    spec: of the whole model.
    rotate: whether stored numbers that share a scale are rotated (Hadamard).
    cache: the user's settings.
    dtype: of the model.
    share: this process's part under tensor parallelism.
    """

    config: Any
    spec: CacheSpec
    rotate: bool
    cache: CacheConfig
    dtype: torch.dtype
    share: ProcessShare

    @classmethod
    def from_checkpoint(
        cls, config: Any, cache: CacheConfig, dtype: torch.dtype, share: ProcessShare
    ) -> "ModelCache":
        """The cache of a folded checkpoint. config: its transformers config.

        Raises ValueError for a damaged cache spec, for the spec of another model, and for heads
        that cannot be divided between the processes.
        """
        saved = config.quantization_config
        artifact = KVFoldConfig(**saved) if isinstance(saved, Mapping) else saved
        geometry, spec = family_of(config).geometry(config), artifact.spec
        if spec.geometry != geometry:
            raise ValueError(
                f"config.json describes {geometry} but its cache spec was made for "
                f"{spec.geometry}; the checkpoint's files do not belong together"
            )
        if spec.hybrid is not None:
            raise ValueError(
                "this checkpoint's cache entries have two widths (`hybrid`), and vLLM's blocks "
                "support only one: serve it with kvfold, or compress the model without `hybrid`"
            )
        rotate = cache.rotate and ((cache.bits or 16) < 16 or spec.planned)
        for index, layer in enumerate(spec.layers):
            share.check(geometry, layer, index)
        return cls(config, spec, rotate, cache, dtype, share)

    @classmethod
    def from_maps(
        cls, spec: CacheSpec, cache: CacheConfig, dtype: torch.dtype, share: ProcessShare
    ) -> "ModelCache":
        """The cache of a model with maps. spec: a result of `maps.engine_model.served_spec`.

        Raises ValueError for heads that cannot be divided between the processes.
        """
        for index, layer in enumerate(spec.layers):
            share.check(spec.geometry, layer, index)
        rotate = cache.rotate and ((cache.bits or 16) < 16 or spec.planned)
        return cls(None, spec, rotate, cache, dtype, share)

    def rotated(self, index: int, maps: Maps) -> Maps:
        """A layer's maps, rotated if the cache rotates what it stores."""
        if not self.rotate:
            return maps
        return rotated_maps(maps, self.spec.layers[index], self.cache.bits, self.format)

    @property
    def format(self) -> Any:
        return format_of(self.cache.format)

    @cached_property
    def local_spec(self) -> CacheSpec:
        """The spec of this process's heads."""
        return self.share.local_spec(self.spec)

    def layout(self, block_size: int) -> CacheLayout:
        """The pages of this process. block_size: tokens of a block."""
        return _layout(self, self.share, block_size)

    def check_compressed(self) -> None:
        """Raises ValueError for an exact window beside entries that are exact themselves."""
        layout = self.layout(PAGE)
        assert layout.exact is not None
        if layout.bits_per_token >= layout.exact.bits_per_token:
            raise ValueError(
                f"kvfold's plugin for vLLM: window={self.cache.window} keeps the last tokens"
                " exactly beside compressed ones, and here all tokens keep all numbers in 16 bits:"
                " set bits to 8 or fewer, or leave `window` out"
            )

    def block_size(self, block_size: int) -> int:
        """Tokens of a block of entries. block_size: of vLLM's config; with a window it is a
        multiple of it, whose entries take as many bytes as EXACT_BLOCK exact tokens."""
        size = block_size
        if self.cache.window:
            exact = self._exact_bytes(size) * len(self.spec.layers)
            while sum(_entry_bytes(self, size)) < exact:
                size += block_size
        return size

    def shared_block_bytes(self, block_size: int) -> int:
        """Bytes of a block of all layers, with a window. block_size: tokens of a block of
        entries."""
        whole = math.lcm(UNIT, block_size)
        return -(-sum(_entry_bytes(self, block_size)) // whole) * whole

    def blocks_of_layer(
        self, entries: Tensor, exact: Tensor, layer: int, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """A layer's part of blocks [.., bytes] of entries and of exact tokens, with a window."""
        sizes = _entry_bytes(self, block_size)
        first, size = sum(sizes[:layer]), self._exact_bytes(block_size)
        entries, exact = entries.flatten(1), exact.flatten(1)
        return entries[:, first : first + sizes[layer]], exact[:, layer * size : (layer + 1) * size]

    def _exact_bytes(self, block_size: int) -> int:
        """Bytes of a layer's block of exact tokens."""
        exact = self.layout(block_size).exact
        assert exact is not None
        return sum(group.layout.page_bytes for group in exact.groups_of_layer(0))

    def block_bytes(self, layer: int, block_size: int) -> int:
        """Bytes of a layer's block. vLLM wants all processes to have the same, so it is the largest
        of all processes."""
        shares = [ProcessShare(rank, self.share.size) for rank in range(self.share.size)]
        groups = (_layout(self, share, block_size).groups_of_layer(layer) for share in shares)
        return max(
            sum(group.layout.page_bytes for group in share_groups) for share_groups in groups
        )


@lru_cache
def _entry_bytes(model_cache: ModelCache, block_size: int) -> tuple[int, ...]:
    """Bytes of each layer's block."""
    layers = range(len(model_cache.spec.layers))
    return tuple(model_cache.block_bytes(i, block_size) for i in layers)


@lru_cache
def _layout(model_cache: ModelCache, share: ProcessShare, block_size: int) -> CacheLayout:
    cache, itemsize = model_cache.cache, model_cache.dtype.itemsize
    layout = cache_layout(
        share.local_spec(model_cache.spec),
        page=block_size,
        itemsize=itemsize,
        bits=cache.bits,
        sub_group=cache.sub_group,
        zeros=cache.zeros,
        format=cache.format,
    )
    return with_window(layout, cache.window, itemsize, EXACT_BLOCK) if cache.window else layout
