"""Triton kernel that multiplies queries by the key maps, for RoPE pairs that rotate slowly.

Runs before the scores of the kernel `triton`, on CUDA, if half of the pairs rotate slowly (see
`maps.Drift`). Its results are queries in the space of a key's latent, one set per stretch of REACH
entries.

Shapes as in `scores_triton`.
"""
# mypy: allow-untyped-defs

import triton.language as tl

from kvfold.ops.common.codes_triton import UNIT
from kvfold.ops.common.rope_triton import load_pairs
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.decode.kernels import after_launch
from kvfold.ops.latent_decode.scores_triton import OFFSETS, STEP


@step_kernel
def fold_kernel(
    q, q_stride, up, sums, exact, powers, folded, extra, lengths, length_slot, slots, bases,
    G: tl.constexpr, HG: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr,
    WP: tl.constexpr, SHARE: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr,
    REACH: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Multiply queries by the map of their KV head, for the slow pairs, by stretch and power.

    Program (i, item) computes stretches i, i + number of programs .. of item (b, h). folded
    [stretches, HG / SHARE, C, W, SHARE * GP]: queries as `_scores` multiplies them, SHARE heads
    side by side. extra fp32 [stretches, HG, 3, GP]: what mu, the middle code and a zero point of 1
    add to scores. WP: W rounded up to a power of two.
    """
    GP: tl.constexpr = K * NP
    C: tl.constexpr = 16 // BITS
    SLOW: tl.constexpr = PAIRS - F
    LOW: tl.constexpr = 0.0 if ZEROS else (2**BITS - 1) / 2
    after_launch(PDL)
    item = tl.program_id(1)
    b, h = item // (G * HG), item % (G * HG)
    g = h // HG
    length = tl.load(lengths + tl.load(slots + b).to(tl.int64) * length_slot + g)
    column, pair, word = tl.arange(0, GP), F + tl.arange(0, SLOW), tl.arange(0, WP)
    n, k = column % NP, column // NP
    x, y = load_pairs(q + b * q_stride + h * N * D, n, pair, n < N, D, HALF)
    power = tl.load(powers + k[None, :] * SLOW + (pair - F)[:, None])
    odd = (k % 2 == 1)[None, :]
    at = sums + h * 6 * PAIRS + pair
    mean_x, mean_y = tl.load(at)[:, None], tl.load(at + PAIRS)[:, None]
    group_item = b * G + g
    first = tl.load(bases + group_item) // (REACH // SPAN) + group_item
    for j in tl.static_range(C):
        place = ((h * C + j) * 2 * WORDS + word)[:, None] * PAIRS + pair[None, :]
        a_x = tl.load(up + place, (word < WORDS)[:, None], 0.0)
        a_y = tl.load(up + place + WORDS * PAIRS, (word < WORDS)[:, None], 0.0)
        for stretch in range(tl.program_id(0), tl.cdiv(length, REACH), tl.num_programs(0)):
            middle = stretch * REACH + REACH // 2
            angle = exact + ((OFFSETS + middle // STEP) * PAIRS + pair) * 2
            cos, sin = tl.load(angle)[:, None], tl.load(angle + 1)[:, None]
            rotated_x, rotated_y = x * cos + y * sin, y * cos - x * sin
            g_x = tl.where(odd, rotated_y, rotated_x) * power
            g_y = tl.where(odd, -rotated_x, rotated_y) * power
            w = tl.dot(a_y, g_y.to(a_y.dtype), tl.dot(a_x, g_x.to(a_x.dtype)))
            w = w.to(folded.dtype.element_ty)
            to = ((first + stretch) * HG + h % HG).to(tl.int64)
            shared_column = to % SHARE * GP + column
            folded_at = ((to // SHARE * C + j) * WORDS + word)[:, None] * (
                SHARE * GP
            ) + shared_column[None, :]
            tl.store(folded + folded_at, w, (word < WORDS)[:, None])
            to_extra = extra + to * 3 * GP + column
            if j == 0:
                tl.store(to_extra, tl.sum(mean_x * g_x + mean_y * g_y, 0))
            if BITS < 16:
                total = tl.sum(w.to(tl.float32), 0) * (16 if BITS == 4 and j % 2 == 1 else 1)
                low = total * (-LOW / UNIT)
                if j > 0:
                    low += tl.load(to_extra + GP)
                    total += tl.load(to_extra + 2 * GP)
                tl.store(to_extra + GP, low)
                tl.store(to_extra + 2 * GP, total)
