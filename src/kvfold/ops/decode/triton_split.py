"""Decode attention in two passes, on rows that KV heads share or that have several precisions.

Keys want a program a KV head; values that heads share want one for all of them, and their pieces
are unpacked once. So the first pass turns every KV head's rows into weights, and the second weighs
values by them (`common.values_triton`). The weights cost as many bytes as Hq 16-bit numbers a row,
written and read once a piece.
Shapes as in `decode.triton`; V pieces of values.
"""
# mypy: allow-untyped-defs

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.launch import launch_options, multiprocessors
from kvfold.ops.common.pages import LayerPages, words_of
from kvfold.ops.common.pieces import (
    FORM_FIELDS,
    KEY_FIELDS,
    Pieces,
    key_pieces,
    value_heads,
    value_pieces,
    widest_value,
)
from kvfold.ops.common.plan import Slices, padded_queries
from kvfold.ops.common.plan_triton import plan_slices
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.common.values_triton import SPAN, Workspace, attend_values, part_shape
from kvfold.ops.decode.scores_triton import stored_score_kernel
from kvfold.spec.layout import Group

SCORES = Tuning(block=64, stages=3, warps=1, slices=8)
VALUES = Tuning(block=64, stages=3, warps=4, slices=2)
OVERHEAD = 2048  # cost of beginning an item, in bits of a row


@dataclass(frozen=True)
class SplitPlan:
    """One layer's slices of both passes, and where the spans of every (sequence, group) begin,
    int32 [B * G]."""

    scores: Slices
    values: Slices
    bases: Tensor
    room: Workspace
    cuts: tuple[Tuning, Tuning]


def plan_layers(
    layers: Sequence[Sequence[Group]],
    lengths: Tensor,
    queries: int,
    rows: int,
    cuts: tuple[Tuning, Tuning] = (SCORES, VALUES),
) -> list[SplitPlan]:
    """As `ops.decode.plan_layers`. cuts: of both passes."""
    device, first = lengths.device, layers[0]
    keys = [key_pieces(tuple(x), queries, device) for x in layers]
    values = [value_pieces(tuple(x), queries, device) for x in layers]
    counts = lengths.unflatten(1, (len(layers), -1))  # [B, L, G]
    spans = (-(-counts.transpose(0, 1) // SPAN)).flatten(1)
    bases = (spans.cumsum(1) - spans).int()
    scores, weighed = _slices(keys, 0, counts, cuts[0]), _slices(values, 6, counts, cuts[1])
    parts = max(x.starts.shape[0] - 1 + len(x.counts) for x in weighed)
    heads = value_heads(first) * queries
    group_heads = len(first[0].heads) * queries
    shape = part_shape(values, heads, parts)
    room = Workspace.of(rows, counts[:, 0].numel(), group_heads, shape, device)
    place = zip(scores, weighed, bases, strict=True)
    return [SplitPlan(*x, room, cuts) for x in place]


def _slices(pieces: Sequence[Pieces], group: int, counts: Tensor, tuning: Tuning) -> list[Slices]:
    """Of every layer; group: the field of a line that says whose rows it is about. Layers of as
    many lines are planned at once."""
    alike = defaultdict(list)
    for i, x in enumerate(pieces):
        alike[len(x.table)].append(i)
    found: dict[int, Slices] = {}
    for own in alike.values():
        owners = torch.stack([pieces[i].table[:, group] for i in own]).long()
        each = counts[:, own].gather(2, owners.expand(len(counts), -1, -1)).flatten(1)
        cost = torch.stack([pieces[i].cost for i in own])
        number = tuning.slices * multiprocessors(counts.device)
        slices, _ = plan_slices(each, None, cost, tuning.block, OVERHEAD, number, 1)
        found |= {i: slices.layer(number) for number, i in enumerate(own)}
    return [found[i] for i in range(len(pieces))]


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: SplitPlan | None = None
) -> tuple[Tensor, Tensor]:
    """As `ops.decode.decode`."""
    arena, tables, lengths, groups = pages
    heads = [head for group in groups for head in group.heads]
    q, queries = q.contiguous(), q.shape[1] // len(heads)
    keys, values = (of(groups, queries, q.device) for of in (key_pieces, value_pieces))
    if plan is None:
        counts = lengths[slots]
        rows = counts.numel() * tables.shape[2] * groups[0].layout.page
        plan = plan_layers([groups], counts, queries, rows)[0]
    room, (cut, tune), coded = plan.room, plan.cuts, keys.forms[0][0] < 16
    stored_score_kernel[(plan.scores.starts.shape[0] - 1,)](
        q, q.stride(0), room.weights, room.tops,
        words_of(arena, torch.uint16 if coded else q.dtype), words_of(arena, torch.int32),
        tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots,
        keys.table, plan.bases, plan.scores.starts, scale * LOG2_E,
        FORMS=keys.forms, KEY_FIELDS=KEY_FIELDS, FORM_FIELDS=FORM_FIELDS,
        G=len(groups), HK=len(heads), NQ=q.shape[1] // len(groups), N=queries,
        GP=padded_queries(queries), DQ=q.shape[2], ZEROS=keys.zeros, SCALE=keys.scale,
        PAGE=groups[0].layout.page, ALIGN=keys.align, BLOCK=cut.block, SPAN=SPAN,
        STAGES=cut.stages, num_warps=cut.warps, maxnreg=cut.registers,
        **launch_options(q.device),
    )  # fmt: skip
    return attend_values(
        q, widest_value(groups), pages, slots, values, value_heads(groups) * queries,
        plan.values, plan.bases, room, tune,
    )  # fmt: skip
