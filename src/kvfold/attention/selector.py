"""Select the attention backend of each layer: the first that supports it, chosen once when a model
is loaded, logged and never switched.

A layer has one backend for decoding, one for prefill chunks, and one for chunks whose queries are
observed. A *part* of a step is the set of tokens of one attention call, of one of these kinds.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvfold.attention.backend import AttentionBackend, Task
from kvfold.attention.base import LayerAttention, LayerShape
from kvfold.attention.coarse import CoarseDecode, NumbaCoarseDecode
from kvfold.attention.cpu_paged import CpuPaged
from kvfold.attention.fallback import Fallback
from kvfold.attention.hybrid import MixedRankAttention, MixedRankKernels
from kvfold.attention.metadata import AttentionMetadata, CacheView, PoolView
from kvfold.attention.numba_decode import NumbaDecode
from kvfold.attention.triton_decode import LatentDecode, TritonDecode
from kvfold.attention.triton_prefill import TritonPrefill
from kvfold.layout.pages import CacheLayout, Group
from kvfold.ops.backend import GPU, use_triton
from kvfold.ops.common.pieces import CODES, latents_of

# In order of preference; the last supports everything.
DECODE: tuple[type[AttentionBackend], ...] = (
    TritonDecode,
    LatentDecode,
    NumbaDecode,
    CpuPaged,
    Fallback,
)
PREFILL: tuple[type[AttentionBackend], ...] = (TritonPrefill, Fallback)
# Those of DECODE that read any `CacheView` and can `weigh`: for exact windows and vLLM's blocks.
WEIGHING: tuple[type[AttentionBackend], ...] = (TritonDecode, LatentDecode, NumbaDecode, Fallback)
HYBRID = (MixedRankKernels, MixedRankAttention)  # for caches with two ranks
COARSE = (NumbaCoarseDecode, CoarseDecode)  # for decoding sequences with demoted entries
PLAIN = (Fallback, MixedRankAttention)  # plain PyTorch, on any device
SERVED = "8, 4 and 2 bits have kernels, alone or planned together"
NEEDS_WEIGHTS = "the policy makes scores of weights, which no kernel writes"
EVEN = "a recipe that keeps as much of every head, such as fast with align=8, does"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a layer. rejected: backends of higher preference, and why each does not
    support the layer."""

    backend: type[AttentionBackend]
    rejected: Mapping[str, str]


def select(
    layer: LayerShape,
    groups: Sequence[Group],
    task: Task,
    among: Sequence[type[AttentionBackend]] | None = None,
) -> BackendChoice:
    """The first backend that supports a layer with these groups. Does not touch the device.

    among: candidates in order of preference, of which the last supports everything; by default all.
    """
    rejected: dict[str, str] = {}
    for backend in among or (DECODE if task.decode else PREFILL):
        if task.needs_weights and not backend.returns_weights:
            reason: str | None = NEEDS_WEIGHTS
        else:
            reason = backend.unsupported_reason(layer, groups, task)
        if reason is None:
            return BackendChoice(backend, rejected)
        rejected[backend.__name__] = reason
    raise AssertionError("the last backend serves everything")


def choose_backends(
    layers: Sequence[LayerShape],
    layout: CacheLayout,
    device_type: str,
    dtype: torch.dtype,
    among: Sequence[type[AttentionBackend]] = WEIGHING,
    *,
    decode: bool = True,
) -> dict[int, type[AttentionBackend]]:
    """The backend of each layer, by layer number: as `select`. Warns of layers that decode in plain
    PyTorch on a GPU. dtype: of queries."""
    task = Task(decode=decode, observed=False, device_type=device_type, dtype=dtype)
    groups = [layout.groups_of_layer(x.index) for x in layers]
    choices = [select(x, y, task, among) for x, y in zip(layers, groups, strict=True)]
    if decode:
        warn_of_fallback(layers, groups, choices, task)
    return {x.index: y.backend for x, y in zip(layers, choices, strict=True)}


