"""Few-bit integers inside Triton kernels: the same numbers, codes and bytes as `formats.integers`.

Shapes: a tile of ROWS rows by WIDTH numbers, of which the first `width` of a row are there
(`inside` [ROWS, WIDTH]) and share its scale. Divisions and roots are rounded as IEEE says, as
PyTorch's are, so that only the order of a sum can make a scale differ from the reference's.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

FP16_MAX = tl.constexpr(65504.0)
FP8_MAX = tl.constexpr(448.0)
FP32_MAX = tl.constexpr(3.4028234663852886e38)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest (even) integer


@triton.jit
def quantize(
    x, inside, width,
    BITS: tl.constexpr, GAUSSIAN: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """x fp32 [ROWS, WIDTH], 0 outside -> codes int32, 0 outside, stored scale (fp16 or fp8) and
    zero fp16 [ROWS] (meaningless without ZEROS). `integers.quantize`."""
    levels = (1 << BITS) - 1
    if ZEROS:
        low = tl.min(tl.where(inside, x, float("inf")), 1)
        high = tl.max(tl.where(inside, x, float("-inf")), 1)
        scale = tl.div_rn(high - low, tl.full(low.shape, levels, tl.float32))
    else:
        low = tl.zeros_like(tl.sum(x, 1))
        scale = symmetric_scale(x, inside, width, BITS, GAUSSIAN, SCALE)
    # 0, or NaN where a number is NaN or inf, which max and min would have dropped.
    stored = store_scale(scale + tl.sum(x * 0.0, 1), BITS, SCALE)
    zero = tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX).to(tl.float16)
    scale = load_scale(stored, BITS, SCALE)
    lowest = zero.to(tl.float32) if ZEROS else scale * (-levels / 2)
    codes = tl.div_rn(x - lowest[:, None], tl.broadcast_to(scale[:, None], x.shape))
    codes = tl.where(inside & (codes == codes), codes, 0.0)  # NaN where the scale is 0 or NaN
    codes = tl.minimum(tl.maximum(codes, 0.0), levels) + ROUND - ROUND
    return codes.to(tl.int32), stored, zero


@triton.jit
def symmetric_scale(
    x, inside, width, BITS: tl.constexpr, GAUSSIAN: tl.constexpr, SCALE: tl.constexpr
):
    """The scale fp32 [ROWS] of least squared error among five. `integers._symmetric_scale`."""
    half: tl.constexpr = 1 << (BITS - 1)
    peak = tl.max(tl.abs(x), 1)
    wide = tl.div_rn(peak, tl.full(peak.shape, half - 0.5, tl.float32))
    mean = tl.div_rn(tl.sum(x * x, 1), tl.zeros_like(peak) + width)
    narrow = tl.minimum(GAUSSIAN * tl.sqrt_rn(mean), wide)
    middle = tl.sqrt_rn(narrow * wide)
    best = tl.zeros_like(peak)
    least = tl.full(peak.shape, float("inf"), tl.float32)
    # Not five copies of the code: a step of few rows waits for what it runs but once.
    for i in tl.range(5, loop_unroll_factor=1):
        tried = tl.where(i == 0, 2 * peak, tl.where(i == 1, wide, tl.where(i == 2, middle, narrow)))
        tried = tl.where(i == 4, 0.9 * narrow, tried)
        scale = load_scale(store_scale(tried, BITS, SCALE), BITS, SCALE)
        steps = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
        level = tl.minimum(tl.maximum(tl.floor(steps), -half), half - 1) + 0.5
        missed = tl.where(inside, level - steps, 0.0)
        error = tl.sqrt_rn(tl.sum(missed * missed, 1)) * scale
        # NaN, from a scale that rounds to 0, is never less; an overflow is, but last of all.
        error = tl.minimum(error, FP32_MAX, propagate_nan=tl.PropagateNan.ALL)
        better = error < least
        best = tl.where(better, scale, best)
        least = tl.where(better, error, least)
    return best


@triton.jit
def store_scale(scale, BITS: tl.constexpr, SCALE: tl.constexpr):
    """As fp8, of scale * 2^BITS, or fp16; both saturate, and NaN stays."""
    if SCALE == 1:
        scale = tl.minimum(scale * (1 << BITS), FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        stored = scale.to(tl.float8e4nv)
    else:
        scale = tl.minimum(scale, FP16_MAX, propagate_nan=tl.PropagateNan.ALL)
        stored = scale.to(tl.float16)
    return stored


@triton.jit
def load_scale(stored, BITS: tl.constexpr, SCALE: tl.constexpr):
    """The scale fp32 that a stored one stands for. `integers.scale_of`."""
    scale = stored.to(tl.float32)
    if SCALE == 1:
        scale = scale * (1 / (1 << BITS))
    return scale


@triton.jit
def read_scale(
    row, scale_at, zero_at, here, BITS: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr
):
    """(scale, value of code 0), fp32 [ROWS], from the bytes at `row` [ROWS]; 0 where not `here`."""
    if SCALE == 1:
        stored = tl.load(row + scale_at, here, 0).to(tl.float8e4nv, bitcast=True)
    else:
        stored = tl.load((row + scale_at).to(tl.pointer_type(tl.float16)), here, 0.0)
    scale = load_scale(stored, BITS, SCALE)
    lowest = scale * (-((1 << BITS) - 1) / 2)
    if ZEROS:
        lowest = tl.load((row + zero_at).to(tl.pointer_type(tl.float16)), here, 0.0).to(tl.float32)
    return scale, lowest


@triton.jit
def write_plane(
    at, codes, width, here, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Codes int32 [ROWS, WIDTH] below 2^BITS to the bytes from `at` [ROWS] on, where `here` [ROWS].
    `integers.pack` of one plane."""
    PER: tl.constexpr = 8 // BITS
    shifts = tl.arange(0, PER) * BITS
    packed = tl.sum(tl.reshape(codes, [ROWS, WIDTH // PER, PER]) << shifts[None, None, :], 2)
    byte = tl.arange(0, WIDTH // PER)
    inside = here[:, None] & (byte * PER < width)[None, :]
    tl.store(at[:, None] + byte[None, :], packed.to(tl.uint8), inside)


@triton.jit
def read_plane(
    at, width, here,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Inverse of `write_plane`: codes int32 [ROWS, WIDTH], 0 where not `here`. NUMBERS, a power of
    two, divides width."""
    PER: tl.constexpr = 8 // BITS
    STEP: tl.constexpr = NUMBERS // PER if NUMBERS > PER else 1
    byte = tl.arange(0, WIDTH // PER)
    # Divided and multiplied, so that the compiler knows of wide loads that the mask cuts none.
    count = (width + PER - 1) // PER // STEP * STEP
    inside = here[:, None] & (byte < count)[None, :]
    packed = tl.load(at[:, None] + byte[None, :], inside, 0).to(tl.int32)
    shifts = tl.arange(0, PER) * BITS
    codes = (packed[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, [ROWS, WIDTH])
