"""Plans and launches the one-pass kernel, which decodes on Hopper (see `ops.one_pass`).

Shapes as in `decode.triton`.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.layout.pages import Group
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.combine import combine
from kvfold.ops.common.launch import multiprocessors
from kvfold.ops.common.pages import LayerPages, owner_of
from kvfold.ops.common.pieces import VALUE_FIELDS, widest_value
from kvfold.ops.common.plan import Slices, power_of_two
from kvfold.ops.common.plan_triton import plan_slices
from kvfold.ops.common.recording import launch_cuda
from kvfold.ops.latent_decode.maps import KeyMaps
from kvfold.ops.one_pass.build import Constants, compiled
from kvfold.ops.one_pass.reconstructed import ReconstructionMaps, pack
from kvfold.ops.one_pass.rows import columns_of, items_read

OVERHEAD, SMALLEST = 2, 2  # cost of starting an item, and least work of a split, in pages
# Number of entries from which one pass is about as fast or faster. us per layer of one sequence on
# an H100, in two passes and in one, including the store of the new entry, with 1024, 4096 and 8192
# entries: `swift` 5x smaller 35 and 31, 39 and 35, 41 and 38; `lean` 8x smaller 39 and 52, 50 and
# 52, 64 and 53.
ROWS = 4096


@lru_cache(maxsize=4096)
def _tables(groups: tuple[Group, ...], queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return int32 tables: items of the value warps, and the groups as `combine_kernel` reads
    them."""
    lines = []
    for g, group in enumerate(groups):
        line = [0] * VALUE_FIELDS
        line[1], line[6], line[7], line[10] = widest_value(groups), g, group.heads[0] * queries, 1
        lines.append(line)
    tables = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (items_read(groups[0]), lines)
    )
    items, groups_table = tables
    return items, groups_table


@dataclass(frozen=True)
class OnePassPlan:
    """One layer's splits, and buffers of partial results, which all layers share."""

    slices: Slices
    part: Tensor
    part_ml: Tensor


def plan_layers(
    layers: Sequence[Sequence[Group]], lengths: Tensor, queries: int, reconstructed: bool = False
) -> list[OnePassPlan]:
    """See `ops.decode.plan_layers`. All layers must be supported and have pages of equal length.

    reconstructed: whether keys are reconstructed, as in `ops.latent_decode`.
    """
    device, groups, page = lengths.device, len(layers[0]), layers[0][0].layout.page
    cost = torch.ones(len(layers), groups, dtype=torch.int32, device=device)
    number = multiprocessors(device)
    slices, counted = plan_slices(lengths, None, cost, page, OVERHEAD, number, SMALLEST)
    width = power_of_two(max(widest_value(x) for x in layers))
    columns, parts = columns_of(layers[0][0], queries, reconstructed), number + counted.shape[1]
    part = torch.empty(parts, columns, width, dtype=torch.float32, device=device)
    part_ml = torch.empty(parts, 2, columns, dtype=torch.float32, device=device)
    return [OnePassPlan(slices.layer(i), part, part_ml) for i in range(len(layers))]


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: OnePassPlan,
    maps: KeyMaps | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.decode.decode`, or with maps `ops.latent_decode.latent_decode`. The plan is
    required."""
    arena, tables, lengths, groups = pages
    batch, num_heads, rank = q.shape
    queries, width = num_heads // len(owner_of(groups)), widest_value(groups)
    part_width, per_group = plan.part.shape[2], num_heads // len(groups)
    padding = queries, plan.part.shape[1] // len(groups[0].heads)
    out = q.new_empty(batch, num_heads, width)
    lse = torch.empty(batch, num_heads, dtype=torch.float32, device=q.device)
    constants: Constants = ()
    map_arguments = q, q  # placeholders: without maps neither is read
    if maps is not None:
        packed = _packed(maps, groups[0], rank, queries)
        constants, map_arguments = packed.constants, (packed.data, maps.rope)
    numbers = rank, width, part_width
    program = compiled(groups, queries, numbers, q.dtype == torch.bfloat16, constants)
    items, lines = _tables(groups, queries, q.device)
    slices = plan.slices
    args: list[Tensor | int | float] = [
        q, q.stride(0), out, lse, plan.part, plan.part_ml, arena, tables, tables.stride(0),
        tables.stride(1), lengths, lengths.stride(0), slots, items, slices.starts,
        slices.counts, float(scale * LOG2_E), *map_arguments,
    ]  # fmt: skip
    splits = slices.starts.shape[0] - 1
    launch_cuda(program.kernel, splits, program.threads, args, program.shared)
    combine(out, lse, plan.part, plan.part_ml, lines, slices, per_group, part_width, padding)
    return out, lse


def _packed(maps: KeyMaps, group: Group, head_dim: int, queries: int) -> ReconstructionMaps:
    """Return the layer's maps as `reconstructed.cu` reads them, converted once."""
    key = "one pass", group, queries
    if key not in maps.packed:
        maps.packed[key] = pack(maps, group, head_dim, queries)
    packed: ReconstructionMaps = maps.packed[key]
    return packed
