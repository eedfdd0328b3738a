"""Update eviction metrics from recent queries, reading stored keys once for all of them. Triton.

Shapes: B sequences, G groups (KV heads) of a layer, N query heads per group, W queries per head, so
that a group has C = N * W columns, of which QB are processed at a time; DK the layer's largest key
rank, rounded up. In every matrix product, tokens are the rows and queries the columns; codes as in
`codes_triton`.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor, float16, float32, int32, uint16

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.codes_triton import UNIT, load_query, load_scales, unpack
from kvfold.ops.common.pages import LayerPages, words_of
from kvfold.ops.common.plan import cdiv, padded_width, power_of_two
from kvfold.ops.common.recording import launch_once
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.decode.groups import DecodeGroups, decode_groups
from kvfold.ops.store.segments import plan_blocks

WARPS = 4  # of Hopper's widest matrix products
PROGRAMS = 4096  # of a launch, at least one per group: a few waves, with few idle programs


@triton.jit
def _columns(
    q, lse, positions, first, size, width, num_kept, exclude,
    QB: tl.constexpr, DQ: tl.constexpr, DK: tl.constexpr,
    BITS: tl.constexpr, ZEROS: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Load columns first .. first + QB of a group.

    Returns the queries q0 .. q3 [., QB], the score that the middle of the codes adds, sums of
    queries, log-sum-exps times the power, and the last position that each query sees; -1 if a query
    is not counted.

    q, lse, positions: pointers to the first of the group; size: C; num_kept: W.
    """
    C: tl.constexpr = 16 // BITS
    MIDDLE: tl.constexpr = 0.0 if ZEROS else (2**BITS - 1) / 2
    at = first + tl.arange(0, QB)
    in_range = at < size
    query_at = q + at.to(tl.int64) * DQ
    q0, total = load_query(query_at, in_range, width, 0, C, DK // C, BITS)
    q1, q2, q3 = q0, q0, q0
    if BITS < 16:
        q1, total1 = load_query(query_at, in_range, width, 1, C, DK // C, BITS)
        total += total1
    if BITS == 4:
        q2, total2 = load_query(query_at, in_range, width, 2, C, DK // C, BITS)
        q3, total3 = load_query(query_at, in_range, width, 3, C, DK // C, BITS)
        total += total2 + total3
    position = tl.load(positions + at % num_kept, in_range, -1).to(tl.int32)
    last = tl.where(position < 0, -1, position - exclude)
    return (
        q0,
        q1,
        q2,
        q3,
        total * (MIDDLE / UNIT),
        total,
        POWER * tl.load(lse + at, in_range, 0.0),
        last,
    )


@triton.jit
def _mass(k, columns, scale, zero, position, BITS: tl.constexpr, ZEROS: tl.constexpr):
    """Return what the columns add to the metrics of BLOCK tokens, fp32 [BLOCK].

    k [BLOCK, words]: codes; scale, zero: of every token, in log2 and times the power; position: of
    every token.
    """
    q0, q1, q2, q3, low, total, lse, last = columns
    k0, k1, k2, k3 = unpack(k, BITS)
    if BITS == 16:
        s = tl.dot(k0, q0) * scale - lse[None, :]
    else:
        s = tl.dot(k0, q0, tl.broadcast_to(-low[None, :], k.shape[0], q0.shape[1]))
        s = tl.dot(k1, q1, s)
        if BITS == 4:
            s = tl.dot(k3, q3, tl.dot(k2, q2, s))
        s = s * (scale * UNIT)[:, None] - lse[None, :]
        if ZEROS:
            s += zero[:, None] * total[None, :]
    return tl.sum(tl.where(position[:, None] <= last[None, :], tl.exp2(s), 0.0), 1)


@step_kernel
def observe_kernel(
    q, lse, positions, keys, scales, ints, floats,
    tables, table_slot, table_group, lengths, length_slot, slots, groups, tracks,
    num_kept, exclude, scale,
    G: tl.constexpr, N: tl.constexpr, QB: tl.constexpr, DQ: tl.constexpr, DK: tl.constexpr,
    BITS: tl.constexpr, ZEROS: tl.constexpr, PAIRED: tl.constexpr, POWER: tl.constexpr,
    ONCE: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, g, b): tiles i, i + number of programs, .. of a group's tokens.

    q [B, G * N, W, DQ]; lse fp32 [B, G * N, W]; positions [B, W]. keys, scales, ints, floats: the
    arena as words. groups int32 [G, 8]: see `decode_groups`; tracks int32 [2, G]: see `Blocks`.
    scale: of scores, in log2 and times POWER. ONCE: all columns fit in one block of QB. Only one
    program adds to a token's metric, so the result does not depend on the programs' order.
    """
    WORDS: tl.constexpr = 32  # 16-bit ones, that a page offset counts
    g, b = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + b).to(tl.int64)
    length = tl.load(lengths + slot * length_slot + g)
    tile, num_tiles = tl.program_id(0), tl.cdiv(length, BLOCK)
    if tile < num_tiles:
        group_row = groups + 8 * g
        width, key_row = tl.load(group_row), tl.multiple_of(tl.load(group_row + 2), ALIGN)
        scale_start, scale_row = tl.load(group_row + 5), tl.load(group_row + 6)
        track, metric = tl.load(tracks + g) // 4, tl.load(tracks + G + g) // 4
        size = N * num_kept
        head = (b * G * N + tl.load(group_row + 7)).to(tl.int64) * num_kept
        q += head * DQ
        lse += head
        positions += b * num_kept
        table = tables + slot * table_slot + g * table_group
        row, word = tl.arange(0, BLOCK), tl.arange(0, DK * BITS // 16)[None, :]
        key_codes = (width > 0) & (BITS < 16)
        value_codes = scale_row // (2 if ZEROS else 1) > key_codes.to(tl.int32)
        if ONCE:  # load them once, outside the loop over tiles
            columns = _columns(
                q, lse, positions, 0, size, width, num_kept, exclude,
                QB, DQ, DK, BITS, ZEROS, POWER,
            )  # fmt: skip
        for t in tl.range(tile, num_tiles, tl.num_programs(0), num_stages=STAGES):
            at = t * BLOCK + row
            in_range = at < length
            page = tl.load(table + at // PAGE, in_range, 0).to(tl.int64) * WORDS
            place = at % PAGE
            k = tl.load(
                keys + ((page + place * key_row)[:, None] + word),
                in_range[:, None] & (word < key_row),
                0,
            )
            track_row = page // 2 + place
            position = tl.load(ints + (track_row + track), in_range, 0)
            old = tl.load(floats + (track_row + metric), in_range, 0.0)
            factor, _, zero, _ = load_scales(
                scales, page, scale_start, place * scale_row, in_range, key_codes, value_codes,
                BITS < 16, ZEROS, PAIRED,
            )  # fmt: skip
            factor, zero = factor * scale, zero * scale
            if BITS == 16:
                factor = scale
            if ONCE:
                mass = _mass(k, columns, factor, zero, position, BITS, ZEROS)
            else:
                mass = tl.zeros([BLOCK], tl.float32)
                for first in tl.range(0, size, QB):
                    block_columns = _columns(
                        q, lse, positions, first, size, width, num_kept, exclude,
                        QB, DQ, DK, BITS, ZEROS, POWER,
                    )  # fmt: skip
                    mass += _mass(k, block_columns, factor, zero, position, BITS, ZEROS)
            tl.store(floats + (track_row + metric), old + mass, in_range)


def observe(
    q: Tensor, lse: Tensor, positions: Tensor, pages: LayerPages, slots: Tensor, scale: float,
    *, power: int, exclude: int = 0,
) -> None:  # fmt: skip
    """Like `ops.observe.observe`. The launch depends on shapes alone and never waits."""
    arena, tables, lengths, _ = pages
    num_groups, num_kept = len(pages.groups), q.shape[2]
    queries = q.shape[1] // num_groups
    assert lse.shape == q.shape[:3] and lse.dtype is float32, "a log-sum-exp of every query"
    assert positions.shape == (len(q), num_kept) and tables.stride(2) == 1
    groups = decode_groups(pages.groups, queries, q.device)
    bits, columns = groups.bits[0], queries * num_kept
    block, stages = _cut(groups)
    tiles = cdiv(tables.shape[2] * groups.page, block)
    programs = min(tiles, cdiv(PROGRAMS, num_groups * len(slots)))
    at_once = min(64, max(8, power_of_two(columns)))
    kinds = q.dtype if bits == 16 else uint16, int32 if groups.paired else float16, int32, float32
    launch_once(
        observe_kernel, (programs, num_groups, len(slots)),
        q.contiguous(), lse.contiguous(), positions.contiguous(),
        *(words_of(arena, kind) for kind in kinds),
        tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots.contiguous(),
        groups.table, plan_blocks(pages.groups, q.device).tracks,
        num_kept, exclude, scale * LOG2_E * power,
        G=num_groups, N=queries, QB=at_once, DQ=q.shape[-1],
        DK=max(padded_width(groups.widths[0]), 16 * (16 // bits)),
        BITS=bits, ZEROS=groups.zeros, PAIRED=groups.paired, POWER=power,
        ONCE=columns <= at_once, PAGE=groups.page, ALIGN=groups.align,
        BLOCK=block, STAGES=stages, num_warps=WARPS,
    )  # fmt: skip


def _cut(groups: DecodeGroups) -> tuple[int, int]:
    """Return tokens of a tile and pipeline stages. A tile's page numbers take one stage and its
    keys the next, so every second stage holds keys in flight: at least 32 KB per multiprocessor."""
    wide = groups.widths[0] * groups.bits[0] > 1024
    return 64 if wide else 128, 3 if groups.bits[0] == 16 else 5
