"""Which implementation an operation uses: a function of the device, KVFOLD_BACKEND and the data
alone, remembered, logged once and never switched.

KVFOLD_BACKEND: `auto` (Triton on a CUDA device, where it is installed), `triton` or `reference`.
"""

import logging
import os
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

BACKENDS = ("auto", "triton", "reference")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The implementation for some data: `module`'s function of the operation's name. refused:
    why those that come before it do not."""

    name: str
    module: ModuleType
    refused: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation's implementations: modules by name, in order of preference.

    A module has the functions that the operation's package names, and `why_not(*data)`: None where
    it serves these data, else the reason, a short phrase for a user. It is imported when it is
    asked. The last, `reference`, is plain PyTorch, serves all data and is not asked.
    """

    name: str
    modules: dict[str, str]

    def choose(self, device_type: str, *data: Hashable) -> Choice:
        """The first implementation that runs on this type of device and serves these data."""
        return _choose(self, _wanted(), use_triton(device_type), device_type, data)

    def why_not(self, device_type: str, *data: Hashable) -> str | None:
        """Why the reference runs on these data; None where another implementation does."""
        found = self.choose(device_type, *data)
        return "; ".join(found.refused) if found.name == "reference" else None


def _wanted() -> str:
    return os.environ.get("KVFOLD_BACKEND", "auto")


@lru_cache(maxsize=4096)
def _choose(
    operation: Operation, wanted: str, triton: bool, device_type: str, data: tuple[Hashable, ...]
) -> Choice:
    refused: list[str] = []
    for name, path in operation.modules.items():
        reason = None if name == "reference" else _away(name, wanted, triton, device_type)
        module = None if reason else import_module(path)
        if module and (name == "reference" or (reason := module.why_not(*data)) is None):
            _log(operation.name, device_type, name, *refused)
            return Choice(name, module, tuple(refused))
        refused.append(str(reason))
    raise AssertionError(f"{operation.name} has no reference")


def _away(name: str, wanted: str, triton: bool, device_type: str) -> str | None:
    """Why implementations of that name do not run on this type of device, whatever the data."""
    if wanted not in ("auto", name):
        return f"KVFOLD_BACKEND is {wanted}"
    if name != "triton" or triton:
        return None
    if find_spec("triton") is None:
        return "triton is not installed"
    return f"Triton's kernels run on cuda, not on {device_type}"


@lru_cache
def _log(operation: str, device_type: str, name: str, *refused: str) -> None:
    """Once for every choice and its reasons, which many layers share."""
    reasons = f" ({'; '.join(refused)})" if refused else ""
    log.info("%s on %s: %s%s", operation, device_type, name, reasons)


@lru_cache
def use_triton(device_type: str) -> bool:
    """Whether kernels run on this type of device. Raises ValueError for an unknown backend."""
    wanted = _wanted()
    if wanted not in BACKENDS:
        raise ValueError(f"KVFOLD_BACKEND must be one of {', '.join(BACKENDS)}; got {wanted!r}")
    installed = find_spec("triton") is not None
    if wanted == "triton" and not installed:
        raise ValueError("KVFOLD_BACKEND=triton, but triton is not installed: pip install triton")
    chosen = wanted == "triton" or (wanted == "auto" and installed and device_type == "cuda")
    version = f"torch {torch.__version__}"
    name = "triton" if chosen else "reference"
    log.info("backend on %s: %s (%s)", device_type, name, version)
    return chosen


@lru_cache
def has_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run: on Hopper, with the Triton that they were written for, since
    their language changes."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


def store_module(device_type: str) -> ModuleType:
    """The module that moves rows in and out of pages: `ops.store`, or its kernels."""
    if use_triton(device_type):
        from kvfold.ops.store import triton as store_triton

        return store_triton
    from kvfold.ops.store import reference as store

    return store
