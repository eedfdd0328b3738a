"""Attention of many new tokens for Hopper's tensor cores. A Gluon kernel.

Shapes as in `prefill_triton`, whose kernel computes the same and also serves windows and positions.
Here the scores of a tile of rows are begun before the tile before it is done with, so that tensor
cores multiply while exponentials are taken, which Triton has no words for: FlashAttention-3's
pipeline within a warp group (Shah et al. 2024, §3.2).
"""
# mypy: allow-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Of a thread's copies, in numbers: what all starts, ranks and strides are multiples of.
VECTOR = gl.constexpr(8)


@gluon.constexpr_function
def _lines(WIDTH, WARPS):
    """How threads copy rows of WIDTH numbers, VECTOR each at a time."""
    across = WIDTH // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [WARPS, 1], [1, 0])


@gluon.jit
def _multiple(number):
    """As `prefill_triton._multiple`, of VECTOR."""
    return number // VECTOR * VECTOR


@gluon.jit
def _shared(NUMBER: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, TYPE: gl.constexpr):
    """NUMBER buffers of [ROWS, W]."""
    AS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, W], TYPE)
    return gl.allocate_shared_memory(TYPE, [NUMBER, ROWS, W], AS)


@gluon.jit
def _pieces(NUMBER: gl.constexpr, ROWS: gl.constexpr, DK: gl.constexpr, EK: gl.constexpr,
            TYPE: gl.constexpr):  # fmt: skip
    """Of both pieces of a row, or of the only one."""
    first = _shared(NUMBER, ROWS, DK, TYPE)
    return (first, _shared(NUMBER, ROWS, EK, TYPE)) if EK > 0 else (first,)


