"""Write the token entries of one layer on CPUs: Numba kernels. Reading uses the reference.

Shapes and arguments as in `store`; D pieces: here the segments, uncut (see `segments`).
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvfold.layout.formats.integers import FP8_MAX, FP16_MAX, GAUSSIAN_STEP, PLANES
from kvfold.layout.pages import UNIT
from kvfold.ops.common.codes_numba import kernel, of_bits, single
from kvfold.ops.common.pages import LayerPages, views_of
from kvfold.ops.common.parts import scale_table
from kvfold.ops.common.threads import share
from kvfold.ops.store.reference import (
    add_metrics,
    gather,
    move,
    read_metrics,
    read_tracked,
)
from kvfold.ops.store.segments import plan_pieces

__all__ = ["add_metrics", "append", "gather", "move", "read_metrics", "read_tracked"]

WHOLE = 1 << 30  # no segment is cut: its numbers share a scale
ROWS = 64  # fewest tokens that are shared among threads
LOW = np.array([PLANES.get(bits, (0,))[0] for bits in range(9)])  # bits of the low plane, by bits
STEP = np.array([GAUSSIAN_STEP.get(bits, 0) for bits in range(9)], dtype=np.float32)


def append(
    pages: LayerPages, rows: Tensor, slots: Tensor, index: Tensor, positions: Tensor | None = None
) -> None:
    """Like `reference.append`, bytes included; where two scales are equally good to within fp32's
    rounding the choice may differ."""
    arena, tables, _, groups = pages
    layout, pieces = groups[0].layout, plan_pieces(groups, WHOLE, arena.device)
    assert rows.shape[1] == pieces.row, f"rows of {rows.shape[1]} numbers, not {pieces.row}"
    assert layout.itemsize == rows.dtype.itemsize or pieces.whole, (
        f"rows cannot be stored as {rows.dtype}"
    )
    assert not layout.tracked or positions is not None, "tracked rows need positions"
    rows = rows.detach().contiguous()
    stored_positions = slots if positions is None else positions
    work = partial(
        store,
        rows.float().numpy(),
        rows.view(torch.uint16).numpy(),
        slots.contiguous().numpy(),
        index.contiguous().numpy(),
        stored_positions.to(torch.int32).contiguous().numpy(),
        tables.numpy(),
        pieces.table.numpy(),
        layout.page,
        *views_of(arena),
        scale_table(pieces.scale),
        LOW,
        STEP,
    )
    if len(rows) < ROWS:
        work(0, len(rows))
    else:
        share(work, len(rows))


@kernel()
def rounded(x, most, cut, bias, nan):
    """Return the bits of min(|x|, most) rounded to a smaller float format, or `nan` if x is NaN.

    cut: bits of the fraction that are dropped; bias: what is subtracted from the exponent of fp32.
    """
    if np.isnan(x):
        return np.int64(nan)
    x = np.float32(min(abs(x), most))
    bits = np.int64(x.view(np.uint32))
    if bits >> 23 > bias:
        return (bits + (1 << (cut - 1)) - 1 + (bits >> cut & 1) >> cut) - (bias << (23 - cut))
    return np.int64(np.rint(x / of_bits((bias + cut - 22) << 23)))  # below normal numbers


@kernel()
def half_of(x):
    """Return the bits of the nearest fp16 number (ties to even), at most the largest finite one."""
    return rounded(x, FP16_MAX, 13, 112, 0x7E00) | np.int64(0x8000 if x < 0 else 0)


@kernel()
def fp8_of(x):
    """Return the bits of the nearest fp8 (e4m3) number, for x >= 0."""
    return rounded(x, FP8_MAX, 20, 120, 0x7F)


@kernel()
def stored(step, bits, fp8):
    """Return a step as it is read back: rounded to fp8 with a table `fp8`, else to fp16."""
    if len(fp8):
        return fp8[fp8_of(step * np.float32(1 << bits))] / np.float32(1 << bits)
    return single(half_of(step))


@kernel()
def symmetric(x, bits, fp8, gaussian):
    """Like `integers._symmetric_scale`; NaN where a number is not finite."""
    peak, squares, good = np.float32(0), np.float32(0), True
    for y in x:
        peak = max(peak, abs(y))
        squares += y * y
        good = good and np.isfinite(y)
    if not good:
        return np.float32(np.nan)
    wide = peak / (np.float32((1 << bits) - 1) / np.float32(2))
    narrow = min(gaussian * np.sqrt(squares / np.float32(len(x))), wide)
    best, least = np.float32(np.nan), np.float32(np.inf)
    half = np.float32(1 << (bits - 1))
    for trial in (
        np.float32(2) * peak, wide, np.sqrt(narrow * wide), narrow, np.float32(0.9) * narrow
    ):  # fmt: skip
        step, error = stored(trial, bits, fp8), np.float32(0)
        inverse = np.float32(1) / step
        for y in x:
            steps = y * inverse
            missed = min(max(np.floor(steps), -half), half - np.float32(1)) + np.float32(0.5)
            error += (missed - steps) * (missed - steps)
        error = np.sqrt(error) * step
        if np.isnan(best) or error < least:
            best, least = step, error if error == error else np.float32(np.inf)
    return best


@kernel()
def spread_of(x, bits):
    """Return the step between codes that covers x, and the value of the lowest code."""
    least, most, good = x[0], x[0], True
    for y in x:
        least, most = min(least, y), max(most, y)
        good = good and np.isfinite(y)
    step = (most - least) / np.float32((1 << bits) - 1)
    return step if good else np.float32(np.nan), np.float32(max(min(least, FP16_MAX), -FP16_MAX))


@kernel()
def encode(x, step, least, bits, codes):
    """Write the codes of x, then eight zeros, which fill up the last byte."""
    most = np.float32((1 << bits) - 1)
    for i in range(len(x)):
        code = np.rint((x[i] - least) / step)
        # NaN where the scale is 0 or NaN: any code will do, but the cast would be undefined.
        codes[i] = np.uint8(min(max(code, np.float32(0)), most)) if code == code else np.uint8(0)
    codes[len(x) : len(x) + 8] = 0


@kernel()
def pack(codes, width, bits, shift, arena, at):
    """Pack one plane of codes into bytes: `bits` bits of each code from bit `shift` on, the first
    code lowest."""
    per, mask = 8 // bits, (1 << bits) - 1
    for byte in range((width + per - 1) // per):
        packed = 0
        for i in range(per):
            packed |= (np.int64(codes[byte * per + i]) >> shift & mask) << (bits * i)
        arena[at + byte] = np.uint8(packed)


@kernel(
    "void(float32[:,::1], uint16[:,::1], int64[::1], int64[:,::1], int32[::1], int32[:,:,:],"
    "int32[:,::1], int64, uint8[::1], uint16[::1], float32[::1], int32[::1], float32[::1],"
    "int64[::1], float32[::1], int64, int64)"
)
def store(
    rows, raw, slots, index, positions, tables, pieces, page,
    arena, halves, singles, ints, fp8, low, gaussian, begin, end,
):  # fmt: skip
    """Write tokens begin..end: rows [N, R], raw their bits, positions [N], pieces [D, 13]."""
    codes, words = (
        np.empty(rows.shape[1] + 8, dtype=np.uint8),
        raw.shape[1] // max(rows.shape[1], 1),
    )
    for i in range(begin, end):
        for d in range(len(pieces)):
            (
                group, start, width, bits, first, second, row_bytes, scale, zero, scales,
                position, metric, tracks,
            ) = pieces[d]  # fmt: skip
            row = index[i, group]
            base = np.int64(tables[slots[i], group, row // page]) * UNIT
            row = row % page
            if tracks and position >= 0:
                ints[(base + position) // 4 + row] = positions[i]
                singles[(base + metric) // 4 + row] = 0
            at = base + first + row * row_bytes
            if scale < 0:
                size, column = width * words, start * words
                halves[at // 2 : at // 2 + size] = raw[i, column : column + size]
                continue
            x = rows[i, start : start + width]
            scale_at = base + scale + row * scales
            step, least = np.float32(0), np.float32(0)
            if zero >= 0:
                step, least = spread_of(x, bits)
                halves[(base + zero) // 2 + row * scales // 2] = half_of(least)
                least = single(half_of(least))
            else:
                step = symmetric(x, bits, fp8, gaussian[bits])
            if len(fp8):
                arena[scale_at] = fp8_of(step * np.float32(1 << bits))
            else:
                halves[scale_at // 2] = half_of(step)
            step = stored(step, bits, fp8)
            if zero < 0:
                least = step * (-np.float32((1 << bits) - 1) / np.float32(2))
            encode(x, step, least, bits, codes)
            pack(codes, width, low[bits], 0, arena, at)
            if low[bits] < bits:
                pack(
                    codes,
                    width,
                    bits - low[bits],
                    low[bits],
                    arena,
                    base + second + row * row_bytes,
                )
