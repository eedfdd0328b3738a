"""Codes, scales and queries as the decode kernels read them. Triton functions.

Shapes: W 16-bit words of a row, each of C codes; GP padded queries of a KV head.

A code becomes fp16 by masking: the bits of c, alone, are the subnormal number c * 2^-24, which
tensor cores multiply exactly (Fasi et al. 2021; Khattak and Mikaitis 2025 for H100); sums keep 24
bits below 2^-14 times the largest other factor. Nothing is converted, or added that would have to
be taken off again; UNIT comes back as a factor of scores and outputs, which are fp32. Codes below 8
bits stay where they are in their byte, so many times as large (`factor`).
"""
# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
UNIT = tl.constexpr(2.0**24)  # a code of 1 is 1 / UNIT
# Two words -> their even and odd codes.
_BYTES = tl.constexpr("prmt.b32 $0, $2, 0, 0x4240; prmt.b32 $1, $2, 0, 0x4341;")
_NIBBLES = tl.constexpr(
    "{ .reg .b32 t; shr.b32 t, $4, 8;"
    " and.b32 $0, $4, 0x000F000F; and.b32 $1, $4, 0x00F000F0;"
    " and.b32 $2, t, 0x000F000F; and.b32 $3, t, 0x00F000F0; }"
)


_PAIRS = tl.constexpr(
    "{ .reg .b32 t; shr.b32 t, $8, 8;"
    " and.b32 $0, $8, 0x00030003; and.b32 $1, $8, 0x000C000C;"
    " and.b32 $2, $8, 0x00300030; and.b32 $3, $8, 0x00C000C0;"
    " and.b32 $4, t, 0x00030003; and.b32 $5, t, 0x000C000C;"
    " and.b32 $6, t, 0x00300030; and.b32 $7, t, 0x00C000C0; }"
)


