"""Computes how many requests fit on a GPU: its memory minus weights and workspace, over the bytes
of a request's pages.

Bytes follow from the engine's layout, so that an engine allocates a pool of this size.
"""

import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from kvfold.cache.eviction import policies
from kvfold.compression.planning.step_time import DEFAULT, DecodeLoad, Prediction, predict
from kvfold.config import AUTO, CacheConfig
from kvfold.engine.runner.build import check_served, check_sidecar_cache, layout_of
from kvfold.engine.runner.repair import state_bytes
from kvfold.layout import CacheSpec
from kvfold.layout.pages import CacheLayout, plain_spec
from kvfold.maps.engine_model import served_spec
from kvfold.maps.plain import full_spec
from kvfold.maps.sidecar import Sidecar
from kvfold.models.families import family_of
from kvfold.models.size import DTYPE, weight_bytes
from kvfold.utils.errors import SettingError

MIB, GIB = 2**20, 2**30
GPUS = {  # MiB, as nvidia-smi reports
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
SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?(GB|GiB)", re.IGNORECASE)
WORK = 2 * GIB  # CUDA context, activations, logits and workspace of kernels
SLACK = 1.05  # pages lost to the granularity of slabs, as in `CacheLayout.bytes_for`


@dataclass(frozen=True, kw_only=True)
class Room:
    """What fits for a context of so many tokens. num_kept: tokens stored after compression.
    requests: how many fit while the prompt of one of them is prefilled. request_bytes: of one after
    its prefill. step_ms: predicted time of a decode step of all of them, or of as many as asked
    for, roughly if `step_estimated`; tokens_per_s: of that step."""

    context: int
    num_kept: int
    requests: int
    request_bytes: int
    step_ms: float | None
    step_estimated: bool
    tokens_per_s: float | None

    def record(self) -> dict[str, Any]:
        """Convert to plain values; `num_kept` has the key `kept`."""
        values = asdict(self)
        return {"context": values.pop("context"), "kept": values.pop("num_kept"), **values}


@dataclass(frozen=True, kw_only=True)
class GPUMemory:
    """How many requests of a model fit on a GPU.

    config: of transformers. spec: what the model's cache stores; None: uncompressed. share: of
    gpu_bytes that may be used. map_numbers: numbers of the maps beside the weights, with which the
    cache stores `spec` (None: the weights store it). Raises ValueError if the cache cannot serve
    the model.
    """

    config: Any
    spec: CacheSpec | None
    cache: CacheConfig
    gpu_bytes: int
    share: float = 0.9
    map_numbers: int | None = None

    @classmethod
    def of_maps(cls, maps: Sidecar, **settings: Any) -> "GPUMemory":
        """For a model with maps. settings: the other fields. Raises SettingError for maps that
        leave out layers with other heads, whose sizes the maps do not have."""
        tensors = (x for layer in maps.maps.values() for x in layer.tensors().values())
        numbers = sum(x.numel() for x in tensors)
        return cls(spec=_spec_of_all_layers(maps), map_numbers=numbers, **settings)

    @classmethod
    def of_plan(cls, spec: CacheSpec, **settings: Any) -> "GPUMemory":
        """For a model with the maps of a plan. settings: the other fields."""
        latents = [x for layer in spec.layers for x in layer.latents]
        widths = [len(x.heads) * spec.geometry.head_width(x.side) for x in latents]
        numbers = sum(w * (2 * x.rank + 1) for w, x in zip(widths, latents, strict=True))
        return cls(spec=spec, map_numbers=numbers, **settings)

    def __post_init__(self) -> None:
        if self.map_numbers is not None:
            check_sidecar_cache(self.cache)
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

    @cached_property
    def weights(self) -> int:
        if self.map_numbers is None:
            return weight_bytes(self.config, self.layout.spec)
        original = plain_spec(family_of(self.config).geometry(self.config))
        return weight_bytes(self.config, original) + DTYPE.itemsize * self.map_numbers

    @property
    def pool(self) -> int:
        """Bytes that are left for pages; 0 if there are none."""
        return max(0, int(self.gpu_bytes * self.share) - self.weights - WORK)

    def num_kept(self, context: int) -> int:
        """Tokens that a request of `context` tokens stores once its prompt is compressed."""
        cache, policy = self.cache, self._policy
        if policy is None:
            return context
        most = cache.max_cache_tokens or max(1, round((cache.keep_tokens or 1.0) * context))
        return min(context, max(most, policy.sinks + policy.protected_recent(most)))

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the pages of a request that stores `tokens` tokens."""
        return int(self.layout.sequence_bytes(tokens) * SLACK)

    def _prompt_bytes(self, tokens: int) -> int:
        """Bytes of its pages during prefill, when every token is stored until the compression."""
        layout = self.layout
        pages = -(-tokens // layout.page) * (layout.page_bytes + layout.spare_page_bytes)
        return int((pages + layout.residual_bytes + layout.window_bytes) * SLACK)

    def beside_pages(self, context: int) -> int:
        """Bytes per request outside of pages: what repair keeps of the prompt."""
        geometry = self.layout.spec.geometry
        return state_bytes(geometry, context, DTYPE.itemsize) if self.cache.repair else 0

    def room(self, context: int, sequences: int | None = None, timed: bool = True) -> Room:
        """What fits, for requests of `context` tokens. sequences: in the step whose time is
        predicted, of those that fit (None: all). timed: whether to predict it."""
        num_kept = self.num_kept(context)
        one, prefilling = self.request_bytes(num_kept), self._prompt_bytes(context)
        free = self.pool - (prefilling - one)
        requests = max(0, free // (one + self.beside_pages(context)))
        batch = min(requests, sequences or requests)
        step = self._step(batch, num_kept) if timed else None
        return Room(
            context=context,
            num_kept=num_kept,
            requests=requests,
            request_bytes=one,
            step_ms=None if step is None else step.ms,
            step_estimated=step is not None and step.estimated,
            tokens_per_s=None if step is None else 1e3 * batch / step.ms,
        )

    def _step(self, batch: int, num_kept: int) -> Prediction | None:
        """The predicted time of a decode step on the device DEFAULT. Steps with maps beside the
        weights take as long as with folded ones (docs/lab/qwen.md)."""
        if not batch:
            return None
        load = DecodeLoad(batch=batch, context=num_kept)
        spec = self.layout.spec
        return predict(self.config, spec, load, bits=self.cache.bits, device=DEFAULT)


def gpu_bytes(gpu: str) -> int:
    """Bytes of memory of a GPU: a name of GPUS, or a size such as 24GB. Raises SettingError."""
    if gpu.lower() in GPUS:
        return GPUS[gpu.lower()] * MIB
    match = SIZE.fullmatch(gpu)
    size = float(match[1]) * (GIB if "i" in match[2].lower() else 10**9) if match else 0.0
    if size < 1:
        raise SettingError(
            f"`gpu` must be one of {', '.join(GPUS)}, or a size such as 24GB or 22.5GiB; got"
            f" {gpu!r:.100}"
        )
    return int(size)


def _spec_of_all_layers(maps: Sidecar) -> CacheSpec:
    """What all layers of a model with maps store: those without maps store full keys and values.
    Raises SettingError for layers with other heads."""
    if unlike := (maps.provenance.get("left") or {}).get("unlike"):
        raise SettingError(
            f"`maps` have none for {unlike[0]}, whose heads are others than those of the layers"
            " with maps: the engine does not serve such a model, and vLLM says at its start how"
            " many tokens fit"
        )
    planned = dict(zip(maps.maps, maps.spec.layers, strict=True))
    geometry = replace(maps.spec.geometry, num_layers=len(maps.base))
    (full_layer,) = full_spec(geometry, 1).layers
    layers = tuple(planned.get(name, full_layer) for name in maps.base)
    return served_spec(replace(maps.spec, layers=layers, geometry=geometry))
