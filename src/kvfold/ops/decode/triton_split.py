"""Decode attention in two passes, on rows that KV heads share or that have several precisions.

Keys want a program a KV head; values that heads share want one for all of them, and their pieces
are unpacked once. So the first pass turns every KV head's rows into weights, and the second weighs
values by them (`common.values_triton`). The weights cost as many bytes as Hq 16-bit numbers a row,
written and read once a piece.
Shapes as in `decode.triton`; V pieces of values.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.ops import one_pass
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.pages import LayerPages, owner_of, words_of
from kvfold.ops.common.pieces import (
    FORM_FIELDS,
    KEY_FIELDS,
    key_pieces,
    value_heads,
    value_pieces,
    widest_value,
)
from kvfold.ops.common.plan import padded_queries
from kvfold.ops.common.split import SPAN, VALUES, SplitPlan, plan_split
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.common.values_triton import attend_values
from kvfold.ops.decode.scores_triton import stored_score_kernel
from kvfold.spec.layout import Group

SCORES = Tuning(block=64, stages=3, warps=1, slices=8)


def plan_layers(
    layers: Sequence[Sequence[Group]],
    lengths: Tensor,
    queries: int,
    rows: int,
    cuts: tuple[Tuning, Tuning] | None = None,
) -> list[SplitPlan] | list[one_pass.OnePassPlan]:
    """As `ops.decode.plan_layers`. cuts: of both passes; None: as they are fastest, or in one pass
    where that serves all of the layers and rows are many."""
    whole = cuts is None and rows >= one_pass.ROWS
    if whole and all(one_pass.serves(tuple(x), queries, lengths.device) for x in layers):
        return one_pass.plan_layers(layers, lengths, queries)
    keys = [key_pieces(tuple(x), queries, lengths.device) for x in layers]
    tables = [(x.table, x.cost) for x in keys]
    return plan_split(layers, tables, lengths, queries, rows, *(cuts or (SCORES, VALUES)))


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float,
    plan: SplitPlan | one_pass.OnePassPlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `ops.decode.decode`."""
    arena, tables, lengths, groups = pages
    heads = len(owner_of(groups))
    q, queries = q.contiguous(), q.shape[1] // heads
    if plan is None:
        counts = lengths[slots]
        rows = counts.numel() * tables.shape[2] * groups[0].layout.page
        plan = plan_layers([groups], counts, queries, rows)[0]
    if isinstance(plan, one_pass.OnePassPlan):
        return one_pass.decode(q, pages, slots, scale, plan)
    keys, values = (of(groups, queries, q.device) for of in (key_pieces, value_pieces))
    room, (cut, tune), coded = plan.room, plan.cuts, keys.forms[0][0] < 16
    stored_score_kernel[(plan.scores.starts.shape[0] - 1,)](
        q, q.stride(0), room.weights, room.tops,
        words_of(arena, torch.uint16 if coded else q.dtype), words_of(arena, torch.int32),
        tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots,
        keys.table, plan.bases, plan.scores.starts, scale * LOG2_E,
        FORMS=keys.forms, KEY_FIELDS=KEY_FIELDS, FORM_FIELDS=FORM_FIELDS,
        G=len(groups), HK=heads, NQ=q.shape[1] // len(groups), N=queries,
        GP=padded_queries(queries), DQ=q.shape[2], ZEROS=keys.zeros, SCALE=keys.scale,
        PAGE=groups[0].layout.page, ALIGN=keys.align, BLOCK=cut.block, SPAN=SPAN,
        STAGES=cut.stages, num_warps=cut.warps, maxnreg=cut.registers,
        **launch_options(q.device),
    )  # fmt: skip
    return attend_values(
        q, widest_value(groups), pages, slots, values, value_heads(groups) * queries,
        plan.values, plan.bases, room, tune,
    )  # fmt: skip