@gluon.jit
def _copy_queries(to, q, first, q_h, q_t, T, rank, N: gl.constexpr, FIRST: gl.constexpr):
    """Begin to copy columns FIRST.. of the pairs first..; q: at the first pair's query. 0 beyond
    the rank and where there is no pair."""
    BM: gl.constexpr = to.shape[0]
    BY: gl.constexpr = _lines(to.shape[1], BM // 16)
    m = first + gl.arange(0, BM, gl.SliceLayout(1, BY))
    column = FIRST + gl.arange(0, to.shape[1], gl.SliceLayout(0, BY))
    row = (m // N - first // N) * q_t + m % N * q_h
    there = (m < T * N)[:, None] & (column < rank)[None, :]
    async_copy.async_copy_global_to_shared(to, q + (row[:, None] + column[None, :]), there)


@gluon.jit
def _copy_rows(
    to, side, first, end, FIRST: gl.constexpr, EXACT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begin to copy columns FIRST.. of rows first..; 0 from row `end` on and beyond the rank."""
    at, stride, rank = side
    BY: gl.constexpr = _lines(to.shape[1], WARPS)
    row = gl.arange(0, to.shape[0], gl.SliceLayout(1, BY))
    column = FIRST + gl.arange(0, to.shape[1], gl.SliceLayout(0, BY))
    there = (row < end - first)[:, None]
    if not EXACT:
        there = there & (column < rank)[None, :]
    at += stride.to(gl.int64) * first
    async_copy.async_copy_global_to_shared(
        to, at + ((row * stride)[:, None] + column[None, :]), there
    )


@gluon.jit
def _fetch(
    tile, keys, values, end, k, v, EXACT: gl.constexpr, WARPS: gl.constexpr,
    BEGUN: gl.constexpr = True,
):  # fmt: skip
    """Begin to copy the keys of a tile and, where it is BEGUN, the values of the one before, which
    are multiplied at the same time."""
    STAGES: gl.constexpr = k[0].shape[0]
    BN: gl.constexpr = v.shape[1]
    for piece in gl.static_range(len(k)):
        to = k[piece].index(tile % STAGES)
        _copy_rows(to, keys, tile * BN, end, piece * k[0].shape[2], EXACT, WARPS)
    if BEGUN:
        before = tile - 1
        _copy_rows(v.index(before % STAGES), values, before * BN, end, 0, EXACT, WARPS)
    async_copy.commit_group()


@gluon.jit
def _arrived(PENDING: gl.constexpr):
    """Wait for all but the last PENDING fetches, of all threads."""
    async_copy.wait_group(PENDING)
    gl.thread_barrier()
    fence_async_shared()


@gluon.jit
def _scores(q, k, slot, SCORES: gl.constexpr):
    """q k^T [BM, BN], begun, not ended."""
    BM: gl.constexpr = q[0].shape[1]
    BN: gl.constexpr = k[0].shape[1]
    s = gl.zeros([BM, BN], gl.float32, SCORES)
    for piece in gl.static_range(len(k)):
        keys = k[piece].index(slot).permute((1, 0))
        s = warpgroup_mma(q[piece].index(0), keys, s, use_acc=piece > 0, is_async=True)
    return s


@gluon.jit
def _softmax(s, first, top, mass, limit, scale, MASKED: gl.constexpr):
    """Weights [BM, BN] of scores, what they and all before them are relative to and add up to, and
    what all before fades by. MASKED: rows beyond a pair's limit are not seen."""
    if MASKED:
        row = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = gl.where(row[None, :] <= limit[:, None], s, float("-inf"))
    peak = gl.maximum(top, gl.max(s, 1) * scale)
    base = peak
    if MASKED:
        base = gl.where(peak == float("-inf"), 0.0, peak)
    weights = gl.exp2(s * scale - base[:, None])
    fade = gl.exp2(top - base)
    return weights, peak, mass * fade + gl.sum(weights, 1), fade


@gluon.jit
def _step(
    tile, state, q, k, v, keys, values, end, limit, scale,
    EXACT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The weights of a tile, while those of the tile before meet their values."""
    weights, acc, top, mass = state
    SCORES: gl.constexpr = weights.type.layout
    OUTPUT: gl.constexpr = acc.type.layout
    STAGES: gl.constexpr = v.shape[0]
    BN: gl.constexpr = v.shape[1]
    WARPS: gl.constexpr = q[0].shape[1] // 16
    held = _operand(weights, OUTPUT, v.dtype)
    _arrived(STAGES - 2)
    s = _scores(q, k, tile % STAGES, SCORES)
    acc = warpgroup_mma(held, v.index((tile - 1) % STAGES), acc, is_async=True)
    _fetch(tile + STAGES - 1, keys, values, end, k, v, EXACT, WARPS)
    s = warpgroup_mma_wait(1, (s,))
    weights, top, mass, fade = _softmax(s, tile * BN, top, mass, limit, scale, MASKED)
    mass = _hold_back(mass)
    acc = warpgroup_mma_wait(0, (acc,))
    acc *= gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
    return weights, acc, top, mass


@gluon.jit
def _hold_back(mass):
    """`mass`, with a store that never happens: without it ptxas moves all that makes `mass` behind
    the next wait for products, and no exponential is taken while they run."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000;"
        " @p st.shared.f32 [a], $1; mov.b32 $0, $1; }", "=r,r", [mass],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _operand(weights, OUTPUT: gl.constexpr, TYPE: gl.constexpr):
    """Weights as products with values take them, which is as they lie in registers."""
    return gl.convert_layout(
        weights.to(TYPE), gl.DotOperandLayout(0, OUTPUT, 2), assert_trivial=True
    )


INTEGERS = (
    "q_b", "q_h", "q_t", "k_b", "k_s", "v_b", "v_s", "c_b", "c_g", "at_b", "B", "U", "T", "H", "DO",
)  # fmt: skip


@gluon.jit(do_not_specialize=INTEGERS)
def prefill_kernel(
    q, q_b, q_h, q_t, keys, k_b, k_s, values, v_b, v_s, out, lse, units,
    counts, c_b, c_g, queries, at_b, order, B, U, T, H, DO, scale,
    N: gl.constexpr, DK: gl.constexpr, EK: gl.constexpr, DV: gl.constexpr, EXACT: gl.constexpr,
    ORDER: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of queries of one unit, as `prefill_triton.prefill_kernel`, of BM / 16 warps. All
    starts, ranks and strides are multiples of VECTOR, pointers of 16 bytes."""
    WARPS: gl.constexpr = BM // 16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DV, 16])
    TYPE: gl.constexpr = q.dtype.element_ty
    item = gl.program_id(0)
    if ORDER:
        item = gl.load(order + item).to(gl.int32)
    unit, b = units + item % U * 8, (item // U % B).to(gl.int64)
    first = (gl.cdiv(T * N, BM) - 1 - item // (U * B)) * BM
    head, group = gl.load(unit) * N, gl.load(unit + 1)
    k_rank = gl.multiple_of(gl.load(unit + 3).to(gl.int32), VECTOR)
    v_rank = gl.multiple_of(gl.load(unit + 5).to(gl.int32), VECTOR)
    keys += gl.multiple_of(b * k_b + gl.load(unit + 2), VECTOR)
    values += gl.multiple_of(b * v_b + gl.load(unit + 4), VECTOR)
    keys, values = (keys, _multiple(k_s), k_rank), (values, _multiple(v_s), v_rank)
    q_h, q_t, start = _multiple(q_h), _multiple(q_t), first // N
    q += gl.multiple_of(b * q_b + head * q_h + start.to(gl.int64) * q_t, VECTOR)

    # Tiles up to `high` are seen whole by all, rows from `end` on by none.
    queries += b * at_b
    count = gl.load(counts + b * c_b + group * c_g).to(gl.int32)
    earliest = gl.load(queries + start).to(gl.int32)
    latest = gl.load(queries + gl.minimum((first + BM - 1) // N, T - 1)).to(gl.int32)
    end = gl.minimum(count, latest + 1)
    high, stop = gl.minimum(count, earliest + 1) // BN, gl.cdiv(end, BN)
    m = first + gl.arange(0, BM, gl.SliceLayout(1, SCORES))
    limit = gl.load(queries + gl.minimum(m // N, T - 1)).to(gl.int32)
    limit = gl.minimum(limit, end - 1)

    v = _shared(STAGES, BN, DV, TYPE)
    k = _pieces(STAGES, BN, DK, EK, TYPE)
    queries_shared = _pieces(1, BM, DK, EK, TYPE)
    for piece in gl.static_range(len(k)):
        to = queries_shared[piece].index(0)
        _copy_queries(to, q, first, q_h, q_t, T, k_rank, N, piece * DK)
    for tile in gl.static_range(STAGES):
        _fetch(tile, keys, values, end, k, v, EXACT, WARPS, tile > 0)
    _arrived(STAGES - 1)
    s = warpgroup_mma_wait(0, (_scores(queries_shared, k, 0, SCORES),))
    top = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    mass = gl.zeros([BM], gl.float32, gl.SliceLayout(1, SCORES))
    weights, top, mass, _ = _softmax(s, 0, top, mass, limit, scale, True)
    state = weights, gl.zeros([BM, DV], gl.float32, OUTPUT), top, mass
    for tile in range(1, high):
        state = _step(tile, state, queries_shared, k, v, keys, values, end, limit, scale,
                      EXACT, False)  # fmt: skip
    for tile in range(gl.maximum(high, 1), stop):
        state = _step(tile, state, queries_shared, k, v, keys, values, end, limit, scale,
                      EXACT, True)  # fmt: skip
    weights, acc, top, mass = state
    weights = _operand(weights, OUTPUT, TYPE)
    _arrived(0)  # nothing is on its way to where outputs pass through
    acc = warpgroup_mma(weights, v.index(gl.maximum(stop - 1, 0) % STAGES), acc)

    norm = gl.where(mass > 0, 1.0 / mass, 0.0)
    norm = gl.convert_layout(norm, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
    begin = gl.load(unit + 6)
    _store(out, acc * norm[:, None], b, first, head, begin, v_rank, T, H, _multiple(DO), N)
    if begin == 0:
        at = lse + (b * H + head + m % N) * T + m // N
        gl.store(at, top + gl.log2(mass), m < T * N)


@gluon.jit
def _store(out, acc, b, first, head, begin, rank, T, H, DO, N: gl.constexpr):
    """Outputs [BM, DV], from column `begin` on."""
    WIDTH: gl.constexpr = acc.shape[1]
    BY: gl.constexpr = _lines(WIDTH, acc.shape[0] // 16)
    m = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, BY))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, BY))
    start = first // N
    out += gl.multiple_of(((b * T + start) * H + head) * DO + begin, VECTOR)
    row = ((m // N - start) * H + m % N) * DO
    x = gl.convert_layout(acc.to(out.dtype.element_ty), BY)
    there = (m < T * N)[:, None] & (column < rank)[None, :]
    gl.store(out + (row[:, None] + column[None, :]), x, there)
