"""The kernels of `store.triton`: copy tiles of token entries between tensors and pages.

Names in capitals are known when a kernel is compiled: FORMS, (bits, bits of the low and of the high
plane, Gaussian step, bytes that divide offsets, numbers that divide columns) of every bit width of
the layer; TILES, see `Pieces`, of which T is one; PAGE, rows a page; SCALE, bytes of a scale; SIZE,
numbers of a program's tile, and ROWS x WIDTH, its shape. Steps are strides. Addresses are int64; a
`home` points at the first byte of a page.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvfold.ops.common.bits_triton import quantize, read_plane, read_scale, write_plane
from kvfold.ops.common.step_kernel import step_kernel

FIELDS = tl.constexpr(13)  # of a segments.Piece
UNIT = tl.constexpr(64)  # bytes that a page offset counts


@triton.jit
def _piece(pieces, number):
    """Its fields, in the order of segments.Piece."""
    at = pieces + number * FIELDS
    group, start, width, bits = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    low, high, row, scale = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    zero, scales, positions = tl.load(at + 8), tl.load(at + 9), tl.load(at + 10)
    metrics, first = tl.load(at + 11), tl.load(at + 12)
    return group, start, width, bits, low, high, row, scale, zero, scales, positions, metrics, first


# One order of sums, however many tokens there are.
@step_kernel
def append_rows(
    arena, tables, pieces, rows, slots, index, positions, num_tokens,
    slot_step, group_step, page_step, row_step, token_step, number_step,
    FORMS: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    ZEROS: tl.constexpr, TRACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program: one piece of as many tokens as make SIZE. Those of a tile's pieces follow each
    other, of its tokens in turn."""
    program = tl.program_id(0)
    for t in tl.static_range(len(TILES)):
        num_programs = tl.cdiv(num_tokens, SIZE // TILES[t][1]) * TILES[t][3]
        if (program >= 0) & (program < num_programs):
            _append(
                arena, tables, pieces, rows, slots, index, positions, num_tokens,
                slot_step, group_step, page_step, row_step, token_step, number_step,
                program // TILES[t][3], TILES[t][2] + program % TILES[t][3],
                t, FORMS, TILES, PAGE, SCALE, ZEROS, TRACKED, SIZE,
            )  # fmt: skip
        program -= num_programs


@triton.jit
def _append(
    arena, tables, pieces, rows, slots, index, positions, num_tokens,
    slot_step, group_step, page_step, row_step, token_step, number_step, at, number,
    T: tl.constexpr, FORMS: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr,
    SCALE: tl.constexpr, ZEROS: tl.constexpr, TRACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Piece `number` of ROWS tokens from at * ROWS on."""
    FORM: tl.constexpr = TILES[T][0]
    BITS: tl.constexpr = FORMS[FORM][0]
    WIDTH: tl.constexpr = TILES[T][1]
    ROWS: tl.constexpr = SIZE // WIDTH
    NUMBERS: tl.constexpr = FORMS[FORM][5]
    piece = _piece(pieces, number)
    group, start, width, _, low, high, row, scale_at, zero_at, scales, where, metrics, _ = piece
    token = at.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = token < num_tokens
    at = tl.load(index + token * token_step + group * number_step, here, 0)
    slot = tl.load(slots + token, here, 0)
    entry = tables + slot * slot_step + group * group_step + at // PAGE * page_step
    home = arena + tl.load(entry, here, 0).to(tl.int64) * UNIT
    line = (at % PAGE).to(tl.int32)
    column = tl.arange(0, WIDTH)[None, :]
    # As in `gather_rows`: for wide loads, after which a thread's numbers are of one row.
    inside = here[:, None] & (column < width // NUMBERS * NUMBERS)
    first = token[:, None] * row_step + start // NUMBERS * NUMBERS
    # Rows that are not there divide 1 by 1: nothing takes the long way of a division by 0.
    x = tl.load(rows + first + column, inside, tl.where(here, 0.0, 1.0)[:, None])
    codes = home + low + line * row
    if BITS == 16:
        tl.store(codes.to(rows.dtype)[:, None] + column, x, inside)
    else:
        LOW: tl.constexpr = FORMS[FORM][1]
        HIGH: tl.constexpr = FORMS[FORM][2]
        q, scale, zero = quantize(
            x.to(tl.float32), inside, width, BITS, FORMS[FORM][3], SCALE, ZEROS
        )
        write_plane(codes, q & ((1 << LOW) - 1), width, here, LOW, ROWS, WIDTH)
        if HIGH > 0:
            write_plane(home + high + line * row, q >> LOW, width, here, HIGH, ROWS, WIDTH)
        beside = home + line * scales
        tl.store((beside + scale_at).to(tl.pointer_type(scale.dtype)), scale, here)
        if ZEROS:
            tl.store((beside + zero_at).to(tl.pointer_type(zero.dtype)), zero, here)
    if TRACKED:
        mine = here & (where >= 0)
        position = tl.load(positions + token, mine, 0)
        tl.store((home + where + line * 4).to(tl.pointer_type(tl.int32)), position, mine)
        nothing = tl.zeros([ROWS], tl.float32)
        tl.store((home + metrics + line * 4).to(tl.pointer_type(tl.float32)), nothing, mine)


@step_kernel
def gather_rows(
    arena, tables, pieces, slots, lengths, rows, valid, positions,
    size, row_width, num_groups, num_pieces,
    slot_step, group_step, page_step, sequence_step, number_step,
    FORMS: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr,
    TRACKED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (i, b): one piece of one page of sequence b. Pieces of a page run side by side, so
    that their parts of a row meet in the L2 cache."""
    piece = _piece(pieces, tl.program_id(0) % num_pieces)
    group, start, width, bits, low, high, row, scale_at, zero_at, scales, where, _, first = piece
    page, b = tl.program_id(0) // num_pieces, tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b * sequence_step + group * number_step)
    # The table of a page without rows may say anything.
    entry = tables + tl.load(slots + b) * slot_step + group * group_step + page * page_step
    home = arena + tl.load(entry, page * PAGE < length, 0).to(tl.int64) * UNIT
    line = tl.arange(0, ROWS)
    token = page * PAGE + line
    exists = (token < size) & (line < PAGE)
    here = (token < length) & exists
    if first > 0:
        at = (b * num_groups + group) * size + token
        tl.store(valid + at, here, exists)
        position = token
        if TRACKED:
            position = tl.load((home + where + line * 4).to(positions.dtype), here, 0)
        tl.store(positions + at, position, exists)
    column = tl.arange(0, WIDTH)[None, :]
    for f in tl.static_range(len(FORMS)):
        if bits == FORMS[f][0]:
            # Tells the compiler what divides them, so that it may load and store 16 bytes at once.
            BYTES: tl.constexpr = FORMS[f][4]
            NUMBERS: tl.constexpr = FORMS[f][5]
            step = row // BYTES * BYTES
            codes = home + low // BYTES * BYTES + line * step
            wide = width // NUMBERS * NUMBERS
            if FORMS[f][0] == 16:
                inside = here[:, None] & (column < wide)
                x = tl.load(codes.to(rows.dtype)[:, None] + column, inside, 0.0)
            else:
                LOW: tl.constexpr = FORMS[f][1]
                HIGH: tl.constexpr = FORMS[f][2]
                q = read_plane(codes, wide, here, LOW, NUMBERS, ROWS, WIDTH)
                if HIGH > 0:
                    more = home + high // BYTES * BYTES + line * step
                    q = q | read_plane(more, wide, here, HIGH, NUMBERS, ROWS, WIDTH) << LOW
                scale, zero = read_scale(
                    home + line * scales, scale_at, zero_at, here, FORMS[f][0], SCALE, ZEROS
                )
                x = q.to(tl.float32) * scale[:, None] + zero[:, None]
            token_at = (b * size + token) * (row_width // NUMBERS * NUMBERS)
            out = rows + token_at[:, None] + start // NUMBERS * NUMBERS + column
            tl.store(out, x.to(rows.dtype.element_ty), exists[:, None] & (column < wide))


@step_kernel
def move_rows(
    words, tables, blocks, slots, groups, sources, targets, num_moves, num_blocks,
    slot_step, group_step, page_step,
    PAGE: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (i, k): block k of ROWS moved rows, in words of WORD bytes."""
    k = tl.program_id(1)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = m < num_moves
    group = tl.load(groups + m, here, 0)
    source, target = tl.load(sources + m, here, 0), tl.load(targets + m, here, 0)
    block = blocks + (group * num_blocks + k) * 2
    offset, count = tl.load(block) // WORD, tl.load(block + 1) // WORD
    table = tables + tl.load(slots + m, here, 0) * slot_step + group * group_step
    old = tl.load(table + source // PAGE * page_step, here, 0).to(tl.int64) * (UNIT // WORD)
    new = tl.load(table + target // PAGE * page_step, here, 0).to(tl.int64) * (UNIT // WORD)
    old += offset + source % PAGE * count
    new += offset + target % PAGE * count
    word = tl.arange(0, WIDTH)[None, :]
    inside = here[:, None] & (word < count[:, None])
    x = tl.load(words + (old[:, None] + word), inside)
    tl.store(words + (new[:, None] + word), x, inside)


@step_kernel
def track_rows(
    words, tables, offsets, slots, valid, values, size, slot_step, group_step, page_step,
    PAGE: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, g, b): ROWS positions or metrics of group g, 4-byte words; added to, or read."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = (b * tl.num_programs(1) + g) * size + token
    exists = token < size
    here = tl.load(valid + at, exists, 0) != 0
    entry = tables + tl.load(slots + b) * slot_step + g * group_step + token // PAGE * page_step
    page = tl.load(entry, here, 0).to(tl.int64) * (UNIT // 4)
    word = words + page + tl.load(offsets + g) // 4 + token % PAGE
    x = tl.load(word, here, 0)
    if ADD:
        tl.store(word, x + tl.load(values + at, here, 0), here)
    else:
        tl.store(values + at, x, exists)
