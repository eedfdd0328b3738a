"""The Triton kernels of `store.triton`: copy tiles of token entries between tensors and pages.

Shapes as in `store`, pieces as in `segments`. Names in capitals are compile-time constants. FORMS:
for every bit width of the layer, (bits, bits of the low and of the high plane, Gaussian step, bytes
that divide offsets, numbers that divide columns). TILES: see `Pieces`; T is an index into it. PAGE:
rows of a page. SCALE: bytes of a scale. SIZE: numbers of a program's tile, which is ROWS x WIDTH.
Names that end in _step are strides. Addresses are int64; `page_start` points to the first byte of a
page.
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
    """Load the fields of a piece, in the order of segments.Piece."""
    at = pieces + number * FIELDS
    group, start, width, bits = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    low, high, row, scale = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    zero, scales, positions = tl.load(at + 8), tl.load(at + 9), tl.load(at + 10)
    metrics, first = tl.load(at + 11), tl.load(at + 12)
    return group, start, width, bits, low, high, row, scale, zero, scales, positions, metrics, first


# Sums are in the same order for any number of tokens.
@step_kernel
def append_rows(
    arena, tables, pieces, rows, slots, index, positions, num_tokens,
    slot_step, group_step, page_step, row_step, token_step, number_step,
    FORMS: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    ZEROS: tl.constexpr, TRACKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program: one piece of SIZE / WIDTH tokens. For a block of tokens, the programs of all
    pieces of a tile are adjacent."""
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
    """Write piece `number` of ROWS tokens, from token at * ROWS on."""
    FORM: tl.constexpr = TILES[T][0]
    BITS: tl.constexpr = FORMS[FORM][0]
    WIDTH: tl.constexpr = TILES[T][1]
    ROWS: tl.constexpr = SIZE // WIDTH
    NUMBERS: tl.constexpr = FORMS[FORM][5]
    piece = _piece(pieces, number)
    group, start, width, _, low, high, row, scale_at, zero_at, scales, positions_at, metrics, _ = (
        piece
    )
    token = at.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = token < num_tokens
    at = tl.load(index + token * token_step + group * number_step, exists, 0)
    slot = tl.load(slots + token, exists, 0)
    entry = tables + slot * slot_step + group * group_step + at // PAGE * page_step
    page_start = arena + tl.load(entry, exists, 0).to(tl.int64) * UNIT
    page_row = (at % PAGE).to(tl.int32)
    column = tl.arange(0, WIDTH)[None, :]
    # As in `gather_rows`: allows wide loads, so that a thread's numbers are of one row.
    in_range = exists[:, None] & (column < width // NUMBERS * NUMBERS)
    first = token[:, None] * row_step + start // NUMBERS * NUMBERS
    # Tokens beyond the last are 1: a division by 0 would take a slow path.
    x = tl.load(rows + first + column, in_range, tl.where(exists, 0.0, 1.0)[:, None])
    codes = page_start + low + page_row * row
    if BITS == 16:
        tl.store(codes.to(rows.dtype)[:, None] + column, x, in_range)
    else:
        LOW: tl.constexpr = FORMS[FORM][1]
        HIGH: tl.constexpr = FORMS[FORM][2]
        q, scale, zero = quantize(
            x.to(tl.float32), in_range, width, BITS, FORMS[FORM][3], SCALE, ZEROS
        )
        write_plane(codes, q & ((1 << LOW) - 1), width, exists, LOW, ROWS, WIDTH)
        if HIGH > 0:
            write_plane(
                page_start + high + page_row * row, q >> LOW, width, exists, HIGH, ROWS, WIDTH
            )
        scales_start = page_start + page_row * scales
        tl.store((scales_start + scale_at).to(tl.pointer_type(scale.dtype)), scale, exists)
        if ZEROS:
            tl.store((scales_start + zero_at).to(tl.pointer_type(zero.dtype)), zero, exists)
    if TRACKED:
        writes_track = exists & (positions_at >= 0)
        position = tl.load(positions + token, writes_track, 0)
        tl.store(
            (page_start + positions_at + page_row * 4).to(tl.pointer_type(tl.int32)),
            position,
            writes_track,
        )
        initial_metrics = tl.zeros([ROWS], tl.float32)
        tl.store(
            (page_start + metrics + page_row * 4).to(tl.pointer_type(tl.float32)),
            initial_metrics,
            writes_track,
        )


@step_kernel
def gather_rows(
    arena, tables, pieces, slots, lengths, rows, valid, positions,
    size, row_width, num_groups, num_pieces,
    slot_step, group_step, page_step, sequence_step, number_step,
    FORMS: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr,
    TRACKED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (i, b): one piece of one page of sequence b. Programs of a page's pieces are
    adjacent, so that their parts of a row meet in the L2 cache."""
    piece = _piece(pieces, tl.program_id(0) % num_pieces)
    group, start, width, bits, low, high, row, scale_at, zero_at, scales, positions_at, _, first = (
        piece
    )
    page, b = tl.program_id(0) // num_pieces, tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b * sequence_step + group * number_step)
    # Table entries beyond a sequence's pages are undefined.
    entry = tables + tl.load(slots + b) * slot_step + group * group_step + page * page_step
    page_start = arena + tl.load(entry, page * PAGE < length, 0).to(tl.int64) * UNIT
    page_row = tl.arange(0, ROWS)
    token = page * PAGE + page_row
    exists = (token < size) & (page_row < PAGE)
    stored = (token < length) & exists
    if first > 0:
        at = (b * num_groups + group) * size + token
        tl.store(valid + at, stored, exists)
        position = token
        if TRACKED:
            position = tl.load(
                (page_start + positions_at + page_row * 4).to(positions.dtype), stored, 0
            )
        tl.store(positions + at, position, exists)
    column = tl.arange(0, WIDTH)[None, :]
    for f in tl.static_range(len(FORMS)):
        if bits == FORMS[f][0]:
            # Tell the compiler what divides these, so that it may load and store 16 bytes at once.
            BYTES: tl.constexpr = FORMS[f][4]
            NUMBERS: tl.constexpr = FORMS[f][5]
            step = row // BYTES * BYTES
            codes = page_start + low // BYTES * BYTES + page_row * step
            aligned_width = width // NUMBERS * NUMBERS
            if FORMS[f][0] == 16:
                in_range = stored[:, None] & (column < aligned_width)
                x = tl.load(codes.to(rows.dtype)[:, None] + column, in_range, 0.0)
            else:
                LOW: tl.constexpr = FORMS[f][1]
                HIGH: tl.constexpr = FORMS[f][2]
                q = read_plane(codes, aligned_width, stored, LOW, NUMBERS, ROWS, WIDTH)
                if HIGH > 0:
                    high_codes = page_start + high // BYTES * BYTES + page_row * step
                    q = (
                        q
                        | read_plane(high_codes, aligned_width, stored, HIGH, NUMBERS, ROWS, WIDTH)
                        << LOW
                    )
                scale, zero = read_scale(
                    page_start + page_row * scales,
                    scale_at,
                    zero_at,
                    stored,
                    FORMS[f][0],
                    SCALE,
                    ZEROS,
                )
                x = q.to(tl.float32) * scale[:, None] + zero[:, None]
            token_at = (b * size + token) * (row_width // NUMBERS * NUMBERS)
            out = rows + token_at[:, None] + start // NUMBERS * NUMBERS + column
            tl.store(out, x.to(rows.dtype.element_ty), exists[:, None] & (column < aligned_width))


@step_kernel
def move_rows(
    words, tables, blocks, slots, groups, sources, targets, num_moves, num_blocks,
    slot_step, group_step, page_step,
    PAGE: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (i, k): block k of ROWS moved rows, in words of WORD bytes."""
    k = tl.program_id(1)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = m < num_moves
    group = tl.load(groups + m, exists, 0)
    source, target = tl.load(sources + m, exists, 0), tl.load(targets + m, exists, 0)
    block = blocks + (group * num_blocks + k) * 2
    offset, count = tl.load(block) // WORD, tl.load(block + 1) // WORD
    table = tables + tl.load(slots + m, exists, 0) * slot_step + group * group_step
    old = tl.load(table + source // PAGE * page_step, exists, 0).to(tl.int64) * (UNIT // WORD)
    new = tl.load(table + target // PAGE * page_step, exists, 0).to(tl.int64) * (UNIT // WORD)
    old += offset + source % PAGE * count
    new += offset + target % PAGE * count
    word = tl.arange(0, WIDTH)[None, :]
    in_range = exists[:, None] & (word < count[:, None])
    x = tl.load(words + (old[:, None] + word), in_range)
    tl.store(words + (new[:, None] + word), x, in_range)


@step_kernel
def track_rows(
    words, tables, offsets, slots, valid, values, size, slot_step, group_step, page_step,
    PAGE: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, g, b): ROWS positions or metrics of group g, 4-byte words. ADD: add `values` to
    them, else read them into `values`."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = (b * tl.num_programs(1) + g) * size + token
    exists = token < size
    in_range = tl.load(valid + at, exists, 0) != 0
    entry = tables + tl.load(slots + b) * slot_step + g * group_step + token // PAGE * page_step
    page = tl.load(entry, in_range, 0).to(tl.int64) * (UNIT // 4)
    word = words + page + tl.load(offsets + g) // 4 + token % PAGE
    x = tl.load(word, in_range, 0)
    if ADD:
        tl.store(word, x + tl.load(values + at, in_range, 0), in_range)
    else:
        tl.store(values + at, x, exists)
