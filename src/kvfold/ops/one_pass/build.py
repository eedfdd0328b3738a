"""Source and compilation of the one-pass kernel for a layout: constants, then the .cu files.

NVRTC compiles it, which PyTorch includes; so neither nvcc nor a build step is needed.
"""
# mypy: allow-untyped-defs

from functools import lru_cache
from importlib.resources import files
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
    """A kernel, its threads per program, and bytes of shared memory per program."""

    kernel: Any
    threads: int
    shared: int


@lru_cache(maxsize=4096)
def compiled(
    groups: tuple[Group, ...],
    queries: int,
    numbers: tuple[int, int, int],
    bf16: bool,
    reconstructed: Constants = (),
) -> Compiled:
    """Compile the kernel, once for all layers with the same layout. Arguments as of `source`."""
    shared = shared_bytes(groups[0], queries, numbers[0] if reconstructed else None)
    text = source(groups, queries, numbers, bf16, reconstructed)
    threads = 32 * warps(groups[0], queries, bool(reconstructed))
    return Compiled(_compile(text, shared), threads, shared)


@lru_cache(maxsize=256)
def _compile(text: str, shared: int) -> Any:
    """Compile a source for programs with `shared` bytes of shared memory."""
    kernel = torch.cuda._compile_kernel(
        text,
        "one_pass_kernel",
        compute_capability="90a",
        nvcc_options=["--std=c++17", "--device-as-default-execution-space"],
    )
    kernel.set_shared_memory_config(shared)
    return kernel
