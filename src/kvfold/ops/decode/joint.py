"""Decode attention in one pass over rows whose values all KV heads share, on Hopper: `joint.cu`.

Two passes (`triton_split`) write the weights to memory and read them again for every piece of the
values; here they stay on chip, and a page is read once. Measured on an H200, 64 x 8192 tokens of
Llama-3.1-8B's shape, us a layer: 140 to 182 for caches 4 and 5 times smaller, cuDNN's bf16 470.
Fastest are keys in runs of 8 and 4 bits, and value runs of an odd number of 16 bytes, whose rows
lie in unlike banks of shared memory. Shapes as in `decode.triton`.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.launch import launch_options, multiprocessors
from kvfold.ops.common.pages import LayerPages, owner_of
from kvfold.ops.common.pieces import VALUE_FIELDS, Place, latents_of, widest_value
from kvfold.ops.common.plan import Slices, power_of_two
from kvfold.ops.common.plan_triton import plan_slices
from kvfold.ops.decode.kernels import combine_kernel
from kvfold.ops.decode.triton import combine_options
from kvfold.spec.layout import Group, Segment

ROOM = 227 * 1024  # bytes of shared memory that a program may have
OVERHEAD, SMALLEST = 2, 2  # cost of beginning an item, and least work of a slice, in pages
WARPS = 12  # most that weigh values: each has 64 numbers of a row
# Fewer leave a slice too little beside its parts: 1 x 8192 takes 8.7 ms a step against 7.3 of two
# passes, 8 x 8192 8.8 against 9.2.
ROWS = 32768
PAGES = (16, 32, 64)  # rows of one; the more, the faster
STAGES = 2  # fewest pages at once


def unread(groups: Sequence[Group], queries: int) -> str | None:
    """Why one pass does not serve these rows; None where it does: groups alike, each with keys a
    head, alike but for their place, and one value latent."""
    first, *rest = groups
    if any(_shape(x) != _shape(first) for x in rest):
        return "groups of unlike layouts"
    layout, heads = first.layout, len(first.heads)
    keys, values = latents_of(first, "k"), latents_of(first, "v")
    if layout.itemsize != 2:
        return f"queries of {8 * layout.itemsize} bits"
    if queries not in (4, 8) or heads * queries not in (16, 32):
        return f"{heads} KV heads of {queries} query heads each"
    if any(x.side == "kv" or x.bits > 8 or x.per_channel for x in layout.segments) or layout.zeros:
        return "rows other than codes without zeros, keys and values apart"
    if [x[0].heads for x in keys] != [(h,) for h in first.heads] or len(values) != 1:
        return "other latents than keys of every head, and values of all"
    if len({tuple((x.bits, x.width) for x in own) for own in keys}) > 1:
        return "keys of other runs from head to head"
    if any(x.row_bytes % 4 for own in keys for x in own) or any(
        x.row_bytes % 16 for x in values[0]
    ):
        return "runs of keys that are no multiple of 4 bytes, or of values, of 16"
    if layout.tracked:
        return "rows with metrics, which want the weights that two passes leave"
    if layout.page not in PAGES or len(_items(values[0])) > WARPS:
        return f"pages of {layout.page} rows, or more values than warps hold"
    if _stages(first, queries) < STAGES:
        return "pages larger than half of a multiprocessor's memory"
    return None


def _shape(group: Group) -> tuple[Any, ...]:
    """What groups have in common whose pages are read alike."""
    layout = group.layout
    each = ((Place.of(group, x), x.side, x.bits, x.width) for x in layout.segments)
    return len(group.heads), layout.page, layout.scale, layout.tracked, *each


@lru_cache(maxsize=4096)
def serves(groups: tuple[Group, ...], queries: int, device: torch.device) -> bool:
    """Whether the kernel reads a layer's rows, and runs: on Hopper, with a PyTorch that compiles
    CUDA C++."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return hasattr(torch.cuda, "_compile_kernel") and unread(groups, queries) is None


