"""Which implementation the functions of `ops` use: chosen once a process, logged, never switched.

KVFOLD_BACKEND: `auto` (Triton on a CUDA device, where it is installed), `triton` or `reference`.
"""

import logging
import os
from functools import lru_cache
from importlib.util import find_spec

import torch

BACKENDS = ("auto", "triton", "reference")


@lru_cache
def use_triton(device_type: str) -> bool:
    """Whether kernels run on this type of device. Raises ValueError for an unknown backend."""
    wanted = os.environ.get("KVFOLD_BACKEND", "auto")
    if wanted not in BACKENDS:
        raise ValueError(f"KVFOLD_BACKEND must be one of {', '.join(BACKENDS)}; got {wanted!r}")
    installed = find_spec("triton") is not None
    if wanted == "triton" and not installed:
        raise ValueError("KVFOLD_BACKEND=triton, but triton is not installed: pip install triton")
    chosen = wanted == "triton" or (wanted == "auto" and installed and device_type == "cuda")
    version = f"torch {torch.__version__}"
    name = "triton" if chosen else "reference"
    logging.getLogger(__name__).info("backend on %s: %s (%s)", device_type, name, version)
    return chosen


@lru_cache
def has_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run: on Hopper, with the Triton that they were written for, since
    their language changes."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
