"""Plans of decode attention in one pass, and its launch. Shapes as in `decode.triton`."""
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
from kvfold.ops.latent_decode.maps import KeyMaps
from kvfold.ops.one_pass.build import Constants, compiled
from kvfold.ops.one_pass.rebuilt import RebuiltMaps, pack
from kvfold.ops.one_pass.rows import columns_of, items_read

OVERHEAD, SMALLEST = 2, 2  # cost of beginning an item, and least work of a slice, in pages
# From so many rows on one pass is faster, or no slower. us a layer of a sequence on an H100, in two
# passes and in one, its new row's storing included: `swift` 5 times smaller 35 and 31 with 1024
# rows, 39 and 35 with 4096, 41 and 38 with 8192; `lean` 8 times 39 and 52, 50 and 52, 64 and 53.
ROWS = 4096


@lru_cache(maxsize=4096)
def _tables(groups: tuple[Group, ...], queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32: items of the weighing warps, and lines of groups as `combine_kernel` reads them."""
    lines = []
    for g, group in enumerate(groups):
        line = [0] * VALUE_FIELDS
        line[1], line[6], line[7], line[10] = widest_value(groups), g, group.heads[0] * queries, 1
        lines.append(line)
    made = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (items_read(groups[0]), lines)
    )
    first, second = made
    return first, second


@dataclass(frozen=True)
class OnePassPlan:
    """One layer's slices, and where parts go: room that layers share."""

    slices: Slices
    part: Tensor
    part_ml: Tensor


def plan_layers(
    layers: Sequence[Sequence[Group]], lengths: Tensor, queries: int, rebuilt: bool = False
) -> list[OnePassPlan]:
    """As `ops.decode.plan_layers`, of layers that are served and whose pages are alike long.
    rebuilt: as of `latent_decode`."""
    device, groups, page = lengths.device, len(layers[0]), layers[0][0].layout.page
    cost = torch.ones(len(layers), groups, dtype=torch.int32, device=device)
    number = multiprocessors(device)
    slices, counted = plan_slices(lengths, None, cost, page, OVERHEAD, number, SMALLEST)
    width = power_of_two(max(widest_value(x) for x in layers))
    columns, parts = columns_of(layers[0][0], queries, rebuilt), number + counted.shape[1]
    part = torch.empty(parts, columns, width, device=device)
    part_ml = torch.empty(parts, 2, columns, device=device)
    return [OnePassPlan(slices.layer(i), part, part_ml) for i in range(len(layers))]


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: OnePassPlan,
    maps: KeyMaps | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `ops.decode.decode`, of a plan; with maps, as `ops.latent_decode.latent_decode`."""
    arena, tables, lengths, groups = pages
    batch, num_heads, rank = q.shape
    queries, width = num_heads // len(owner_of(groups)), widest_value(groups)
    held, per_group = plan.part.shape[2], num_heads // len(groups)
    padding = queries, plan.part.shape[1] // len(groups[0].heads)
    out = q.new_empty(batch, num_heads, width)
    lse = torch.empty(batch, num_heads, dtype=torch.float32, device=q.device)
    known: Constants = ()
    beside = q, q  # nothing is rebuilt: neither is read
    if maps is not None:
        packed = _packed(maps, groups[0], rank, queries)
        known, beside = packed.constants, (packed.data, maps.rope)
    numbers = rank, width, held
    kernel, threads, shared = compiled(groups, queries, numbers, q.dtype == torch.bfloat16, known)
    own, lines = _tables(groups, queries, q.device)
    slices = plan.slices
    kernel(
        grid=(slices.starts.shape[0] - 1, 1, 1),
        block=(threads, 1, 1),
        args=[
            q, q.stride(0), out, lse, plan.part, plan.part_ml, arena, tables, tables.stride(0),
            tables.stride(1), lengths, lengths.stride(0), slots, own, slices.starts,
            slices.counts, float(scale * LOG2_E), *beside,
        ],
        shared_mem=shared,
    )  # fmt: skip
    combine(out, lse, plan.part, plan.part_ml, lines, slices, per_group, held, padding)
    return out, lse


def _packed(maps: KeyMaps, group: Group, head_dim: int, queries: int) -> RebuiltMaps:
    key = "one pass", group, queries
    if key not in maps.packed:
        maps.packed[key] = pack(maps, group, head_dim, queries)
    packed: RebuiltMaps = maps.packed[key]
    return packed
