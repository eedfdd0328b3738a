"""Gluon functions that copy, unpack and multiply a tile of latents, for `scores_gluon` on Hopper.

Shapes as in `scores_gluon`. A latent is copied in one or two pieces of W0 and W1 code words, since
Triton's sizes are powers of two; C codes per word (1: unquantised).
"""
# mypy: ignore-errors
# Tuples grow in unrolled loops.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma

from kvfold.ops.latent_decode.plan import HOPPER_BLOCK

BLOCK = gl.constexpr(HOPPER_BLOCK)  # entries per tile: rows of a warp group's matrix product
# PTX: two code words to numbers, codes c as (c - 127) scale + offset, or with 4 bits
# (c - 7) scale + offset, every second one 16 times too large. Inputs: the words, and the scales and
# offsets of their entries, each twice in a register. Masking gives 1024 + c, exact in fp16.
_BYTES = gl.constexpr(
    "{ .reg .b32 a, b, m; prmt.b32 a, $2, 0x64646464, 0x4240; prmt.b32 b, $2, 0x64646464, 0x4341;"
    " mov.b32 m, 0x647F647F; sub.f16x2 a, a, m; sub.f16x2 b, b, m;"
    " fma.rn.f16x2 $0, a, $3, $5; fma.rn.f16x2 $1, b, $3, $5; }"
)
_NIBBLES = gl.constexpr(
    "{ .reg .b32 a, b, c, d, o, m, n, w; mov.b32 m, 0x64076407; mov.b32 n, 0x64706470;"
    " lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA; lop3.b32 b, $4, 0x00F000F0, 0x64006400, 0xEA;"
    " shr.b32 w, $4, 8;"
    " lop3.b32 c, w, 0x000F000F, 0x64006400, 0xEA; lop3.b32 d, w, 0x00F000F0, 0x64006400, 0xEA;"
    " sub.f16x2 a, a, m; sub.f16x2 b, b, n; sub.f16x2 c, c, m; sub.f16x2 d, d, n;"
    " mov.b32 o, 0x4C004C00; mul.f16x2 o, $7, o;"
    " fma.rn.f16x2 $0, a, $5, $7; fma.rn.f16x2 $1, b, $5, o;"
    " fma.rn.f16x2 $2, c, $5, $7; fma.rn.f16x2 $3, d, $5, o; }"
)


@gluon.jit
def token_of(m):
    """Return the entry of a tile that row m of a matrix product holds.

    Rows m and m + 8, which one thread holds, are neighbouring entries, so that a span stays in few
    threads.
    """
    return m // 16 * 16 + m % 8 * 2 + m // 8 % 2


@gluon.jit
def shared(NUMBER: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, TYPE: gl.constexpr):
    """Allocate NUMBER buffers [ROWS, W] in shared memory."""
    AS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, W], TYPE)
    return gl.allocate_shared_memory(TYPE, [NUMBER, ROWS, W], AS)


@gluon.jit
def row_pieces(W0: gl.constexpr, W1: gl.constexpr, TYPE: gl.constexpr):
    """Allocate a buffer of a tile's entries for each piece of a latent."""
    buffers = (shared(1, BLOCK, W0, TYPE),)
    if W1 > 0:
        buffers += (shared(1, BLOCK, W1, TYPE),)
    return buffers


@gluon.jit
def matrix_pieces(NUMBER: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr, N: gl.constexpr,
                  TYPE: gl.constexpr):  # fmt: skip
    """Allocate NUMBER buffers [W, N] for each piece of a latent."""
    buffers = (shared(NUMBER, W0, N, TYPE),)
    if W1 > 0:
        buffers += (shared(NUMBER, W1, N, TYPE),)
    return buffers


@gluon.jit
def latent_of(record, WIDTH: gl.constexpr, VECTOR: gl.constexpr):
    """Load where pages store a latent: stride in words, first word, first scale, stride of scales,
    offset from a scale to its zero point.

    WIDTH: words of an entry, 0: not known to the compiler.
    """
    row_words = gl.multiple_of(gl.load(record), VECTOR)
    if WIDTH:
        row_words = WIDTH
    first = gl.multiple_of(gl.load(record + 2), 8)
    return row_words, first, gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)


