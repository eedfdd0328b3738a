"""The backend of every layer: the first that supports it, chosen once, logged and never switched.

A layer has one for decoding, one for prefill chunks, and one for chunks whose queries are observed.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvfold.attention.backend import AttentionBackend, Task
from kvfold.attention.base import LayerMaps
from kvfold.attention.cpu_paged import CpuPaged
from kvfold.attention.fallback import Fallback
from kvfold.attention.metadata import AttentionMetadata, PoolView
from kvfold.attention.triton_decode import LatentDecode, TritonDecode
from kvfold.attention.triton_prefill import TritonPrefill
from kvfold.ops.backend import use_triton
from kvfold.spec.layout import Group

# In order of preference; the last serves everything.
DECODE: tuple[type[AttentionBackend], ...] = (TritonDecode, LatentDecode, CpuPaged, Fallback)
PREFILL: tuple[type[AttentionBackend], ...] = (TritonPrefill, Fallback)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A layer's backend; passed: those before it, and why each does not serve the layer."""

    backend: type[AttentionBackend]
    passed: Mapping[str, str]


def select(layer: LayerMaps, groups: Sequence[Group], task: Task) -> Choice:
    """The first backend for a layer, whose groups these are. Touches no device."""
    passed: dict[str, str] = {}
    for backend in DECODE if task.decode else PREFILL:
        reason = backend.supports(layer, groups, task)
        if reason is None and task.observed and not backend.observes:
            reason = "it adds to no metric"
        if reason is None:
            return Choice(backend, passed)
        passed[backend.__name__] = reason
    raise AssertionError("the last backend serves everything")


@dataclass(frozen=True)
class Selected:
    """Backends by layer. observed: of prefill chunks whose queries add to metrics."""

    decode: tuple[type[AttentionBackend], ...]
    prefill: tuple[type[AttentionBackend], ...]
    observed: tuple[type[AttentionBackend], ...]

    @classmethod
    def of(cls, layers: Sequence[LayerMaps], view: PoolView) -> "Selected":
        """Choose for every layer of a model, and say so."""
        groups, device = [pages.groups for pages in view.pages], view.pool.device.type
        found = []
        for decode, observed in ((True, view.observes_decodes), (False, False), (False, True)):
            task = Task(decode=decode, observed=observed, device_type=device, dtype=view.dtype)
            choices = [select(x, own, task) for x, own in zip(layers, groups, strict=True)]
            if decode or not observed or view.observing is not None:
                _log(task, choices)
            if decode and view.pool.layout.kept_fraction < 1:
                warn_of_fallback(layers, groups, choices, task)
            found.append(tuple(choice.backend for choice in choices))
        return cls(*found)

    def of_part(self, part: AttentionMetadata) -> tuple[type[AttentionBackend], ...]:
        if part.decode:
            return self.decode
        return self.prefill if part.prompt_lengths is None else self.observed


def _log(task: Task, choices: Sequence[Choice]) -> None:
    what = f"{'observed ' if task.observed else ''}{'decode' if task.decode else 'prefill'}"
    for layer, choice in enumerate(choices):
        reasons = "".join(f"; not {x}: {why}" for x, why in choice.passed.items())
        logger.info("layer %d, %s: %s%s", layer, what, choice.backend.__name__, reasons)


def warn_of_fallback(
    layers: Sequence[LayerMaps],
    groups: Sequence[Sequence[Group]],
    choices: Sequence[Choice],
    task: Task,
) -> None:
    """Warn once where layers decode in plain PyTorch on a GPU: why the first of them does, and
    which setting would avoid it."""
    slow = [i for i, choice in enumerate(choices) if choice.backend is Fallback]
    if task.device_type != "cuda" or not slow:
        return
    first = slow[0]
    passed = choices[first].passed.items()
    reasons = "; ".join(f"{x}: {why}" for x, why in passed if x != CpuPaged.__name__)
    warnings.warn(
        f"{len(slow)} of {len(choices)} layers decode in plain PyTorch, which is slow on a GPU. "
        f"Layer {first} ({reasons}): {_remedy(layers[first], groups[first], task)}",
        stacklevel=2,
    )


def _remedy(layer: LayerMaps, groups: Sequence[Group], task: Task) -> str:
    """The setting by which kernels would serve a layer, where there is one."""
    layouts = [group.layout for group in groups]
    segments = [segment for layout in layouts for segment in layout.segments]
    bits = {x.bits for x in segments}
    if not use_triton(task.device_type):
        return "install triton, and leave KVFOLD_BACKEND at auto"
    if layer.window is not None or layer.softcap is not None:
        return "no setting avoids it"
    if layouts[0].residual or any(x.per_channel for x in segments):
        return "leave residual and KIVI out; bits=4 and bits=8 have kernels"
    if len(bits) > 1 or not bits <= {16, 8, 4} or any(x.scale != 2 for x in layouts):
        return "bits=4 or bits=8 has kernels; several precisions, and others, have none"
    if any(len({x.start for x in y.segments}) > 2 for y in layouts) and not layer.rebuilds_keys:
        return "leave sub_group out: a side's numbers must share a scale"
    if layouts[0].itemsize != 2:
        return "load the model as bfloat16"
    if task.observed:
        return "a policy that does not observe decoding, such as streaming, does"
    return "a recipe that keeps as much of every head, such as fast with align=8, does"