def _items(values: Sequence[Segment]) -> list[tuple[int, int, int, int]]:
    """Run, first word / 16, which bytes of words, and the run's column, of 64 numbers each."""
    found, column = [], 0
    for run, x in enumerate(values):
        words = x.row_bytes // 2
        for block in range(0, -(-words // 16), 2 if x.bits == 8 else 1):
            found += [(run, block, half, column) for half in range(2 if x.bits == 2 else 1)]
        column += x.width
    return found


def _read_bytes(group: Group) -> int:
    """Bytes of a page up to its last scale, in whole 16."""
    layout = group.layout
    end = layout.blocks.scales.offset + layout.page * layout.scales_per_row * layout.scale
    return -(-end // 16) * 16


def _fixed_bytes(group: Group, queries: int) -> int:
    """Shared memory beside pages: two buffers of weights a run of values, and what is small."""
    columns = len(group.heads) * queries
    runs = len(latents_of(group, "v")[0])
    return 2 * runs * columns * (2 * group.layout.page + 16) + 16 * columns + 512


def _stages(group: Group, queries: int) -> int:
    return min(8, (ROOM - _fixed_bytes(group, queries)) // _read_bytes(group))


def source(
    groups: tuple[Group, ...], queries: int, numbers: tuple[int, int, int], bf16: bool
) -> str:
    """The kernel for such rows. numbers: of a row of q, of out and of a part."""
    group, layout = groups[0], groups[0].layout
    keys = latents_of(group, "k")
    (values,) = latents_of(group, "v")
    places = [[Place.of(group, x) for x in own] for own in keys]
    following = places[1] if len(places) > 1 else places[0]
    own = [Place.of(group, x) for x in values]
    known: dict[str, int | list[int]] = {
        "PAGE": layout.page, "PAGE_BYTES": _read_bytes(group), "STAGES": _stages(group, queries),
        "G": len(groups), "HEADS": len(group.heads), "N": queries,
        "QUERY_HEADS": len(group.heads) * len(groups) * queries, "ITEMS": len(_items(values)),
        "KEY_BITS": [x.bits for x in keys[0]], "KEY_WORDS": [x.words for x in places[0]],
        "KEY_START": [2 * x.start for x in places[0]],
        "KEY_NEXT": [2 * (b.start - a.start) for a, b in zip(places[0], following, strict=True)],
        "KEY_SCALE": [x.scale for x in places[0]],
        "KEY_SCALE_NEXT": [b.scale - a.scale for a, b in zip(places[0], following, strict=True)],
        "VALUE_BITS": [x.bits for x in values], "VALUE_WORDS": [x.words for x in own],
        "VALUE_START": [2 * x.start for x in own], "VALUE_SCALE": [x.scale for x in own],
        "SCALE": layout.scale, "SCALE_ROW": layout.scales_per_row,
        "DQ": numbers[0], "DO": numbers[1], "DV": numbers[2], "BF16": int(bf16),
    }  # fmt: skip
    for i, each in enumerate(places):  # heads lie as far apart as the first two
        for x, one, two in zip(each, places[0], following, strict=True):
            assert x.start == one.start + i * (two.start - one.start)
            assert x.scale == one.scale + i * (two.scale - one.scale)
    lines = [f"#define {name} {_written(value)}" for name, value in known.items()]
    return "\n".join([*lines, files(__package__).joinpath("joint.cu").read_text()])


def _written(value: int | list[int]) -> str:
    return str(value) if isinstance(value, int) else "{" + ", ".join(map(str, value)) + "}"


@lru_cache(maxsize=256)
def _kernel(
    groups: tuple[Group, ...], queries: int, numbers: tuple[int, int, int], bf16: bool
) -> Any:
    """Compiled by NVRTC, which PyTorch brings."""
    text = source(groups, queries, numbers, bf16)
    kernel = torch.cuda._compile_kernel(
        text,
        "joint_kernel",
        compute_capability="90a",
        nvcc_options=["--std=c++17", "--device-as-default-execution-space"],
    )
    kernel.set_shared_memory_config(_shared(groups[0], queries))
    return kernel


def _shared(group: Group, queries: int) -> int:
    return _stages(group, queries) * _read_bytes(group) + _fixed_bytes(group, queries)


@lru_cache(maxsize=4096)
def _tables(groups: tuple[Group, ...], queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32: items of the weighing warps, and lines of groups as `combine_kernel` reads them."""
    (values,) = latents_of(groups[0], "v")
    lines = []
    for g, group in enumerate(groups):
        line = [0] * VALUE_FIELDS
        line[1], line[6], line[7], line[10] = widest_value(groups), g, group.heads[0] * queries, 1
        lines.append(line)
    made = (torch.tensor(x, dtype=torch.int32, device=device) for x in (_items(values), lines))
    items, of_groups = made
    return items, of_groups


@dataclass(frozen=True)
class JointPlan:
    """One layer's slices, and where parts go: room that layers share."""

    slices: Slices
    part: Tensor
    part_ml: Tensor


def plan_layers(
    layers: Sequence[Sequence[Group]], lengths: Tensor, queries: int
) -> list[JointPlan]:
    """As `ops.decode.plan_layers`, of layers that are served and whose pages are alike long."""
    device, groups, page = lengths.device, len(layers[0]), layers[0][0].layout.page
    cost = torch.ones(len(layers), groups, dtype=torch.int32, device=device)
    number = multiprocessors(device)
    slices, counted = plan_slices(lengths, None, cost, page, OVERHEAD, number, SMALLEST)
    width = power_of_two(max(widest_value(x) for x in layers))
    columns, parts = len(layers[0][0].heads) * queries, number + counted.shape[1]
    part = torch.empty(parts, columns, width, device=device)
    part_ml = torch.empty(parts, 2, columns, device=device)
    return [JointPlan(slices.layer(i), part, part_ml) for i in range(len(layers))]


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: JointPlan
) -> tuple[Tensor, Tensor]:
    """As `ops.decode.decode`, of a plan."""
    arena, tables, lengths, groups = pages
    batch, num_heads, rank = q.shape
    queries, width = num_heads // len(owner_of(groups)), widest_value(groups)
    columns, held = plan.part.shape[1:]
    out = q.new_empty(batch, num_heads, width)
    lse = torch.empty(batch, num_heads, dtype=torch.float32, device=q.device)
    numbers = rank, width, held
    kernel = _kernel(tuple(groups), queries, numbers, q.dtype == torch.bfloat16)
    items, lines = _tables(tuple(groups), queries, q.device)
    slices = plan.slices
    kernel(
        grid=(slices.starts.shape[0] - 1, 1, 1),
        block=((columns // 8 + len(items)) * 32, 1, 1),
        args=[
            q, q.stride(0), out, lse, plan.part, plan.part_ml, arena, tables, tables.stride(0),
            tables.stride(1), lengths, lengths.stride(0), slots, items, slices.starts,
            slices.counts, float(scale * LOG2_E),
        ],
        shared_mem=_shared(groups[0], queries),
    )  # fmt: skip
    count = slices.counts.shape[0]
    combine_kernel[(count, columns)](
        out, lse, plan.part, plan.part_ml, lines, slices.firsts, slices.counts,
        slices.firsts, G=len(groups), HQ=num_heads, N=columns, GP=columns, DO=width, DV=held,
        FIELDS=VALUE_FIELDS, ORDER=False, **launch_options(q.device),
        **combine_options(slices.starts.shape[0], count, held),
    )  # fmt: skip
    return out, lse
