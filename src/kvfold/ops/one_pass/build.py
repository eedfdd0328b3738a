"""Source and compilation of the one-pass kernel for a layout: constants, then the .cu files.

NVRTC compiles it, which PyTorch includes; so neither nvcc nor a build step is needed. The result is
stored where Triton stores its kernels.
"""
# mypy: allow-untyped-defs

from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvfold.layout.pages import Group
from kvfold.ops.common.pieces import Place, latents_of
from kvfold.ops.one_pass.rows import (
    BUFFERS,
    columns_of,
    items,
    read_bytes,
    shared_bytes,
    stages,
    weighers_scale,
)

NAME, ARCHITECTURE = "one_pass_kernel", "90a"
OPTIONS = ["--std=c++17", "--device-as-default-execution-space"]

Constants = tuple[tuple[str, int], ...]


def warps(group: Group, queries: int, reconstructed: bool) -> int:
    """Return the number of warps per program: those that compute scores and those that sum
    values."""
    if reconstructed:
        return 16  # groups of four, between which registers are redistributed
    return columns_of(group, queries, reconstructed) // 8 + len(items(latents_of(group, "v")[0]))


def source(
    groups: tuple[Group, ...],
    queries: int,
    numbers: tuple[int, int, int],
    bf16: bool,
    reconstructed: Constants = (),
) -> str:
    """Return the kernel's source for such a layout.

    numbers: width of q, of out and of a partial result; reconstructed: constants of
        `reconstructed.cu`, if keys are reconstructed.
    """
    group, layout = groups[0], groups[0].layout
    keys = latents_of(group, "k")
    (values,) = latents_of(group, "v")
    places = [[Place.of(group, x) for x in segments] for segments in keys]
    following = places[1] if len(places) > 1 else places[0]
    number = len(items(values))
    known: dict[str, int | list[int]] = {
        "PAGE": layout.page, "PAGE_BYTES": read_bytes(group),
        "STAGES": stages(group, queries, numbers[0] if reconstructed else None),
        "G": len(groups), "HEADS": len(group.heads), "REAL": queries,
        "N": columns_of(group, queries, bool(reconstructed)) // len(group.heads),
        "QUERY_HEADS": len(group.heads) * len(groups) * queries, "SETS": 1 if reconstructed else 2,
        "ITEMS": number, "WEIGHERS": number - 4 if reconstructed and number > 8 else number,
        "WARPS": warps(group, queries, bool(reconstructed)),
        "BUFFERS": BUFFERS, "WEIGHERS_SCALE": int(weighers_scale(group, bool(reconstructed))),
        "KEY_BITS": [x.bits for x in keys[0]], "KEY_WORDS": [x.words for x in places[0]],
        "KEY_START": [2 * x.start for x in places[0]],
        "KEY_NEXT": [2 * (b.start - a.start) for a, b in zip(places[0], following, strict=True)],
        "KEY_SCALE": [x.scale for x in places[0]],
        "KEY_SCALE_NEXT": [b.scale - a.scale for a, b in zip(places[0], following, strict=True)],
        "VALUE_SCALE": Place.of(group, values[0]).scale,
        "SCALE": layout.scale, "SCALE_ROW": layout.scales_per_row,
        "DQ": numbers[0], "DO": numbers[1], "DV": numbers[2], "BF16": int(bf16),
        **dict(reconstructed),
    }  # fmt: skip
    for i, of_head in enumerate(places):  # all heads are as far apart as the first two
        for x, one, two in zip(of_head, places[0], following, strict=True):
            assert x.start == one.start + i * (two.start - one.start)
            assert x.scale == one.scale + i * (two.scale - one.scale)
    lines = [f"#define {name} {_written(value)}" for name, value in known.items()]
    parts = ("tools.cu", "reconstructed.cu" if reconstructed else "stored.cu", "kernel.cu")
    return "\n".join([*lines, *(files(__package__).joinpath(x).read_text() for x in parts)])


def _written(value: int | list[int]) -> str:
    """Write a constant as C++."""
    return str(value) if isinstance(value, int) else "{" + ", ".join(map(str, value)) + "}"


class Compiled(NamedTuple):
    """A kernel's source, its threads per program, and bytes of shared memory per program."""

    text: str
    threads: int
    shared: int

    def kernel(self) -> Any:
        """The kernel, compiled at the first call for all layers with the same source."""
        return _compile(self.text, self.shared)


@lru_cache(maxsize=4096)
def compiled(
    groups: tuple[Group, ...],
    queries: int,
    numbers: tuple[int, int, int],
    bf16: bool,
    reconstructed: Constants = (),
) -> Compiled:
    """The kernel of layers with the same layout. Arguments as of `source`."""
    shared = shared_bytes(groups[0], queries, numbers[0] if reconstructed else None)
    text = source(groups, queries, numbers, bf16, reconstructed)
    threads = 32 * warps(groups[0], queries, bool(reconstructed))
    return Compiled(text, threads, shared)


@lru_cache(maxsize=256)
def _compile(text: str, shared: int) -> Any:
    """Load the kernel of a source for programs with `shared` bytes of shared memory."""
    from torch.cuda._utils import _cuda_load_module

    kernel = getattr(_cuda_load_module(_binary(text)), NAME)
    kernel.set_shared_memory_config(shared)
    return kernel


def _binary(text: str) -> bytes:
    """The compiled source, from Triton's cache folder if it is there."""
    from torch.cuda._utils import _nvrtc_compile
    from triton.runtime.cache import get_cache_manager

    what = "\n".join([text, ARCHITECTURE, *OPTIONS, str(torch.version.cuda)])
    cache = get_cache_manager(sha256(what.encode()).hexdigest())
    path = cache.get_file(f"{NAME}.cubin")
    if path is not None:
        return Path(path).read_bytes()
    binary, _ = _nvrtc_compile(text, NAME, ARCHITECTURE, nvcc_options=OPTIONS)
    cache.put(binary, f"{NAME}.cubin", binary=True)
    return binary
