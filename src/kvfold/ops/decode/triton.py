"""Launches the kernel `triton`: decode attention where every KV head has its own entries.

Chosen on CUDA for one bit width and one scale for keys and one for values (see `groups`).
`plan_layers` divides a step's work among programs; `decode` launches `kernels.decode_kernel`, then
`common.combine` merges items that several programs share.

Shapes: B sequences, G groups (KV heads) of a layer, L layers, N query heads per KV head, padded to
GP; I = B * G items, S splits of the work (see `common.plan`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.layout.pages import Group
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.combine import combine
from kvfold.ops.common.launch import launch_options, multiprocessors
from kvfold.ops.common.pages import LayerPages, words_of
from kvfold.ops.common.plan import Slices, padded_queries, padded_width
from kvfold.ops.common.plan_triton import plan_slices
from kvfold.ops.common.recording import contiguous, launch
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode.groups import DecodeGroups, decode_groups
from kvfold.ops.decode.kernels import decode_kernel
from kvfold.ops.decode.tuning import tuning_for

OVERHEAD = 512  # cost of starting an item, in bits of an entry
SMALLEST = 4  # fewest tiles of a split


@dataclass(frozen=True)
class DecodePlan:
    """One layer's splits, the lengths int32 [I] of its items, and buffers of partial results (see
    `decode_kernel`), which all layers share."""

    slices: Slices
    lengths: Tensor
    tuning: Tuning
    part: Tensor
    part_ml: Tensor


def plan_layers(
    layers: Sequence[Sequence[Group]],
    lengths: Tensor,
    queries: int,
    rows: int = 0,
    *,
    tuning: Tuning | None = None,
    num_slices: int | None = None,
    slots: Tensor | None = None,
) -> list[DecodePlan]:
    """See `ops.decode.plan_layers`; `rows` is not used.

    lengths: [S, groups of all layers] of all slots if `slots` int [B] is passed. tuning: by default
        from `tuning.json`. num_slices: splits per layer, by default as many as run at the same
        time.
    """
    device = lengths.device
    groups, cost, width = costs_of(tuple(map(tuple, layers)), queries, device)
    tuning = tuning or tuning_for(groups, queries)
    num_slices = num_slices or tuning.slices * multiprocessors(device)
    cut = tuning.block, OVERHEAD, num_slices, SMALLEST
    slices, counted = plan_slices(lengths, slots, cost, *cut)
    number = num_slices + counted.shape[1]
    part = torch.empty(number, padded_queries(queries), width, device=device)
    part_ml = torch.empty(number, 2, part.shape[1], device=device)
    shared = tuning, part, part_ml
    return [
        DecodePlan(slices.layer(i), layer_lengths, *shared)
        for i, layer_lengths in enumerate(counted)
    ]


@lru_cache
def costs_of(
    layers: tuple[tuple[Group, ...], ...], queries: int, device: torch.device
) -> tuple[DecodeGroups, Tensor, int]:
    """Return the first layer's groups, the cost int32 [L, G] of a tile in every group of all
    layers, and the width of the widest value."""
    layer_groups = [decode_groups(groups, queries, device) for groups in layers]
    # In bits of an entry; the constant is work that does not depend on its width.
    cost = torch.stack(
        [x.table[:, 0] * x.bits[0] + x.table[:, 1] * x.bits[1] + 1000 for x in layer_groups]
    )
    return layer_groups[0], cost, padded_width(max(groups.widths[1] for groups in layer_groups))


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: DecodePlan | None = None
) -> tuple[Tensor, Tensor]:
    """See `ops.decode.decode`."""
    arena, tables, lengths, _ = pages
    num_groups = len(pages.groups)
    q, queries = contiguous(q), q.shape[1] // num_groups
    groups = decode_groups(pages.groups, queries, q.device)
    plan = plan or plan_layers([pages.groups], lengths, queries, slots=slots)[0]
    slices, tuning = plan.slices, plan.tuning
    out = q.new_empty(*q.shape[:2], groups.widths[1])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    words = [words_of(arena, q.dtype if bits == 16 else torch.uint16) for bits in groups.bits]
    order = slices.firsts if slices.order is None else slices.order
    keys = max(padded_width(groups.widths[0]), 16 * (16 // min(groups.bits)))
    values = padded_width(groups.widths[1])
    widths = {
        "G": num_groups, "N": queries, "GP": padded_queries(queries), "DO": out.shape[-1],
        "DV": values, "ORDER": slices.order is not None, **launch_options(q.device),
    }  # fmt: skip
    scales = words_of(arena, torch.int32 if groups.paired else torch.float16)
    launch(
        decode_kernel, (slices.starts.shape[0] - 1,),
        q, q.stride(0), out, lse, plan.part, plan.part_ml,
        *words, scales, tables, tables.stride(0), tables.stride(1),
        plan.lengths, slots, groups.table, slices.starts, slices.counts, order,
        scale * LOG2_E,
        DQ=q.shape[-1], DK=keys,
        KEY_BITS=groups.bits[0], VALUE_BITS=groups.bits[1], ZEROS=groups.zeros,
        PAIRED=groups.paired, PAGE=groups.page, ALIGN=groups.align,
        EXACT=groups.exact(keys, values),
        BLOCK=tuning.block, STAGES=tuning.stages, num_warps=tuning.warps,
        maxnreg=tuning.registers, **widths,
    )  # fmt: skip
    combine(out, lse, plan.part, plan.part_ml, groups.table, slices, queries, values)
    return out, lse
