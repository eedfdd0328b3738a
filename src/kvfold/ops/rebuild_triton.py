"""Decode attention on pages whose keys are rebuilt from latents, by kernels: plan, passes, merge.

Shapes as in `rebuild`.

Two passes, because heads disagree on how to share: keys want one program a KV head, which keeps the
head's map A on chip; values want one program for all heads that read them. The first pass turns
every tile of BLOCK rows of a KV head into weights exp2(s - top), their tile's own top beside them;
its tiles are independent. The second is attention with given weights. The weights cost as many
bytes as Hq numbers a row, written and read once.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.ops.decode import HeadGroup
from kvfold.ops.decode_triton import LOG2_E
from kvfold.ops.direct_triton import combine_kernel
from kvfold.ops.pages import words_of
from kvfold.ops.plan import padded_queries
from kvfold.ops.rebuild import KeyMaps, Layer, rebuild_groups
from kvfold.ops.rebuild_plan import (
    RebuildPlan,
    Tuning,
    pack_maps,
    pieces,
    plan_rebuild,
)
from kvfold.ops.rebuild_scores_triton import score_kernel
from kvfold.ops.rebuild_values_triton import value_kernel


def decode(
    q: Tensor,
    arena: Tensor,
    tables: Tensor,
    lengths: Tensor,
    layer: Layer,
    groups: Sequence[HeadGroup],
    slots: Tensor,
    scale: float,
    maps: KeyMaps,
    rope: Tensor,
    plan: RebuildPlan | None = None,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """`rebuild.decode_reference` on the device. Returns the outputs and the log2-sum-exp2 of the
    scores, fp32 [B, Hq]."""
    queries, tuning = q.shape[1] // len(maps.up), tuning or Tuning()
    about = rebuild_groups(layer, tuple(groups), queries, arena.device)
    assert q.stride()[1:] == (q.shape[2], 1), "a sequence's queries are one block"
    if plan is None:
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 3
        rows = lengths[slots].numel() * tables.shape[2] * about.page
        plan = plan_rebuild(lengths[slots], about, queries, q.dtype, tuning, sms, rows)
    where = (tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots)
    same = {"G": len(groups), "ZEROS": about.zeros, "PAGE": about.page, "ALIGN": about.align}
    _score(q, arena, where, about, scale, maps, rope, plan, tuning.scores, queries, same)
    return _attend_values(q, arena, where, about, plan, tuning, queries, same)


def _score(q, arena, where, about, scale, maps, rope, plan, tuning, queries, same) -> None:
    (bits, _), (first, second) = about.bits, pieces(about)
    if (key := (about, q.dtype)) not in maps.packed:
        maps.packed[key] = pack_maps(maps, about, q.dtype)
    up, sums = maps.packed[key]
    assert rope.shape[1] == up.shape[-1], "the table is of another head dim"
    assert rope.shape[0] >= tuning.block, "the table is shorter than a tile"
    score_kernel[(plan.scores.starts.shape[0] - 1,)](
        q, q.stride(0), up, sums, rope, rope.view(torch.float16), plan.weights, plan.tops,
        words_of(arena, q.dtype if bits == 16 else torch.uint16), words_of(arena, torch.int32),
        *where, about.keys, plan.bases, plan.scores.starts, scale * LOG2_E,
        HG=about.heads[0], N=queries, GP=padded_queries(queries), D=q.shape[-1],
        HALF=maps.rotary // 2, F=rope.shape[1], W0=first, W1=second,
        BITS=bits, TRACKED=about.tracked,
        EXACT=about.narrowest[0] * bits == 16 * (first + second),
        BLOCK=tuning.block, STAGES=tuning.stages, num_warps=tuning.warps,
        maxnreg=tuning.registers, **same,
    )  # fmt: skip


def _attend_values(q, arena, where, about, plan, tuning, queries, same) -> tuple[Tensor, Tensor]:
    bits, tune, slices = about.bits[1], tuning.values, plan.values
    out = q.new_empty(*q.shape[:2], about.widths[1])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    heads = about.heads[1] * queries
    widths = {
        "N": heads,
        "GP": padded_queries(heads),
        "DO": out.shape[-1],
        "DV": plan.part.shape[-1],
    }
    value_kernel[(slices.starts.shape[0] - 1,)](
        out, lse, plan.part, plan.part_ml, plan.weights, plan.tops,
        words_of(arena, q.dtype if bits == 16 else torch.uint16), words_of(arena, torch.int32),
        *where, about.values, plan.bases, slices.starts, slices.counts,
        V=len(about.values), NQ=about.heads[0] * queries, BITS=bits,
        EXACT=about.narrowest[1] == plan.part.shape[-1], BLOCK=tune.block,
        SPAN=tuning.scores.block, STAGES=tune.stages, num_warps=tune.warps,
        maxnreg=tune.registers, **widths, **same,
    )  # fmt: skip
    combine_kernel[(slices.counts.shape[0], heads)](
        out, lse, plan.part, plan.part_ml, about.values, slices.firsts, slices.counts,
        slices.firsts, G=len(about.values), ORDER=False, BLOCK=16, num_warps=4, **widths,
    )  # fmt: skip
    return out, lse
