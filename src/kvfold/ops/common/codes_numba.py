"""Decode the numbers in pages for Numba kernels: codes, 16 at a time in LLVM vectors, scales and
floats.

Numba does not vectorise plain loops over codes of a few bits, which makes them about ten times
slower. Kernels are compiled at their first call and cached beside their source, or in
NUMBA_CACHE_DIR. Addresses count items of the array.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvfold.layout.formats.integers import PLANES
from kvfold.ops.common.parts import HALF, LANES

# NaN and infinity stay what they are.
FAST = {"reassoc", "contract", "nsz"}

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()


def kernel(signature: str | None = None, *, fast: bool = False) -> Callable[[Any], Any]:
    """Compile a function that releases the GIL, for one signature, or for those it is called with.
    fast: sums in any order. The result is cached if a folder is writable."""
    options: dict[str, Any] = {"nogil": True, "fastmath": fast and FAST, "error_model": "numpy"}

    def compiled(function: Any) -> Any:
        try:
            return njit(signature, cache=True, **options)(function)
        except RuntimeError:  # no folder can
            return njit(signature, **options)(function)

    return compiled


def _vector(kind: ir.Type, values: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, len(values)), values)


def _plane(builder: ir.IRBuilder, start: Any, bits: int) -> Any:
    """16 codes of a plane from a byte on, int32."""
    per = 8 // bits
    kind = ir.VectorType(_I8, LANES // per)
    packed = builder.load(builder.bitcast(start, kind.as_pointer()), align=1)
    whose = _vector(_I32, [i // per for i in range(LANES)])
    bytes_of = builder.shuffle_vector(packed, ir.Constant(kind, ir.Undefined), whose)
    codes = builder.zext(bytes_of, ir.VectorType(_I32, LANES))
    if per == 1:
        return codes
    codes = builder.lshr(codes, _vector(_I32, [bits * (i % per) for i in range(LANES)]))
    return builder.and_(codes, _vector(_I32, [(1 << bits) - 1] * LANES))


def _splat(builder: ir.IRBuilder, x: Any) -> Any:
    none = ir.Constant(ir.VectorType(_F32, LANES), ir.Undefined)
    first = builder.insert_element(none, x, _I32(0))
    return builder.shuffle_vector(first, none, _vector(_I32, [0] * LANES))


def _decoder(planes: Sequence[int]) -> Any:
    """decode(bytes, low, high, out, to, scale, least): out[to .. to + 16] = scale * code + least,
    codes whose planes begin at these bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, low, high, out, to, scale, least = args
        data, target = (
            context.make_array(kind)(context, builder, x).data
            for kind, x in ((signature.args[0], source), (signature.args[3], out))
        )
        codes = _plane(builder, builder.gep(data, [low]), planes[0])
        for bits in planes[1:]:
            above = _plane(builder, builder.gep(data, [high]), bits)
            codes = builder.or_(codes, builder.shl(above, _vector(_I32, [planes[0]] * LANES)))
        numbers = builder.sitofp(codes, ir.VectorType(_F32, LANES))
        numbers = builder.fmul(numbers, _splat(builder, scale), flags=["contract"])
        numbers = builder.fadd(numbers, _splat(builder, least), flags=["contract"])
        place = builder.bitcast(builder.gep(target, [to]), numbers.type.as_pointer())
        builder.store(numbers, place, align=4)
        return context.get_dummy_value()

    def decode(typing, source, low, high, out, to, scale, least):
        number, place = types.float32, types.intp
        return types.none(source, place, place, out, place, number, number), generate

    return intrinsic(decode)


_decode1, _decode2, _decode3, _decode4, _decode6, _decode8 = (
    _decoder(PLANES[bits]) for bits in (1, 2, 3, 4, 6, 8)
)


@kernel(fast=True)
def decode_codes(
    data, at, high, size, width, bits, count, scales, scales_per_row, scale, zero, factor,
    rows, to, stride,
):  # fmt: skip
    """Decode `count` token entries of `width` codes into rows[to + p * stride ..].

    It writes whole vectors of 16 numbers: those beyond `width` are finite but meaningless.
    at, high: byte offsets of the first entry's low and high plane, `size` bytes from entry to
        entry.
    scales [count * scales_per_row]: the entry's scale is number `scale`, times `factor`, and its
        zero point number `zero` (-1: symmetric grid, no zero point).
    """
    middle = np.float32((1 << bits) - 1) / np.float32(-2)
    # A loop for each, because LLVM leaves the choice in the innermost one.
    for p in range(count):
        x, y, out = at + p * size, high + p * size, to + p * stride
        s = scales[p * scales_per_row + scale] * factor
        z = s * middle if zero < 0 else scales[p * scales_per_row + zero]
        if bits == 4:
            for i in range(0, width, LANES):
                _decode4(data, x + (i >> 1), y, rows, out + i, s, z)
        elif bits == 3:
            for i in range(0, width, LANES):
                _decode3(data, x + (i >> 2), y + (i >> 3), rows, out + i, s, z)
        elif bits == 2:
            for i in range(0, width, LANES):
                _decode2(data, x + (i >> 2), y, rows, out + i, s, z)
        elif bits == 6:
            for i in range(0, width, LANES):
                _decode6(data, x + (i >> 1), y + (i >> 2), rows, out + i, s, z)
        elif bits == 1:
            for i in range(0, width, LANES):
                _decode1(data, x + (i >> 3), y, rows, out + i, s, z)
        else:
            for i in range(0, width, LANES):
                _decode8(data, x + i, y, rows, out + i, s, z)


@kernel()
def of_bits(x):
    """The fp32 with these bits."""
    return np.uint32(x).view(np.float32)


@kernel()
def single(half):
    """Convert the bits of an fp16 to fp32."""
    rest, sign = np.uint32(half & 0x7FFF), np.uint32(half & 0x8000)
    # As bits of an fp32 it is 2^112 times smaller; what is not finite has too low an exponent.
    whole = np.float32(2.0**112) if rest < 0x7C00 else np.float32(np.inf)
    result = of_bits(rest << 13) * whole
    result = result if rest <= 0x7C00 else np.float32(np.nan)
    return -result if sign else result


@kernel(fast=True)
def decode_floats(words, at, width, kind, out, to):
    """out[to .. to + width] = the numbers of 16 bits, of a kind, from words uint16 `at` on."""
    source, target = words[at : at + width], out[to : to + width]
    if kind == HALF:
        for i in range(width):
            target[i] = single(source[i])
    else:
        for i in range(width):
            target[i] = of_bits(np.uint32(source[i]) << 16)


@kernel(fast=True)
def decode_scales(data, words, at, count, small, out):
    """out[.. count] = scales from byte `at` on, fp8 (e4m3) where they are small, else fp16."""
    target = out[:count]
    if small:
        source = data[at : at + count]
        for i in range(count):
            rest = source[i] & 0x7F
            # As bits of an fp32 it is 2^120 times smaller.
            result = of_bits(rest << 20) * np.float32(2.0**120)
            target[i] = result if rest < 0x7F else np.float32(np.nan)
    else:
        decode_floats(words, at // 2, count, HALF, out, 0)