class Backends:
    """The backends of layers for parts of one kind, as `choose_backends` chooses them. kinds: by
    layer."""

    def __init__(
        self,
        view: CacheView,
        layers: Sequence[LayerAttention],
        among: Sequence[type[AttentionBackend]] = WEIGHING,
        *,
        decode: bool = True,
    ) -> None:
        self.view, where = view, (view.layout, view.device.type, view.dtype)
        self.kinds = choose_backends(layers, *where, among, decode=decode)
        self.make = {
            kind: kind.prepare(view, [x for x in layers if self.kinds[x.index] is kind], None)
            for kind in set(self.kinds.values())
        }

    @property
    def supports_graphs(self) -> bool:
        return all(kind.supports_graphs for kind in self.kinds.values())

    def begin(self, view: CacheView | None = None) -> dict[int, AttentionBackend]:
        """The backends of a step, by layer. view: of the step, if each has its own."""
        backends = {kind: make(view or self.view) for kind, make in self.make.items()}
        return {index: backends[kind] for index, kind in self.kinds.items()}


@dataclass(frozen=True)
class SelectedBackends:
    """The chosen backends by layer: for decoding, for prefill, for prefill chunks whose queries are
    observed, and for decoding sequences with demoted entries (empty: none are demoted)."""

    decode: tuple[type[AttentionBackend], ...]
    prefill: tuple[type[AttentionBackend], ...]
    observed: tuple[type[AttentionBackend], ...]
    coarse: tuple[type[AttentionBackend], ...] = ()

    @classmethod
    def select_all(cls, layers: Sequence[LayerAttention], view: PoolView) -> "SelectedBackends":
        """Choose a backend for each layer of a model, and log it."""
        groups, device = _groups(view.layout), view.device.type
        backends = []
        for decode, observed in ((True, view.observes_decodes), (False, False), (False, True)):
            needs_weights = observed and view.needs_weights
            task = Task(
                decode=decode,
                observed=observed,
                device_type=device,
                dtype=view.dtype,
                needs_weights=needs_weights,
            )
            choices = _choices(layers, view.layout, task)
            if decode or not observed or view.observing is not None:
                _log(task, choices)
            if decode and (needs_weights or view.pool.layout.kept_fraction < 1):
                warn_of_fallback(layers, groups, choices, task)
            backends.append(tuple(choice.backend for choice in choices))
        if _demotes(view.layout):
            task = Task(decode=True, observed=False, device_type=device, dtype=view.dtype)
            choices = _choices(layers, view.layout, task, COARSE)
            backends.append(tuple(choice.backend for choice in choices))
        return cls(*backends)

    def for_part(self, part: AttentionMetadata) -> tuple[type[AttentionBackend], ...]:
        if part.decode:
            return self.coarse if self.coarse and part.coarse is not None else self.decode
        return self.prefill if part.prompt_lengths is None else self.observed


def _demotes(layout: CacheLayout) -> bool:
    """Whether entries may be demoted to fewer bits."""
    return layout.coarse is not None and layout.spec.hybrid is None


def _groups(layout: CacheLayout, both: bool = False) -> list[tuple[Group, ...]]:
    """Groups of each layer; those of the coarse pool too with two ranks, or if `both`."""
    coarse = layout.coarse if both or not _demotes(layout) else None
    indices = range(len(layout.spec.layers))
    return [
        layout.groups_of_layer(i) + (coarse.groups_of_layer(i) if coarse else ()) for i in indices
    ]


def _choices(
    layers: Sequence[LayerShape],
    layout: CacheLayout,
    task: Task,
    among: Sequence[type[AttentionBackend]] | None = None,
) -> list[BackendChoice]:
    """The choice for each layer."""
    groups = _groups(layout, both=among is not None)
    if among is None and layout.spec.hybrid is not None:
        among = HYBRID
    return [
        select(x, layer_groups, task, among) for x, layer_groups in zip(layers, groups, strict=True)
    ]


def _log(task: Task, choices: Sequence[BackendChoice]) -> None:
    what = f"{'observed ' if task.observed else ''}{'decode' if task.decode else 'prefill'}"
    for layer, choice in enumerate(choices):
        reasons = "".join(f"; not {x}: {why}" for x, why in choice.rejected.items())
        logger.info("layer %d, %s: %s%s", layer, what, choice.backend.__name__, reasons)


def warn_of_fallback(
    layers: Sequence[LayerShape],
    groups: Sequence[Sequence[Group]],
    choices: Sequence[BackendChoice],
    task: Task,
) -> None:
    """Warn once if layers decode in plain PyTorch on a GPU: why the first of them does, and which
    setting avoids it."""
    slow = sum(choice.backend in PLAIN for choice in choices)
    if task.device_type == "cuda" and slow:
        warnings.warn(
            f"{slow} of {len(choices)} layers decode in plain PyTorch, which is slow on a GPU. "
            f"{_first_reason(layers, groups, choices, task)}",
            stacklevel=1,  # of one place, so that each text is shown once
        )


