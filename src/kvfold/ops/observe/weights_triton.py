"""Update eviction metrics from the weights that two-pass decoding left in its workspace. Triton.

No key is read again. The kernel needs a token's weight, the maximum of its span and the query's
log-sum-exp.

Shapes: B sequences, G groups of a layer, NQ query heads per group, padded to NP; a tile is SPANS
spans of SPAN tokens.
"""
# mypy: allow-untyped-defs

import triton.language as tl
from torch import Tensor, float32, int32

from kvfold.ops.common.pages import LayerPages, words_of
from kvfold.ops.common.plan import cdiv, power_of_two
from kvfold.ops.common.recording import launch_once
from kvfold.ops.common.split import SPAN, SplitPlan
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.latent_decode.plan import LatentPlan
from kvfold.ops.store.segments import plan_blocks

TILE = 2048  # weights of a tile
PROGRAMS = 4096  # of a launch, at least one per group: a few waves, with few idle programs


@step_kernel
def observe_weights_kernel(
    weights, tops, bases, lse, positions, ints, floats,
    tables, table_slot, table_group, lengths, length_slot, slots, tracks, exclude,
    G: tl.constexpr, NQ: tl.constexpr, NP: tl.constexpr, POWER: tl.constexpr,
    PAGE: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Program (i, g, b): tiles i, i + number of programs, .. of a group's tokens.

    weights, tops: of a `Workspace`; bases: of its plan; lse fp32 [B, G * NQ]; positions [B]. ints,
        floats: the arena as words. tracks int32 [2, G]: see `Blocks`. Only one program adds to a
        token's metric, so the result does not depend on the programs' order.
    """
    WORDS: tl.constexpr = 16  # 32-bit ones, that a page offset counts
    g, b = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + b).to(tl.int64)
    length = tl.load(lengths + slot * length_slot + g)
    tile, num_tiles = tl.program_id(0), tl.cdiv(length, SPANS * SPAN)
    if tile < num_tiles:
        n, row = tl.arange(0, NP), tl.arange(0, SPAN)
        track, metric = tl.load(tracks + g) // 4, tl.load(tracks + G + g) // 4
        total = tl.load(lse + (b * G + g) * NQ + n, n < NQ, 0.0)
        last = tl.load(positions + b).to(tl.int32) - exclude
        first = tl.load(bases + b * G + g).to(tl.int64)
        table = tables + slot * table_slot + g * table_group
        for t in tl.range(tile, num_tiles, tl.num_programs(0)):
            span = t * SPANS + tl.arange(0, SPANS)
            at = span[:, None] * SPAN + row[None, :]
            tokens_in_range = at < length
            page = tl.load(table + at // PAGE, tokens_in_range, 0).to(tl.int64) * WORDS
            track_row = page + at % PAGE
            counted = tokens_in_range & (
                tl.load(ints + (track_row + track), tokens_in_range, 0) <= last
            )
            in_range = (span * SPAN < length)[:, None] & (n < NQ)[None, :]
            span_rows = (first + span)[:, None] * NQ + n[None, :]
            top = tl.load(tops + span_rows, in_range, float("-inf"))
            p = tl.load(
                weights + (span_rows[:, :, None] * SPAN + row[None, None, :]),
                in_range[:, :, None],
                0.0,
            ).to(tl.float32)
            p *= tl.exp2(top - total[None, :])[:, :, None]
            if POWER == 2:
                p *= p
            old = tl.load(floats + (track_row + metric), counted, 0.0)
            tl.store(floats + (track_row + metric), old + tl.sum(p, 1), counted)


def observe_weights(
    plan: SplitPlan | LatentPlan, lse: Tensor, positions: Tensor, pages: LayerPages, slots: Tensor,
    *, power: int, exclude: int = 0,
) -> None:  # fmt: skip
    """Like `ops.observe.observe_weights`. The launch depends on shapes alone."""
    arena, tables, lengths, groups = pages
    num_groups, room, page = len(groups), plan.room, groups[0].layout.page
    heads = room.tops.shape[1]
    assert lse.shape == (len(slots), num_groups * heads), "a log-sum-exp of every query"
    assert lse.dtype is float32 and tables.stride(2) == 1
    assert groups[0].layout.tracked, "untracked rows have no metrics"
    padded = power_of_two(heads)
    spans = max(1, TILE // (SPAN * padded))
    tiles = cdiv(tables.shape[2] * page, spans * SPAN)
    programs = min(tiles, cdiv(PROGRAMS, num_groups * len(slots)))
    launch_once(
        observe_weights_kernel, (programs, num_groups, len(slots)),
        room.weights, room.tops, plan.bases, lse.contiguous(), positions.contiguous(),
        words_of(arena, int32), words_of(arena, float32),
        tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots.contiguous(),
        plan_blocks(groups, arena.device).tracks, exclude,
        G=num_groups, NQ=heads, NP=padded, POWER=power, PAGE=page, SPAN=SPAN, SPANS=spans,
    )  # fmt: skip
