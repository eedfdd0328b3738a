"""Choose the implementation of an operation: Triton, Numba or plain PyTorch.

The choice depends on the device, KVFOLD_BACKEND and the data. It is cached and logged once, and
never changes during a run.

KVFOLD_BACKEND: `auto` (Triton on a CUDA device, Numba on a CPU, if they are installed), `triton`,
    `numba` or `reference`.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

BACKENDS = ("auto", "triton", "numba", "reference")
GPU = "gpu"  # a hypothetical GPU with Triton, to ask what it would run; nothing runs on it
LAST = "reference"  # the last choice: plain PyTorch, which supports all data
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The implementation chosen for some data.

    module: has the functions of the operation; refused: why each implementation that is preferred
        to it does not support these data.
    """

    name: str
    module: ModuleType
    refused: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Operation:
    """A package of `ops` and its implementations, in order of preference.

    kernels: module name -> `why_not(*data)`, which returns None if the module supports these data,
        else the reason as a short phrase for a user. It does not import Triton, so any machine can
        tell what a GPU would do. The first word of a module's name is the backend that it needs
        (`triton`, `triton_split`). The module has the functions that the package names, and is
        imported when it is chosen. `reference`, the last choice, is not listed.
    """

    package: str
    kernels: Mapping[str, Callable[..., str | None]]

    def choose(self, device_type: str, *data: Hashable) -> Choice:
        """Return the first implementation that runs on this device type and supports these data."""
        assert device_type != GPU, "nothing runs on a device that is only asked about"
        return _choose(self, _wanted(), use_triton(device_type), device_type, data)

    def plan(
        self,
        device_type: str,
        layers: Sequence[tuple[Hashable, ...]],
        make: Callable[[ModuleType, list[int]], list[Any]],
    ) -> list[Any]:
        """Plan all layers: call `make(module, indices)` once for each implementation, with the
        indices of the layers that it supports, and return the plans in the order of `layers`."""
        layers_of = defaultdict(list)
        for i, data in enumerate(layers):
            layers_of[self.choose(device_type, *data).module].append(i)
        plans: dict[int, Any] = {}
        for module, indices in layers_of.items():
            plans |= zip(indices, make(module, indices), strict=True)
        return [plans[i] for i in range(len(layers))]

    def which(self, device_type: str, *data: Hashable) -> str:
        """Return the name of the implementation that runs on these data, without importing it."""
        return self._pick(device_type, data)[0]

    def why_not(self, device_type: str, *data: Hashable) -> str | None:
        """Return why the reference runs on these data, or None if another implementation does.
        Imports no implementation."""
        name, refused = self._pick(device_type, data)
        return "; ".join(dict.fromkeys(refused)) if name == LAST else None

    def _pick(self, device_type: str, data: tuple[Hashable, ...]) -> tuple[str, tuple[str, ...]]:
        """Return the name of the first implementation that supports these data, and why the
        preferred ones do not."""
        return _pick(self, _wanted(), use_triton(device_type), device_type, data)


def _wanted() -> str:
    return os.environ.get("KVFOLD_BACKEND", "auto")


@lru_cache(maxsize=4096)
def _choose(
    operation: Operation, wanted: str, triton: bool, device_type: str, data: tuple[Hashable, ...]
) -> Choice:
    name, refused = _pick(operation, wanted, triton, device_type, data)
    _log(operation.package.rpartition(".")[2], device_type, name, *refused)
    return Choice(name, import_module(f"{operation.package}.{name}"), refused)


@lru_cache(maxsize=4096)
def _pick(
    operation: Operation, wanted: str, triton: bool, device_type: str, data: tuple[Hashable, ...]
) -> tuple[str, tuple[str, ...]]:
    """Like `Operation._pick`, cached."""
    refused: list[str] = []
    for name, why_not in operation.kernels.items():
        reason = _unavailable(name.partition("_")[0], wanted, triton, device_type) or why_not(*data)
        if reason is None:
            return name, tuple(refused)
        refused.append(reason)
    return LAST, tuple(refused)


def _unavailable(backend: str, wanted: str, triton: bool, device_type: str) -> str | None:
    """Why a backend is not available on this device type, or None."""
    if backend == "numba":
        return no_numba(device_type)
    if device_type == GPU:
        return None
    if wanted not in ("auto", backend):
        return f"KVFOLD_BACKEND is {wanted}"
    if backend != "triton" or triton:
        return None
    if find_spec("triton") is None:
        return "triton is not installed"
    return f"Triton's kernels run on cuda, not on {device_type}"


@lru_cache
def _log(operation: str, device_type: str, name: str, *refused: str) -> None:
    """Log a choice and its reasons once, even if many layers share it."""
    reasons = f" ({'; '.join(refused)})" if refused else ""
    log.info("%s on %s: %s%s", operation, device_type, name, reasons)


@lru_cache
def use_triton(device_type: str) -> bool:
    """Whether Triton kernels run on this device type. Raises ValueError if KVFOLD_BACKEND is
    unknown or cannot run here."""
    if device_type == GPU:
        return True
    wanted = _wanted()
    if wanted not in BACKENDS:
        raise ValueError(f"KVFOLD_BACKEND must be one of {', '.join(BACKENDS)}; got {wanted!r}")
    installed = find_spec("triton") is not None
    if wanted == "triton" and not installed:
        raise ValueError("KVFOLD_BACKEND=triton, but triton is not installed: pip install triton")
    if wanted == "numba" and device_type != "cpu":
        raise ValueError(
            f"KVFOLD_BACKEND=numba: its kernels run on a CPU, and this model is on {device_type};"
            " unset it, or set it to auto"
        )
    if wanted == "numba" and find_spec("numba") is None:
        raise ValueError("KVFOLD_BACKEND=numba, but numba is not installed: pip install numba")
    if wanted == "triton" and device_type != "cuda" and not _interpreted():
        raise ValueError(
            f"KVFOLD_BACKEND=triton: kernels run on a GPU, and this model is on {device_type};"
            " unset it, or set it to auto"
        )
    chosen = wanted == "triton" or (wanted == "auto" and installed and device_type == "cuda")
    version = f"torch {torch.__version__}"
    name = "triton" if chosen else "reference"
    log.info("backend on %s: %s (%s)", device_type, name, version)
    return chosen


def no_numba(device_type: str) -> str | None:
    """Why Numba kernels do not run on this device type, or None if they do."""
    if device_type != "cpu":
        return f"Numba's kernels run on a CPU, not on {device_type}"
    if (wanted := _wanted()) not in ("auto", "numba"):
        return f"KVFOLD_BACKEND is {wanted}"
    return None if _installed("numba") else "numba is not installed"


@lru_cache
def _installed(name: str) -> bool:
    return find_spec(name) is not None


def _interpreted() -> bool:
    """Whether Triton runs kernels on a CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def has_gluon(device: torch.device) -> bool:
    """Whether Gluon kernels run: on Hopper, with the Triton version they were written for or a
    later one (the language is not stable)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
