"""Launches the kernels `triton_split`: decode attention in two passes, or in one on Hopper.

Chosen on CUDA for entries that KV heads share or that have segments of several bit widths. If a
Hopper GPU supports all layers in `ops.one_pass` and there are at least `one_pass.ROWS` entries,
`plan_layers` chooses that kernel instead of the two passes.

There are two passes because keys are best computed with a program per latent, and values that heads
share with one program for all of these heads, which unpacks each piece once. So the first pass
(`scores_triton`, or `scores_wide` for wide keys) computes softmax weights, and the second
(`common.values_triton`) sums the values weighted by them. The weights cost as many bytes as Hq
16-bit numbers per entry, written once and read once per piece of the values.

Shapes as in `decode.triton`; V pieces of values.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.layout.pages import Group, LayerGroups
from kvfold.ops import one_pass
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.pages import LayerPages, owner_of, words_of
from kvfold.ops.common.pieces import (
    FORM_FIELDS,
    KEY_FIELDS,
    key_heads,
    key_pieces,
    value_heads,
    value_pieces,
    widest_value,
)
from kvfold.ops.common.plan import padded_queries
from kvfold.ops.common.recording import contiguous, launch
from kvfold.ops.common.split import SPAN, VALUES, SplitPlan, plan_split
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.common.values_triton import attend_values
from kvfold.ops.decode.limits import Limits
from kvfold.ops.decode.scores_triton import stored_score_kernel
from kvfold.ops.decode.scores_wide import wide_score_kernel
from kvfold.ops.latent_decode.pieces import TILE

SCORES = Tuning(block=64, stages=3, warps=1, slices=8)
WIDE = Tuning(block=128, stages=3, warps=4, slices=3)
HELD = (128, 32)  # code words of a key and query columns that a warp holds without spilling


def plan_layers(
    layers: Sequence[Sequence[Group]],
    lengths: Tensor,
    queries: int,
    rows: int,
    cuts: tuple[Tuning, Tuning] | None = None,
    limited: bool = False,
) -> list[SplitPlan] | list[one_pass.OnePassPlan]:
    """See `ops.decode.plan_layers`. Chooses one pass if it supports all layers and `rows` is large
    enough.

    cuts: tuning of both passes, which also rules out one pass; None: the fastest.
    """
    layers, device = [LayerGroups.of(x) for x in layers], lengths.device
    may_use_one_pass = cuts is None and not limited and rows >= one_pass.ROWS
    if may_use_one_pass and all(one_pass.serves(x, queries, device) for x in layers):
        return one_pass.plan_layers(layers, lengths, queries)
    keys = [key_pieces(x, queries, device) for x in layers]
    tables = [(x.table, x.cost) for x in keys]
    wide = not all(held(x, queries, device) for x in layers)
    tunings = cuts or (WIDE if wide else SCORES, VALUES)
    plans = plan_split(layers, tables, lengths, queries, rows, *tunings)
    return [replace(plan, wide=wide) for plan in plans]


@lru_cache(maxsize=4096)
def held(groups: tuple[Group, ...], queries: int, device: torch.device) -> bool:
    """Tell whether a warp holds a tile of keys and the queries of all heads that share it."""
    words = sum(words for _, words in key_pieces(groups, queries, device).forms)
    return words <= HELD[0] and padded_queries(key_heads(groups) * queries) <= HELD[1]


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float,
    plan: SplitPlan | one_pass.OnePassPlan | None = None, limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.decode.decode`."""
    _, tables, lengths, groups = pages
    q, queries = contiguous(q), q.shape[1] // len(owner_of(groups))
    if plan is None:
        counts = lengths[slots]
        rows = counts.numel() * tables.shape[2] * groups[0].layout.page
        plan = plan_layers([groups], counts, queries, rows, limited=limits is not None)[0]
    if isinstance(plan, one_pass.OnePassPlan):
        assert limits is None, "the one-pass kernel supports no limits"
        return one_pass.decode(q, pages, slots, scale, plan)
    _score(q, pages, slots, scale, plan, queries, limits)
    values = value_pieces(groups, queries, q.device)
    return attend_values(
        q, widest_value(groups), pages, slots, values, value_heads(groups) * queries,
        plan.values, plan.bases, plan.room, plan.cuts[1],
    )  # fmt: skip


def _score(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: SplitPlan, queries: int,
    limits: Limits | None,
) -> None:  # fmt: skip
    """Launch the first pass: weights of all entries into the plan's workspace."""
    arena, tables, lengths, groups = pages
    workspace, tuning, columns = plan.room, plan.cuts[0], key_heads(groups) * queries
    keys = key_pieces(groups, queries, q.device)
    kernel, forms, coded = stored_score_kernel, keys.forms, keys.forms[0][0] < 16
    if plan.wide:
        kernel, forms = wide_score_kernel, tuple((x, min(n, TILE[x])) for x, n in forms)
    cap, window, positions, places = 1.0, 0, slots, keys.table
    if limits is not None:
        cap, window = limits.softcap or cap, limits.window or window
        positions, places = limits.positions.contiguous(), _places(groups, q.device)
    launch(
        kernel, (plan.scores.starts.shape[0] - 1,),
        q, q.stride(0), workspace.weights, workspace.tops,
        words_of(arena, torch.uint16 if coded else q.dtype), words_of(arena, torch.int32),
        tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots,
        keys.table, plan.bases, plan.scores.starts, scale * LOG2_E,
        positions, places, cap, window,
        FORMS=forms, KEY_FIELDS=KEY_FIELDS, FORM_FIELDS=FORM_FIELDS,
        G=len(groups), HK=len(keys.table), NQ=q.shape[1] // len(groups), N=columns,
        GP=padded_queries(columns), DQ=q.shape[2], ZEROS=keys.zeros, SCALE=keys.scale,
        PAGE=groups[0].layout.page, ALIGN=keys.align, BLOCK=tuning.block, SPAN=SPAN,
        STAGES=tuning.stages, num_warps=tuning.warps, maxnreg=tuning.registers,
        CAP=limits is not None and limits.softcap is not None,
        WINDOW=limits is not None and limits.window is not None, TRACKED=groups[0].layout.tracked,
        **launch_options(q.device),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _places(groups: tuple[Group, ...], device: torch.device) -> Tensor:
    """Offset of the positions in a page of every group, in int32 numbers: [G]."""
    places = [group.layout.blocks.positions.offset // 4 for group in groups]
    return torch.tensor(places, dtype=torch.int32, device=device)