def _centred(bits: int) -> str:
    """PTX: two words to their codes less (2^bits - 1) / 2, twice `factor` times too large.

    In an fp16 of 1024 and more the lowest bit counts 1, so that bits put there are that much more.
    Words are moved by one bit, or the middle of all codes would not be whole.
    """
    number, per = 16 // bits, 8 // bits
    lines = [f"shl.b32 a, ${number}, 1; shr.b32 b, ${number}, 7;"]
    for j in range(number):
        word, place = "ab"[j // per], bits * (j % per)
        most = (1 << bits) - 1
        field, middle = (most << place + 1) * 0x10001, (0x6400 + (most << place)) * 0x10001
        lines.append(f"lop3.b32 ${j}, {word}, {field:#x}, 0x64006400, 0xEA;")
        lines.append(f"mov.b32 m, {middle:#x}; sub.f16x2 ${j}, ${j}, m;")
    return f"{{ .reg .b32 a, b, m; {' '.join(lines)} }}"


_CENTRED_8 = tl.constexpr(_centred(8))
_CENTRED_4 = tl.constexpr(_centred(4))
_CENTRED_2 = tl.constexpr(_centred(2))


@triton.constexpr_function
def factor(bits, j):
    """How many times too large code j of a word is unpacked."""
    return 1 if bits == 16 else 1 << bits * (j % (8 // bits))


@triton.jit
def _field(words, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return ((words >> SHIFT) & MASK).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def unpack(words, BITS: tl.constexpr):
    """uint16 words -> (code 0, .. code 3) of each as fp16; what is not there repeats code 0.

    In units of 1 / UNIT; 8 bits: c, c'; 4 bits: c, 16 c', c", 16 c'".
    """
    if BITS == 16:
        a, b, c, d = words, words, words, words
    elif BITS == 8:
        if INTERPRET:
            a, b = _field(words, 0, 0xFF), _field(words, 8, 0xFF)
        else:
            a, b = tl.inline_asm_elementwise(
                _BYTES, "=&r,=r,r", [words], dtype=(tl.uint16, tl.uint16), is_pure=True, pack=2
            )
            a, b = a.to(tl.float16, bitcast=True), b.to(tl.float16, bitcast=True)
        c, d = a, a
    elif INTERPRET:
        a, b = _field(words, 0, 0xF), _field(words, 0, 0xF0)
        c, d = _field(words, 8, 0xF), _field(words, 8, 0xF0)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _NIBBLES,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.uint16, tl.uint16, tl.uint16, tl.uint16),
            is_pure=True,
            pack=2,
        )
        a, b = a.to(tl.float16, bitcast=True), b.to(tl.float16, bitcast=True)
        c, d = c.to(tl.float16, bitcast=True), d.to(tl.float16, bitcast=True)
    return a, b, c, d


@triton.jit
def unpack_all(words, BITS: tl.constexpr):
    """Unpack uint16 code words into a tuple of fp16 tensors, one per code of a word, in units of 1
    / UNIT and `factor` times too large. With 16 bits, return the words themselves."""
    if BITS == 16:
        codes = (words,)
    elif BITS == 8:
        codes = unpack(words, 8)[:2]
    elif BITS == 4:
        codes = unpack(words, 4)
    elif INTERPRET:
        codes = ()
        for J in tl.static_range(8):
            codes = codes + (_field(words, J // 4 * 8, 3 << 2 * (J % 4)),)
    else:
        bits = tl.inline_asm_elementwise(
            _PAIRS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words], dtype=(tl.uint16,) * 8,
            is_pure=True, pack=2,
        )  # fmt: skip
        codes = ()
        for J in tl.static_range(8):
            codes = codes + (bits[J].to(tl.float16, bitcast=True),)
    return codes


@triton.jit
def unpack_centred(words, BITS: tl.constexpr):
    """Unpack uint16 code words into a tuple of fp16 tensors, one per code of a word: the code less
    (2^BITS - 1) / 2, twice `factor` times too large."""
    if INTERPRET:
        codes = ()
        for J in tl.static_range(16 // BITS):
            code = (words >> BITS * J) & ((1 << BITS) - 1)
            x = (2 * code.to(tl.float32) - ((1 << BITS) - 1)) * factor(BITS, J)
            codes = codes + (x.to(tl.float16),)
    elif BITS == 8:
        codes = tl.inline_asm_elementwise(
            _CENTRED_8, "=&r,=&r,r", [words], dtype=(tl.float16,) * 2, is_pure=True, pack=2
        )
    elif BITS == 4:
        codes = tl.inline_asm_elementwise(
            _CENTRED_4, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.float16,) * 4, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        codes = tl.inline_asm_elementwise(
            _CENTRED_2, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words], dtype=(tl.float16,) * 8,
            is_pure=True, pack=2,
        )  # fmt: skip
    return codes


@triton.jit
def load_query(
    q, heads, width, J: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr
):
    """Numbers J, J + C .. of every query as [W, GP], over what their codes are too large by, and
    their sums [GP], fp32.

    q: pointers to the queries [GP]; heads: which exist [GP].
    """
    column = tl.arange(0, W) * C + J
    x = tl.load(q[None, :] + column[:, None], (column < width)[:, None] & heads[None, :], 0.0)
    FACTOR: tl.constexpr = factor(BITS, J)
    if BITS < 16:
        x = (x.to(tl.float32) / FACTOR).to(tl.float16)
    return x, FACTOR * tl.sum(x.to(tl.float32), 0)


@triton.jit
def _halves(pair):
    """int32 -> its two fp16s, in fp32."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_scales(
    arena, page, start, place, inside, key_codes, value_codes,
    ANY: tl.constexpr, ZEROS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of keys and of values, fp32 by row. page, start, place: in fp16s.

    PAIRED: every group has both, so that 4 bytes hold them, as asynchronous copies want; arena is
    then int32, else fp16.
    """
    none = tl.zeros(place.shape, tl.float32)
    key, value, key_zero, value_zero = none, none, none, none
    if ANY and PAIRED:
        where = arena + (page // 2 + start // 2) + place // 2
        key, value = _halves(tl.load(where, inside, 0))
        if ZEROS:
            key_zero, value_zero = _halves(tl.load(where + 1, inside, 0))
    if ANY and not PAIRED:
        where = arena + (page + start + place)
        second = key_codes.to(tl.int32)
        key = tl.load(where, inside & key_codes, 0.0).to(tl.float32)
        value = tl.load(where + second, inside & value_codes, 0.0).to(tl.float32)
        if ZEROS:
            where += second + value_codes.to(tl.int32)
            key_zero = tl.load(where, inside & key_codes, 0.0).to(tl.float32)
            value_zero = tl.load(where + second, inside & value_codes, 0.0).to(tl.float32)
    return key, value, key_zero, value_zero


@triton.jit
def load_fp16(arena, index, inside):
    """fp16 number `index` of the arena (int32) as fp32: asynchronous copies want 4 bytes."""
    pair = tl.load(arena + index // 2, inside, 0) >> ((index % 2) * 16).to(tl.int32)
    return (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_scale(arena, page, place, inside, BITS: tl.constexpr, SCALE: tl.constexpr):
    """The scale fp32 that number `place` (int32) of a page stands for: an fp16, or where SCALE is 1
    an fp8 (e4m3, never negative). As `integers.scale_of`.

    arena: as int32; page: in 16-bit words.
    """
    PER: tl.constexpr = 4 // SCALE
    pair = tl.load(arena + (page // 2 + place // PER), inside, 0) >> (place % PER * (8 * SCALE))
    if SCALE == 2:
        scale = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        byte = pair & 0xFF
        # fp16 has a bit more of exponent, whose bias is 8 larger.
        scale = (byte << 7).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        scale = tl.where(byte == 0x7F, float("nan"), scale * (256 / (1 << BITS)))
    return scale
