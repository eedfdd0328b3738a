"""Triton kernel of scores with stored keys: the first of the two passes of `triton_split`.

Serves keys that KV heads share or that have segments of several bit widths, on CUDA, as long as a
warp can hold a tile of keys and its queries; wider ones are served by `scores_wide`. The scores of
a key are the sum over the segments of its latent, each times its scale. Heads that share a latent
are columns of one matrix product, so the latent is read once.

Shapes: B sequences, G groups of a layer, HK key latents (or KV heads: see `pieces.key_heads`), NQ
query heads per group, N per latent, padded to GP; W code words of a segment, of C codes each; S
splits of the (sequence, latent) items (see `common.plan`). FORMS: (bits, W) of every bit width in
the layer. `heads` has a record per latent: KEY_FIELDS numbers, then FORM_FIELDS per bit width (see
`pieces.key_pieces`).
"""
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

from kvfold.ops.common.codes_triton import UNIT, load_query, load_scale, unpack_all
from kvfold.ops.common.softcap_triton import softcapped
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.common.weights_triton import store_weights
from kvfold.ops.decode.kernels import after_launch, tile_pages, tile_rows


@triton.jit
def stored_queries(q, heads, width, W: tl.constexpr, BITS: tl.constexpr):
    """Load queries for a segment: a [W, GP] matrix for every code of a word, and their sums [GP],
    which zero points are multiplied by."""
    C: tl.constexpr = 16 // BITS
    total = tl.zeros(heads.shape, tl.float32)
    by_code = ()
    for J in tl.static_range(C):
        x, sum = load_query(q, heads, width, J, C, W, BITS)
        by_code, total = by_code + (x,), total + sum
    return by_code, total