@gluon.jit
def copy_matrix(to, at, W0: gl.constexpr, W1: gl.constexpr, N: gl.constexpr, C: gl.constexpr,
                which):  # fmt: skip
    """Start to copy [C, W, N] from pointer `at` into buffers C * which.. of each piece of `to`."""
    BY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    column = gl.arange(0, N, gl.SliceLayout(0, BY))
    for p in gl.static_range(2 if W1 > 0 else 1):
        word = p * W0 + gl.arange(0, W1 if p else W0, gl.SliceLayout(1, BY))
        place = at + word[:, None] * N + column[None, :]
        for c in gl.static_range(C):
            buffer = to[p].index(C * which + c)
            async_copy.async_copy_global_to_shared(buffer, place + c * (W0 + W1) * N)


@gluon.constexpr_function
def _by_rows(W, VECTOR):
    """Register layout in which threads copy entries of W words, VECTOR words at a time."""
    lines = max(1, 32 * VECTOR // W)
    return gl.BlockedLayout([1, VECTOR], [lines, 32 // lines], [4, 1], [1, 0])


@gluon.jit
def _page_of(t, stop, table, ROWS: gl.constexpr, PAGE: gl.constexpr):
    """Load tile t's page, or the page of each entry in layout ROWS; beyond `stop` any page."""
    if PAGE % BLOCK == 0:
        page = gl.load(table + t * BLOCK // PAGE, t < stop, 0)
    else:
        row = t * BLOCK + token_of(gl.arange(0, BLOCK, ROWS))
        page = gl.load(table + row // PAGE, row < stop * BLOCK, 0)
    return page


@gluon.jit
def _row_of(t, ROWS: gl.constexpr, PAGE: gl.constexpr):
    """Return the index of tile t's entries in their pages."""
    row = token_of(gl.arange(0, BLOCK, ROWS))
    return t * BLOCK % PAGE + row if PAGE % BLOCK == 0 else row % PAGE


@gluon.jit
def pages_of(t, stop, table, W0: gl.constexpr, W1: gl.constexpr, VECTOR: gl.constexpr,
             PAGE: gl.constexpr):  # fmt: skip
    """Return `_page_of` for each piece, as `copy_rows` takes it."""
    pages = (_page_of(t, stop, table, gl.SliceLayout(1, _by_rows(W0, VECTOR)), PAGE),)
    if W1 > 0:
        pages += (_page_of(t, stop, table, gl.SliceLayout(1, _by_rows(W1, VECTOR)), PAGE),)
    return pages


@gluon.jit
def _copy_piece(to, keys, latent, page, t, FIRST: gl.constexpr, W: gl.constexpr,
                WIDTH: gl.constexpr, VECTOR: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Start to copy words FIRST .. FIRST + W of a tile's entries."""
    BY: gl.constexpr = _by_rows(W, VECTOR)
    row_words, start = latent[0], latent[1]
    row = _row_of(t, gl.SliceLayout(1, BY), PAGE)
    word = FIRST + gl.arange(0, W, gl.SliceLayout(0, BY))
    page = page.to(gl.int64) * 32
    if PAGE % BLOCK == 0:
        at = keys + (page + start) + row[:, None] * row_words + word[None, :]
    else:
        at = keys + (page + (start + row * row_words))[:, None] + word[None, :]
    if FIRST + W <= WIDTH:
        async_copy.async_copy_global_to_shared(to, at)
    else:
        in_range = (row >= 0)[:, None] & (word < row_words)[None, :]
        async_copy.async_copy_global_to_shared(to, at, in_range)


@gluon.jit
def copy_rows(
    to, keys, latent, pages, t, W0: gl.constexpr, W1: gl.constexpr, WIDTH: gl.constexpr,
    VECTOR: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Start to copy tile t's entries of a latent (see `latent_of`).

    Entries beyond the length hold arbitrary bytes, which affect only scores that are masked later.
    """
    _copy_piece(to[0].index(0), keys, latent, pages[0], t, 0, W0, WIDTH, VECTOR, PAGE)
    if W1 > 0:
        _copy_piece(to[1].index(0), keys, latent, pages[1], t, W0, W1, WIDTH, VECTOR, PAGE)


@gluon.jit
def _load_scale(scales, latent, page, t, ROWS: gl.constexpr, PAGE: gl.constexpr,
                ZEROS: gl.constexpr):  # fmt: skip
    """Load scale and, with ZEROS, zero point of each entry of tile t: fp16 [BLOCK], undefined
    beyond the length."""
    _, _, start, step, zeros = latent
    at = scales + (page.to(gl.int64) * 32 + (start + _row_of(t, ROWS, PAGE) * step))
    scale = gl.load(at)
    return scale, (gl.load(at + zeros) if ZEROS else scale)


@gluon.jit
def load_scales(
    scales, latents, t, stop, table, ROWS: gl.constexpr, PAGE: gl.constexpr, ZEROS: gl.constexpr
):
    """Load scales and zero points of every latent's entries of tile t, in layout ROWS."""
    scales_of, page = (), _page_of(t, stop, table, ROWS, PAGE)
    for i in gl.static_range(len(latents)):
        scales_of += (_load_scale(scales, latents[i], page, t, ROWS, PAGE, ZEROS),)
    return scales_of


@gluon.jit
def _twice(x):
    """Convert fp32 to fp16, in both halves of an int32."""
    bits = x.to(gl.float16).to(gl.uint16, bitcast=True).to(gl.int32)
    return bits | (bits << 16)


@gluon.jit
def _numbers(words, scale, BITS: gl.constexpr, ZEROS: gl.constexpr):
    """Unpack uint16 [BLOCK, W]: for every code of a word, its numbers in fp16, in the layout of
    products.

    Every second code of 4 bits is 16 times too large. scale: of `_load_scale`.
    """
    MIDDLE: gl.constexpr = 127 if BITS == 8 else 7
    size = scale[0].to(gl.float32)
    offset = scale[1].to(gl.float32) + MIDDLE * size if ZEROS else -0.5 * size
    size, offset = _twice(size)[:, None], _twice(offset)[:, None]
    size, offset = gl.broadcast(size, words)[0], gl.broadcast(offset, words)[0]
    if BITS == 8:
        numbers = gl.inline_asm_elementwise(
            _BYTES, "=&r,=&r,r,r,r,r,r", [words, size, offset],
            dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        numbers = gl.inline_asm_elementwise(
            _NIBBLES, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, size, offset],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return numbers


@gluon.jit
def _product(z, maps, which, N: gl.constexpr, HELD: gl.constexpr):
    """Start to multiply z by the buffers of maps [W, N] from `which` on, over all pieces and codes.

    HELD: z is in registers.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    ROWS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    product = gl.zeros([BLOCK, N], gl.float32, MMA)
    for p in gl.static_range(len(z)):
        for c in gl.static_range(len(z[p])):
            codes = gl.convert_layout(z[p][c], ROWS, assert_trivial=True) if HELD else z[p][c]
            buffer = maps[p].index(which + c)
            product = warpgroup_mma(codes, buffer, product, use_acc=p + c > 0, is_async=True)
    return product


@gluon.jit
def multiply(
    rows, maps, folds, sizes, place, BITS: gl.constexpr, ZEROS: gl.constexpr, KEYS: gl.constexpr,
    FOLDS: gl.constexpr, SLOW: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Start to multiply every latent's entries by its maps and, for slow pairs, by the folded
    queries of the stretch in buffers from `place` on.

    ROWS: register layout of entries; None: they are read from shared memory.
    """
    products = ()
    for i in gl.static_range(len(rows)):
        z = ()
        for p in gl.static_range(len(rows[i])):
            piece = rows[i][p].index(0)
            if ROWS is not None:
                piece = piece.load(ROWS)
            z += (_numbers(piece, sizes[i], BITS, ZEROS) if BITS < 16 else (piece,),)
        products += (_product(z, maps[i], 0, KEYS, ROWS is not None),)
        if SLOW:
            products += (_product(z, folds[i], place, FOLDS, ROWS is not None),)
    return products
