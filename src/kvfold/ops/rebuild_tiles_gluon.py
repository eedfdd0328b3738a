"""Latents of a tile of rows on their way to Hopper's tensor cores. Gluon functions.

Shapes as in `rebuild_scores_gluon`. A latent is in one or two pieces of W0 and W1 words, since a
width is a power of two.
"""
# mypy: ignore-errors
# Tuples grow in unrolled loops.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma

from kvfold.ops.rebuild_plan import HOPPER_BLOCK

BLOCK = gl.constexpr(HOPPER_BLOCK)  # rows of a tile: what a warp group multiplies


@gluon.jit
def token_of(m):
    """The row of a tile that row m of a product is: rows of a span that a thread holds, m and m +
    8, are neighbours."""
    return m // 16 * 16 + m % 8 * 2 + m // 8 % 2


@gluon.jit
def shared(NUMBER: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, TYPE: gl.constexpr):
    """NUMBER buffers of [ROWS, W]."""
    AS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, W], TYPE)
    return gl.allocate_shared_memory(TYPE, [NUMBER, ROWS, W], AS)


@gluon.jit
def copy_matrix(to, at, W0: gl.constexpr, W1: gl.constexpr, N: gl.constexpr, which):
    """A [W, N] at pointer `at` into buffer `which` of each piece of `to`, begun, not ended."""
    BY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    column = gl.arange(0, N, gl.SliceLayout(0, BY))
    for p in gl.static_range(2 if W1 > 0 else 1):
        word = p * W0 + gl.arange(0, W1 if p else W0, gl.SliceLayout(1, BY))
        place = at + word[:, None] * N + column[None, :]
        async_copy.async_copy_global_to_shared(to[p].index(which), place)


@gluon.constexpr_function
def _by_rows(W):
    """How threads copy rows of W words, 16 bytes each at a time."""
    lines = max(1, 256 // W)
    return gl.BlockedLayout([1, 8], [lines, 32 // lines], [4, 1], [1, 0])


@gluon.jit
def _page_of(t, stop, table, W: gl.constexpr, PAGE: gl.constexpr):
    if PAGE % BLOCK == 0:
        found = gl.load(table + t * BLOCK // PAGE, t < stop, 0)
    else:
        row = t * BLOCK + token_of(gl.arange(0, BLOCK, gl.SliceLayout(1, _by_rows(W))))
        found = gl.load(table + row // PAGE, row < stop * BLOCK, 0)
    return found


@gluon.jit
def pages_of(t, stop, table, W0: gl.constexpr, W1: gl.constexpr, PAGE: gl.constexpr):
    """Of each piece: tile t's page, or the page of each row as `copy_rows` takes it; beyond `stop`
    any."""
    found = (_page_of(t, stop, table, W0, PAGE),)
    if W1 > 0:
        found += (_page_of(t, stop, table, W1, PAGE),)
    return found


@gluon.jit
def _copy_piece(to, keys, latent, page, t, FIRST: gl.constexpr, W: gl.constexpr,
                WIDTH: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Words FIRST .. FIRST + W of rows."""
    BY: gl.constexpr = _by_rows(W)
    row_words, start = latent
    row = token_of(gl.arange(0, BLOCK, gl.SliceLayout(1, BY)))
    word = FIRST + gl.arange(0, W, gl.SliceLayout(0, BY))
    page = page.to(gl.int64) * 32
    if PAGE % BLOCK == 0:
        at = keys + (page + start) + (t * BLOCK % PAGE + row)[:, None] * row_words + word[None, :]
    else:
        at = keys + (page + (start + row % PAGE * row_words))[:, None] + word[None, :]
    if FIRST + W <= WIDTH:
        async_copy.async_copy_global_to_shared(to, at)
    else:
        there = (row >= 0)[:, None] & (word < row_words)[None, :]
        async_copy.async_copy_global_to_shared(to, at, there)


@gluon.jit
def copy_rows(
    to, keys, latent, pages, t, W0: gl.constexpr, W1: gl.constexpr, WIDTH: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Tile t's rows of a latent (words of a row, words to the first one), begun, not ended. Rows
    that are not there are of any bytes: nothing is made of them but their own scores. WIDTH: words
    of a row, 0: any."""
    _copy_piece(to[0].index(0), keys, latent, pages[0], t, 0, W0, WIDTH, PAGE)
    if W1 > 0:
        _copy_piece(to[1].index(0), keys, latent, pages[1], t, W0, W1, WIDTH, PAGE)


@gluon.jit
def product(z, maps, which, N: gl.constexpr, W1: gl.constexpr, HELD: gl.constexpr):
    """z times buffer `which` of maps [W, N], begun, not ended. HELD: z is in registers."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    ROWS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    found = gl.zeros([BLOCK, N], gl.float32, MMA)
    for p in gl.static_range(2 if W1 > 0 else 1):
        piece = gl.convert_layout(z[p], ROWS, assert_trivial=True) if HELD else z[p]
        found = warpgroup_mma(piece, maps[p].index(which), found, use_acc=p > 0, is_async=True)
    return found