@triton.jit
def _run(
    s, queries, total, page, row, inside, codes, arena, scale_row, strides,
    BITS: tl.constexpr, W: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):  # fmt: skip
    """Add to s [BLOCK, GP] the scores that one segment of every entry contributes.

    strides: words from entry to entry, first word, first scale, offset from a scale to its zero
        point.
    """
    LOW: tl.constexpr = 0.0 if ZEROS else (2**BITS - 1) / 2
    row_words, start, scale_start, zero_step = strides
    word = tl.arange(0, W)[None, :]
    if ONE_PAGE:
        at = codes + (page + start) + ((row * row_words)[:, None] + word)
    else:
        at = codes + ((page + start + row * row_words)[:, None] + word)
    z = tl.load(at, word < row_words, 0)
    if BITS == 16:
        s += tl.dot(z, queries[0])
    else:
        numbers = unpack_all(z, BITS)
        code_scores = tl.broadcast_to((total * (-LOW / UNIT))[None, :], s.shape[0], s.shape[1])
        for J in tl.static_range(16 // BITS):
            code_scores = tl.dot(numbers[J], queries[J], code_scores)
        scale_at = scale_start + row * scale_row
        inside = inside & (row_words > 0)  # a head without such a segment has no scale
        s += code_scores * (load_scale(arena, page, scale_at, inside, BITS, SCALE) * UNIT)[:, None]
        if ZEROS:
            s += (
                load_scale(arena, page, scale_at + zero_step, inside, 16, 2)[:, None]
                * total[None, :]
            )
    return s


@triton.jit
def _scores(
    page, row, inside, queries, totals, all_strides, codes, arena, scale_row,
    FORMS: tl.constexpr, GP: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, ONE_PAGE: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, GP] of a tile: the sum over its segments."""
    s = tl.zeros([BLOCK, GP], tl.float32)
    for f in tl.static_range(len(FORMS)):
        s = _run(
            s, queries[f], totals[f], page, row, inside, codes, arena, scale_row, all_strides[f],
            FORMS[f][0], FORMS[f][1], ZEROS, SCALE, ONE_PAGE,
        )  # fmt: skip
    return s


@triton.jit
def limited(
    s, first, page, row, inside, query, place, arena, cap, window,
    CAP: tl.constexpr, WINDOW: tl.constexpr, TRACKED: tl.constexpr,
):  # fmt: skip
    """Apply softcap and sliding window to scores s [BLOCK, GP], in log2, of the entries from
    `first` on.

    CAP: apply softcap `cap`. WINDOW: set to -inf the entries that `window` hides from the query at
        position `query`. TRACKED: entries store their positions, from `place` on in int32;
        otherwise an entry's position is its index.
    """
    if CAP:
        s = softcapped(s, cap)
    if WINDOW:
        position = first + tl.arange(0, s.shape[0])
        if TRACKED:
            position = tl.load(arena + (page // 2 + place + row), inside, 0)
        s = tl.where((position > query - window)[:, None], s, float("-inf"))
    return s


@step_kernel
def stored_score_kernel(
    q, q_stride, weights, tops, codes, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, heads, bases, starts, scale,
    positions, places, cap, window,
    FORMS: tl.constexpr, KEY_FIELDS: tl.constexpr, FORM_FIELDS: tl.constexpr,
    G: tl.constexpr, HK: tl.constexpr, NQ: tl.constexpr, N: tl.constexpr, GP: tl.constexpr,
    DQ: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr = False, CAP: tl.constexpr = False, WINDOW: tl.constexpr = False,
    TRACKED: tl.constexpr = False,
):  # fmt: skip
    """Compute the softmax weights of every tile of a split.

    q [B, HK * N, DQ]; codes: the arena as 16-bit words, arena: as int32; heads: see the module;
    weights, tops (maxima per span), bases as in `values_triton.value_kernel`; positions int [B],
    places int32 [G], cap, window: see `limited`.
    """
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0  # a tile lies in one page
    after_launch(PDL)
    slice = tl.program_id(0)
    item = tl.load(starts + 2 * slice)
    tile = tl.load(starts + 2 * slice + 1)
    end_item = tl.load(starts + 2 * slice + 2)
    end_tile = tl.load(starts + 2 * slice + 3)
    n, row = tl.arange(0, GP), tl.arange(0, BLOCK)
    while (item < end_item) | ((item == end_item) & (tile < end_tile)):
        b, h = item // HK, item % HK
        record = heads + (KEY_FIELDS + FORM_FIELDS * len(FORMS)) * h
        g, first_head, scale_row = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + g)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            query = q + b * q_stride + (first_head + n) * DQ
            queries, totals, all_strides = (), (), ()
            for f in tl.static_range(len(FORMS)):
                at = record + (KEY_FIELDS + FORM_FIELDS * f)
                width, column = tl.load(at + 2), tl.load(at + 3)
                segment_queries, total = stored_queries(
                    query + column, n < N, width, FORMS[f][1], FORMS[f][0]
                )
                queries, totals = queries + (segment_queries,), totals + (total,)
                all_strides = all_strides + ((
                    tl.multiple_of(tl.load(at), ALIGN), tl.multiple_of(tl.load(at + 1), 8),
                    tl.load(at + 4), tl.load(at + 5),
                ),)  # fmt: skip
            table = tables + slot * table_slot + g * table_group
            base = tl.load(bases + b * G + g).to(tl.int64) * NQ
            to = base + first_head - g * NQ + n
            position, place = 0, 0
            if WINDOW:
                position, place = tl.load(positions + b).to(tl.int32), tl.load(places + g)
            full = tl.minimum(stop, length // BLOCK)
            next_page = tile_pages(table, tile, row, length, PAGE, ONE_PAGE)
            for t in tl.range(tile, full, num_stages=STAGES):
                page = next_page.to(tl.int64) * 32
                next_page = tile_pages(table, t + 1, row, length, PAGE, ONE_PAGE)
                s = _scores(
                    page, tile_rows(t, row, PAGE, ONE_PAGE), row >= 0, queries, totals, all_strides,
                    codes, arena, scale_row, FORMS, GP, ZEROS, SCALE, BLOCK, ONE_PAGE,
                )  # fmt: skip
                s = limited(
                    s * scale, t * BLOCK, page, tile_rows(t, row, PAGE, ONE_PAGE), row >= 0,
                    position, place, arena, cap, window, CAP, WINDOW, TRACKED,
                )  # fmt: skip
                weights_at = to + t * (BLOCK // SPAN) * NQ
                store_weights(s, weights, tops, weights_at, n < N, BLOCK, BLOCK, GP, NQ, SPAN)
            if full < stop:
                rows = length - full * BLOCK
                s = _scores(
                    next_page.to(tl.int64) * 32, tile_rows(full, row, PAGE, ONE_PAGE), row < rows,
                    queries, totals, all_strides, codes, arena, scale_row, FORMS, GP, ZEROS, SCALE,
                    BLOCK, ONE_PAGE,
                )  # fmt: skip
                s = limited(
                    s * scale, full * BLOCK, next_page.to(tl.int64) * 32,
                    tile_rows(full, row, PAGE, ONE_PAGE), row < rows,
                    position, place, arena, cap, window, CAP, WINDOW, TRACKED,
                )  # fmt: skip
                s = tl.where((row < rows)[:, None], s, float("-inf"))
                weights_at = to + full * (BLOCK // SPAN) * NQ
                store_weights(s, weights, tops, weights_at, n < N, rows, BLOCK, GP, NQ, SPAN)
        item += 1
        tile = 0
