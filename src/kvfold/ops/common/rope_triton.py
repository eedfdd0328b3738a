"""Rotations by RoPE's angles, and what they are of, inside Triton kernels.

A *pair* is two dims that turn together; its halves are kept apart. Angles come as cos and sin, two
fp16s of an int32 (see `latent_decode.rope_table`).
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvfold.ops.common.codes_triton import INTERPRET

# fp32 x0 x1 y0 y1 and fp16 pairs cos, sin, a, b -> a + x cos - y sin, b + y cos + x sin.
_ROTATE = tl.constexpr(
    "{ .reg .b32 x, y, n; cvt.rn.f16x2.f32 x, $3, $2; cvt.rn.f16x2.f32 y, $5, $4;"
    " neg.f16x2 n, y; fma.rn.f16x2 $0, x, $6, $8; fma.rn.f16x2 $0, n, $7, $0;"
    " fma.rn.f16x2 $1, y, $6, $9; fma.rn.f16x2 $1, x, $7, $1; }"
)


@triton.jit
def rotate(x, y, cos, sin, a, b):
    """Halves x, y, fp32, rotated in fp16 and added to a, b. Written out because pairs of fp16s are
    otherwise packed anew in every tile."""
    if INTERPRET:
        x, y = x.to(tl.float16), y.to(tl.float16)
        x, y = (a + x * cos) - y * sin, (b + y * cos) + x * sin
    else:
        x, y = tl.inline_asm_elementwise(
            _ROTATE, "=&r,=&r,f,f,f,f,r,r,r,r", [x, y, cos, sin, a, b],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return x, y


# fp16 pairs x, y, cos, sin -> x cos + y sin, y cos - x sin.
ROTATE_BACK = tl.constexpr(
    "{ .reg .b32 n; neg.f16x2 n, $2; mul.f16x2 $0, $2, $4; fma.rn.f16x2 $0, $3, $5, $0;"
    " mul.f16x2 $1, $3, $4; fma.rn.f16x2 $1, n, $5, $1; }"
)


@triton.jit
def rotate_back(x, y, cos, sin):
    """Halves x, y of queries, fp16, rotated by minus the angle."""
    if INTERPRET:
        x, y = x * cos + y * sin, y * cos - x * sin
    else:
        x, y = tl.inline_asm_elementwise(
            ROTATE_BACK, "=&r,=&r,r,r,r,r", [x, y, cos, sin],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return x, y


@triton.jit
def packed_pairs(x, y):
    """fp16 x and y as they are, two to a register from here on."""
    if not INTERPRET:
        x, y = tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=r,r,r", [x, y],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return x, y


@triton.jit
def load_angles(pair):
    """int32 -> its two fp16s: cos, sin."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def load_pairs(q, n, pair, there, D: tl.constexpr, HALF: tl.constexpr):
    """Halves fp32 [pairs, .] of the heads n at pointer q: `pair` [pairs] counts pairs."""
    first = tl.where(pair < HALF, pair, pair + HALF)
    second = first + tl.where(pair < HALF, HALF, D // 2 - HALF)
    at = q + n[None, :] * D
    there = there[None, :] & (pair < D // 2)[:, None]
    x = tl.load(at + first[:, None], there, 0.0).to(tl.float32)
    return x, tl.load(at + second[:, None], there, 0.0).to(tl.float32)
