"""How many requests a GPU holds: its memory less weights and work space, over a request's pages.

Bytes are those of the engine's own layout, so that a pool of them is what an engine allocates.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvfold.cache.eviction import policies
from kvfold.compression.planning.step_time import DEFAULT, DecodeLoad, predict
from kvfold.config import AUTO, CacheConfig
from kvfold.engine.runner.build import check_served, layout_of
from kvfold.engine.runner.repair import state_bytes
from kvfold.layout import CacheSpec
from kvfold.layout.pages import CacheLayout
from kvfold.models.size import DTYPE, weight_bytes
from kvfold.utils.errors import SettingError

MIB, GIB = 2**20, 2**30
GPUS = {  # MiB that nvidia-smi reports
    "t4": 15360,
    "l4": 23034,
    "a10g": 23028,
    "rtx-4090": 24564,
    "a100-40": 40960,
    "l40s": 46068,
    "a100-80": 81920,
    "h100": 81559,
    "h200": 143771,
    "b200": 183359,
}
WORK = 2 * GIB  # beside weights and cache: context, activations, logits, work space of kernels
SLACK = 1.05  # of pages that slabs lose, as `CacheLayout.bytes_for` has it


@dataclass(frozen=True, kw_only=True)
class Room:
    """Of a GPU for a context. requests: that fit while the prompt of one is read; request_bytes: of
    one once its prompt is read; step_ms: predicted, of a decode step of them all."""

    context: int
    kept: int
    requests: int
    request_bytes: int
    step_ms: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """A model's on a GPU with so many bytes, of which `share` may be used. Raises ValueError for a
    cache that cannot serve it.

    config: transformers'; spec: what it stores, None: all.
    """

    config: Any
    spec: CacheSpec | None
    cache: CacheConfig
    gpu_bytes: int
    share: float = 0.9

    def __post_init__(self) -> None:
        if self.cache.evict == AUTO:
            raise SettingError(
                f"`evict={AUTO!r}` is measured on a model's answers, and this reads its config "
                "alone: name a policy, such as 'kvzip'"
            )
        check_served(self.config, self.spec, self._policy, self.cache)

    @property
    def _policy(self) -> Any:
        return policies.get(self.cache.evict) if self.cache.evict else None

    @cached_property
    def layout(self) -> CacheLayout:
        return layout_of(self.config, self.spec, self.cache, self._policy, DTYPE.itemsize, "cuda")

    @property
    def weights(self) -> int:
        return weight_bytes(self.config, self.layout.spec)

    @property
    def pool(self) -> int:
        """Bytes that are left for pages; 0 where there are none."""
        return max(0, int(self.gpu_bytes * self.share) - self.weights - WORK)

    def kept(self, context: int) -> int:
        """Tokens that a request of `context` tokens has stored once its prompt is compressed."""
        cache, policy = self.cache, self._policy
        if policy is None:
            return context
        most = cache.max_cache_tokens or max(1, round((cache.keep_tokens or 1.0) * context))
        return min(context, max(most, policy.sinks + policy.protected_recent(most)))

    def request_bytes(self, tokens: int) -> int:
        """Of the pages of one request that has so many tokens stored."""
        return int(self.layout.sequence_bytes(tokens) * SLACK)

    def _prompt_bytes(self, tokens: int) -> int:
        """The same while its prompt is read, which stores all it has, and is compressed then."""
        layout = self.layout
        pages = -(-tokens // layout.page) * (layout.page_bytes + layout.spare_page_bytes)
        return int((pages + layout.residual_bytes) * SLACK)

    def beside_pages(self, context: int) -> int:
        """Bytes of one request that are no pages: what repair keeps of its prompt."""
        geometry = self.layout.spec.geometry
        return state_bytes(geometry, context, DTYPE.itemsize) if self.cache.repair else 0

    def room(self, context: int) -> Room:
        kept = self.kept(context)
        one, whole = self.request_bytes(kept), self._prompt_bytes(context)
        requests = max(0, (self.pool - (whole - one)) // (one + self.beside_pages(context)))
        step = self._step(requests, kept)
        return Room(
            context=context,
            kept=kept,
            requests=requests,
            request_bytes=one,
            step_ms=step,
            tokens_per_s=None if step is None else 1e3 * requests / step,
        )

    def _step(self, requests: int, kept: int) -> float | None:
        """Milliseconds on the device that coefficients were measured on."""
        if not requests:
            return None
        load = DecodeLoad(batch=requests, context=kept)
        spec = self.layout.spec
        found = predict(self.config, spec, load, bits=self.cache.bits, device=DEFAULT)
        return None if found is None else found.ms
