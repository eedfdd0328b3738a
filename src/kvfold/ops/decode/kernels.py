"""Triton kernel of decode attention for KV heads that each have their own entries (`triton.py`).

Serves 16, 8 or 4 bits per number with one scale for keys and one for values, on CUDA. Every entry
is read once: scores, softmax and outputs are computed tile by tile (flash decoding). Also defines
`after_launch`, `tile_pages` and `tile_rows`, which other kernels use.

Shapes: B sequences, G groups (KV heads) of a layer, N query heads per group, padded to GP; I = B *
G items, S splits of the work (see `common.plan`); DK, DV widths of the layer's widest key and
value, rounded up; WK, WV the same in code words. In every matrix product entries are the rows and
queries the 8 or 16 columns. How codes become numbers: see `codes_triton`.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvfold.ops.common.codes_triton import UNIT, load_query, load_scales, unpack
from kvfold.ops.common.step_kernel import step_kernel


@triton.jit
def after_launch(PDL: tl.constexpr):
    """Programmatic dependent launch: wait for the kernels before, and let the next kernel start.

    With PDL this kernel's launch did not wait for the end of the previous kernel, so the wait is
    here; programs of the next kernel may be scheduled as soon as there is room, and wait at this
    same place. PDL: needs sm_90 or later; no effect without `launch_pdl=True`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _tile(
    state, queries, row, page, inside, keys, values, scales, group, scale,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, ZEROS: tl.constexpr, PAIRED: tl.constexpr,
    WK: tl.constexpr, WV: tl.constexpr, EXACT: tl.constexpr, ONE_PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Update the softmax state with one tile: entries `row` of `page` [BLOCK] (or of one page).

    page: offset in 16-bit words, int64. inside: entries that exist; MASKED: whether some do not.
        EXACT: all entries are as wide as the tile. state: maximum score, sum of weights, weighted
        sum of zero points, and output accumulators by code of a word.
    """
    LOW: tl.constexpr = (2**VALUE_BITS - 1) / 2
    top, mass, floor, acc0, acc1, acc2, acc3 = state
    q0, q1, q2, q3, low, total = queries
    key_row, value_row, value_start, scale_start, scale_row, key_codes, value_codes = group
    key_word, value_word = tl.arange(0, WK)[None, :], tl.arange(0, WV)[:, None]
    if ONE_PAGE:
        key_at = keys + page + ((row * key_row)[:, None] + key_word)
        value_at = values + (page + value_start) + ((row * value_row)[None, :] + value_word)
    else:
        key_at = keys + ((page + row * key_row)[:, None] + key_word)
        value_at = values + ((page + value_start + row * value_row)[None, :] + value_word)
    # Entries beyond the length are read from some page too. Their scores are masked, so their
    # weight is 0. That suffices for codes, but not for 16-bit values, which may be NaN.
    k = tl.load(key_at) if EXACT else tl.load(key_at, key_word < key_row, 0)
    if MASKED and VALUE_BITS == 16:
        v = tl.load(value_at, inside[None, :] & (EXACT | (value_word < value_row)), 0)
    elif EXACT:
        v = tl.load(value_at)
    else:
        v = tl.load(value_at, value_word < value_row, 0)
    key_scale, value_scale, key_zero, value_zero = load_scales(
        scales, page, scale_start, row * scale_row, inside, key_codes, value_codes,
        KEY_BITS < 16 or VALUE_BITS < 16, ZEROS, PAIRED,
    )  # fmt: skip
    k0, k1, k2, k3 = unpack(k, KEY_BITS)
    if KEY_BITS == 16:
        s = tl.dot(k0, q0)
    else:
        s = tl.dot(k0, q0, tl.broadcast_to(-low[None, :], row.shape[0], q0.shape[1]))
        s = tl.dot(k1, q1, s)
        if KEY_BITS == 4:
            s = tl.dot(k3, q3, tl.dot(k2, q2, s))
        s *= (key_scale * (scale * UNIT))[:, None]
        if ZEROS:
            s += (key_zero * scale)[:, None] * total[None, :]
        if MASKED:
            s += tl.where(inside, 0.0, float("-inf"))[:, None]  # fuses with the scale
    if KEY_BITS == 16:
        if MASKED:
            s = tl.where(inside[:, None], s, float("-inf"))
        peak = tl.maximum(top, tl.max(s, 0) * scale)
        p = tl.exp2(s * scale - peak[None, :])
    else:
        peak = tl.maximum(top, tl.max(s, 0))
        p = tl.exp2(s - peak[None, :])
    fade = tl.exp2(top - peak)[None, :]
    mass = mass * fade + p
    v0, v1, v2, v3 = unpack(v, VALUE_BITS)
    if VALUE_BITS < 16:
        if ZEROS:
            # Relative to the middle code, so that the error of rounded weights stays small.
            floor = floor * fade + p * (value_zero + LOW * value_scale)[:, None]
        p *= value_scale[:, None]
    w = p.to(v0.dtype)
    if VALUE_BITS == 16:
        acc0 = tl.dot(v0, w, acc0 * fade)
    else:
        # Subtract the middle code tile by tile: summed over a long sequence, its large total
        # would cost the accumulator its precision.
        weight = tl.dot(tl.full([WV, row.shape[0]], 1.0, w.dtype), w)
        even = weight * (-LOW / UNIT)
        odd = weight * (-LOW / UNIT * (1 if VALUE_BITS == 8 else 16))
        acc0 = acc0 * fade + tl.dot(v0, w, even)
        acc1 = acc1 * fade + tl.dot(v1, w, odd)
        if VALUE_BITS == 4:
            acc2 = acc2 * fade + tl.dot(v2, w, even)
            acc3 = acc3 * fade + tl.dot(v3, w, odd)
    return peak, mass, floor, acc0, acc1, acc2, acc3


@triton.jit
def tile_pages(table, t, row, length, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Load the offset of tile t's page, or [BLOCK] of each entry's page if a tile spans pages.

    Entries beyond the length get the last entry's page.
    """
    first = t * row.shape[0]
    entry = first if ONE_PAGE else first + row
    return tl.load(table + tl.minimum(entry, length - 1) // PAGE)


@triton.jit
def tile_rows(t, row, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Return the index within its page of every entry of tile t: [BLOCK]."""
    first = t * row.shape[0]
    return row + first % PAGE if ONE_PAGE else (first + row) % PAGE


@step_kernel
def decode_kernel(
    q, q_stride, out, lse, part, part_ml,
    keys, values, scales, tables, table_slot, table_group, lengths, slots,
    groups, starts, counts, order, scale,
    G: tl.constexpr, N: tl.constexpr, GP: tl.constexpr,
    DQ: tl.constexpr, DO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, ZEROS: tl.constexpr, PAIRED: tl.constexpr,
    PAGE: tl.constexpr, ALIGN: tl.constexpr, EXACT: tl.constexpr, ORDER: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Process one split: its tiles of every item that it touches.

    q [B, G * N, DQ] and out [B, G * N, DO] in score and value space; lse fp32 [B, G * N], in log2.
    Items that several splits share leave part fp32 [S + I, GP, DV] (unnormalised outputs) and
    part_ml fp32 [S + I, 2, GP] (maximum score, sum of weights) for `combine_kernel`. keys, values,
    scales: the arena as 16-bit words. lengths int32 [I]. groups int32 [G, 8]: see `DecodeGroups`.
    starts, counts, order: see `Slices`.
    """
    CK: tl.constexpr = 16 // KEY_BITS
    CV: tl.constexpr = 16 // VALUE_BITS
    WK: tl.constexpr = DK // CK
    WV: tl.constexpr = DV // CV
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0  # a tile lies in one page
    KEY_LOW: tl.constexpr = 0.0 if ZEROS else (2**KEY_BITS - 1) / 2
    OFFSET: tl.constexpr = 32  # 16-bit words per unit of a page offset
    after_launch(PDL)
    slice = tl.program_id(0)
    item = tl.load(starts + 2 * slice)
    tile = tl.load(starts + 2 * slice + 1)
    end_item = tl.load(starts + 2 * slice + 2)
    end_tile = tl.load(starts + 2 * slice + 3)
    head = tl.arange(0, GP)
    row, value_word = tl.arange(0, BLOCK), tl.arange(0, WV)
    while (item < end_item) | ((item == end_item) & (tile < end_tile)):
        which = item
        if ORDER:
            which = tl.load(order + item)
        b, g = which // G, which % G
        # Issue all loads of an item together, since one load takes as long as a tile. Volatile:
        # otherwise the compiler moves them to their uses, behind the wait for the length.
        slot = tl.load(slots + b, volatile=True).to(tl.int64)
        length = tl.load(lengths + which)
        count = tl.load(counts + item, volatile=True)
        record = groups + 8 * g
        key_width = tl.load(record, volatile=True)
        value_width = tl.load(record + 1, volatile=True)
        key_row = tl.multiple_of(tl.load(record + 2, volatile=True), ALIGN)
        value_row = tl.multiple_of(tl.load(record + 3, volatile=True), ALIGN)
        value_start = tl.multiple_of(tl.load(record + 4, volatile=True), 8)
        scale_start = tl.load(record + 5, volatile=True)
        scale_row = tl.load(record + 6, volatile=True)
        first_head = tl.load(record + 7, volatile=True)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            table = tables + slot * table_slot + g * table_group
            next_page = tile_pages(table, tile, row, length, PAGE, ONE_PAGE)
            key_codes = (key_width > 0) & (KEY_BITS < 16)
            value_codes = (value_width > 0) & (VALUE_BITS < 16)
            query = b * q_stride + (first_head + head) * DQ
            q0, total = load_query(q + query, head < N, key_width, 0, CK, WK, KEY_BITS)
            q1, q2, q3 = q0, q0, q0
            if KEY_BITS < 16:
                q1, sum1 = load_query(q + query, head < N, key_width, 1, CK, WK, KEY_BITS)
                total += sum1
            if KEY_BITS == 4:
                q2, sum2 = load_query(q + query, head < N, key_width, 2, CK, WK, KEY_BITS)
                q3, sum3 = load_query(q + query, head < N, key_width, 3, CK, WK, KEY_BITS)
                total += sum2 + sum3
            low = KEY_LOW / UNIT * total
            queries = (q0, q1, q2, q3, low, total)
            group = (
                key_row, value_row, value_start, scale_start, scale_row, key_codes, value_codes
            )  # fmt: skip
            none = tl.zeros([WV, GP], tl.float32)
            spread = tl.zeros([BLOCK, GP], tl.float32)  # summed over entries once, at the end
            # Maximum score, sum of weights, weighted sum of zero points, outputs.
            top = tl.full([GP], float("-inf"), tl.float32)
            state = (top, spread, spread, none, none, none, none)
            full = tl.minimum(stop, length // BLOCK)
            for t in tl.range(tile, full, num_stages=STAGES):
                page = next_page.to(tl.int64) * OFFSET
                next_page = tile_pages(table, t + 1, row, length, PAGE, ONE_PAGE)
                state = _tile(
                    state, queries, tile_rows(t, row, PAGE, ONE_PAGE), page, row >= 0,
                    keys, values, scales, group, scale,
                    KEY_BITS, VALUE_BITS, ZEROS, PAIRED, WK, WV, EXACT, ONE_PAGE, False,
                )  # fmt: skip
            if full < stop:
                state = _tile(
                    state, queries, tile_rows(full, row, PAGE, ONE_PAGE),
                    next_page.to(tl.int64) * OFFSET, full * BLOCK + row < length,
                    keys, values, scales, group, scale,
                    KEY_BITS, VALUE_BITS, ZEROS, PAIRED, WK, WV, EXACT, ONE_PAGE, True,
                )  # fmt: skip
            top, spread, floors, acc0, acc1, acc2, acc3 = state
            mass, floor = tl.sum(spread, 0), tl.sum(floors, 0)
            only_split = count == 1
            norm = 1.0 / mass if only_split else mass * 0 + 1
            base = out + (b * G * N + first_head) * DO
            piece = part + (slice + item).to(tl.int64) * GP * DV
            for J in tl.static_range(CV):
                acc = acc0 if J == 0 else (acc1 if J == 1 else (acc2 if J == 2 else acc3))
                if VALUE_BITS < 16:
                    acc *= UNIT / (16 if VALUE_BITS == 4 and J % 2 == 1 else 1)
                acc += floor[None, :]
                column = value_word * CV + J
                if only_split:
                    tl.store(
                        base + head[None, :] * DO + column[:, None],
                        tl.where((column < value_width)[:, None], acc * norm[None, :], 0.0),
                        (head < N)[None, :] & (column < DO)[:, None],
                    )
                else:
                    tl.store(piece + head[None, :] * DV + column[:, None], acc, (head < N)[None, :])
            if only_split:
                tl.store(lse + b * G * N + first_head + head, top + tl.log2(mass), head < N)
            else:
                ml = part_ml + (slice + item).to(tl.int64) * 2 * GP
                tl.store(ml + head, top, head < N)
                tl.store(ml + GP + head, mass, head < N)
        item += 1
        tile = 0