@dataclass(frozen=True)
class Kernels:
    """How many of a model's layers GPU kernels serve.

    reasons: for decoding, then for prefill: why the first layer without a kernel has none, and
        which setting avoids that.
    """

    layers: int
    decode: int
    prefill: int
    reasons: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return self.decode == self.prefill == self.layers

    def __str__(self) -> str:
        """A line for users."""
        counts = f"{self.decode} of {self.layers} layers in decoding, {self.prefill} in prefill"
        return ". ".join((counts, *self.reasons))


def kernels(
    layers: Sequence[LayerShape],
    layout: CacheLayout,
    dtype: torch.dtype,
    needs_weights: bool = False,
) -> Kernels:
    """Which layers kernels serve on a GPU with Triton, independent of this machine and of
    KVFOLD_BACKEND.

    layout: of these layers' pages; dtype: of queries; needs_weights: an eviction policy needs the
        attention weights of queries that decode. Prefill is counted for chunks that are not
        observed; kernels that decode also serve observed queries.
    """
    groups = _groups(layout)
    served, reasons = {}, []
    for decode in (True, False):
        weighed = decode and needs_weights
        task = Task(
            decode=decode,
            observed=weighed,
            device_type=GPU,
            dtype=dtype,
            needs_weights=weighed,
        )
        choices = _choices(layers, layout, task)
        served[decode] = sum(choice.backend not in PLAIN for choice in choices)
        if served[decode] < len(layers):
            reasons.append(_first_reason(layers, groups, choices, task))
    return Kernels(len(layers), served[True], served[False], tuple(reasons))


def _first_reason(
    layers: Sequence[LayerShape],
    groups: Sequence[Sequence[Group]],
    choices: Sequence[BackendChoice],
    task: Task,
) -> str:
    """The first layer that plain PyTorch serves, why no kernel does, and which setting avoids
    it."""
    first = next(i for i, choice in enumerate(choices) if choice.backend in PLAIN)
    layer, kernel = layers[first], TritonPrefill.__name__
    if choices[first].backend is MixedRankAttention:
        kernel = MixedRankKernels.__name__
    elif task.decode:
        kernel = (LatentDecode if layer.reconstructs_keys else TritonDecode).__name__
    what, reason = "decoding" if task.decode else "prefill", choices[first].rejected[kernel]
    return f"Layer {first} in {what} ({reason}): {_remedy(layer, groups[first], task)}"


def _remedy(layer: LayerShape, groups: Sequence[Group], task: Task) -> str:
    """The settings with which kernels would serve a layer, if there are any."""
    if not use_triton(task.device_type):
        return "install triton, and leave KVFOLD_BACKEND at auto"
    if task.needs_weights:
        return "another policy, such as kv-compress, has kernels"
    if layer.limited and (task.observed or (task.decode and layer.reconstructs_keys)):
        return "no setting avoids it"
    settings = _decode_settings if task.decode else _prefill_settings
    return "; ".join(settings(layer, groups, task)) or EVEN


def _decode_settings(layer: LayerShape, groups: Sequence[Group], task: Task) -> Iterator[str]:
    layout = groups[0].layout
    segments = [x for group in groups for x in group.layout.segments]
    latent_bits = [[x.bits for x in tiers] for group in groups for tiers in latents_of(group, "k")]
    latent_bits += [[x.bits for x in tiers] for group in groups for tiers in latents_of(group, "v")]
    bits = {x.bits for x in segments}
    unsupported = {x.format.name for x in segments if "decode" not in x.format.kernels}
    if layout.residual or unsupported:
        settings = ["residual"] * bool(layout.residual) + [
            f"format={x!r}" for x in sorted(unsupported)
        ]
        yield f"leave {' and '.join(settings)} out; {SERVED}"
    elif not bits <= {16, *CODES}:
        yield SERVED
    elif any(len(set(bits_of)) < len(bits_of) for bits_of in latent_bits):
        yield "leave sub_group out: numbers of as many bits must share a scale"
    if layout.itemsize != 2 and 16 in bits:
        yield "load the model as bfloat16"


def _prefill_settings(layer: LayerShape, groups: Sequence[Group], task: Task) -> Iterator[str]:
    if task.dtype.itemsize != 2:
        yield "load the model as bfloat16"
    if max(layer.key_width, layer.value_width) > layer.geometry.head_dim:
        yield "a smaller keep, or a recipe of narrower latents, such as fast, does"
