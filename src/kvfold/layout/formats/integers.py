"""Low-bit integers: quantise numbers to codes, pack codes into bytes, and back. Plain PyTorch.

Shapes: n numbers that share one scale (a segment of one row); ... any leading dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.layout.formats.base import Format, FormatRequest

FP16_MAX = 65504.0
# Step of the uniform quantiser of least squared error for a unit Gaussian (Max 1960, table II).
GAUSSIAN_STEP = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 6: 0.1041, 8: 0.0308}
# Bit planes of a code, lowest bits first; the width of each divides a byte.
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (8,)}
FP8_MAX = 448.0  # largest float8_e4m3fn
SCALES_IN = {1: torch.float8_e4m3fn, 2: torch.float16}  # by bytes of a scale

# By bits of a code: how the codes of a byte are spread to one byte per code. The dtype that holds
# the spread codes, then per step (shift, mask before, mask after); each step halves the packing.
_SPREAD: dict[int, tuple[torch.dtype, tuple[tuple[int, int, int], ...]]] = {
    8: (torch.uint8, ()),
    4: (torch.int16, ((4, 0xFF, 0x0F0F),)),
    2: (torch.int32, ((12, 0xFF, 0x000F000F), (6, 0x000F000F, 0x03030303))),
    1: (
        torch.int64,
        (
            (28, 0xFF, 0x0000000F0000000F),
            (14, 0x0000000F0000000F, 0x0003000300030003),
            (7, 0x0003000300030003, 0x0101010101010101),
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Integers(Format):
    """Codes on a uniform grid, with one scale per row of a segment.

    zeros: also store a zero point, the value of code 0; else the grid is symmetric. Scales are
        fp16, or fp8 (e4m3) without zero points.
    """

    zeros: bool = False

    name = "integers"
    kernels = frozenset({"store", "decode", "latent_decode"})
    widths = tuple(sorted(PLANES, reverse=True))
    plans = True

    @property
    def num_metadata(self) -> int:
        return 2 if self.zeros else 1

    def row_bytes(self, width: int) -> int:
        """Bytes of a row; each bit plane is rounded up to whole bytes."""
        return sum(-(-width * bits // 8) for bits in PLANES[self.bits])

    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        codes, scale, zero = quantize(x, self.bits, self.zeros, self.metadata)
        return pack(codes, self.bits), (scale,) if zero is None else (scale, zero)

    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        scale = torch.where(inside, scale_of(metadata[0], self.bits), 0.0)
        zero = torch.where(inside, metadata[1].float(), 0.0) if self.zeros else None
        dequantize(unpack(codes, out.shape[-1], self.bits), scale, zero, self.bits, out)

    @classmethod
    def for_request(cls, request: FormatRequest) -> Format:
        """fp8 scales for planned bits, because a plan has many tiers; else fp16."""
        size = 1 if request.planned and not request.zeros else 2
        return cls(bits=request.bits, zeros=request.zeros, metadata=SCALES_IN[size])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [..., n] below 2^bits into uint8 [..., bytes]; bits from PLANES.

    Number i of a byte is in its bits i * b and up. 3 and 6 bits are two planes, both rounded up to
    whole bytes: the low bits of all numbers, then the high bits of all numbers.
    """
    low, *high = PLANES[bits]
    if not high:
        return _squeeze(codes, low)
    return torch.cat((_squeeze(codes & (1 << low) - 1, low), _squeeze(codes >> low, high[0])), -1)


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    """Inverse of `pack`: uint8 [..., bytes] -> codes uint8 [..., n]."""
    low, *high = PLANES[bits]
    if not high:
        return _spread(packed, n, low)
    size = -(-n * low // 8)
    return _spread(packed[..., :size], n, low) | _spread(packed[..., size:], n, high[0]) << low


def codes_by_position(packed: Tensor, n: int, bits: int) -> Iterator[tuple[slice, int, Tensor]]:
    """Iterate over the codes of `unpack` by their position within a byte.

    packed uint8 [..., bytes]. Yields (columns, factor, uint8 [..., number of columns]): the codes
    [..., n] are the sum of factor times these in their columns. This takes two passes over the
    packed bytes; putting the numbers in order takes several passes over more bytes.
    """
    begin = shift = 0
    for width in PLANES[bits]:
        size = -(-n * width // 8)
        plane = packed[..., begin : begin + size]
        for first in range(min(n, 8 // width)):
            columns = slice(first, n, 8 // width)
            codes = plane[..., : len(range(n)[columns])]
            codes = codes >> first * width if first else codes
            last = (first + 1) * width == 8
            yield columns, 1 << shift, codes if last else codes & (1 << width) - 1
        begin, shift = begin + size, shift + width


def _squeeze(codes: Tensor, bits: int) -> Tensor:
    """Pack the codes of a byte, read as one little-endian word, by shifting halves together."""
    word, steps = _SPREAD[bits]
    x = F.pad(codes, (0, -codes.shape[-1] % (8 // bits)))
    # Flatten first, because a dimension of size 1 may have any stride.
    x = x.flatten().view(word).view(*x.shape[:-1], x.shape[-1] * bits // 8)
    for shift, together, _ in reversed(steps):
        x |= x >> shift
        x &= together
    return x.to(torch.uint8)


def _spread(packed: Tensor, n: int, bits: int) -> Tensor:
    """Inverse of `_squeeze`: one byte per code."""
    word, steps = _SPREAD[bits]
    x = packed.to(word, memory_format=torch.contiguous_format)
    for shift, _, apart in steps:
        x |= x << shift
        x &= apart
    return x.view(torch.uint8)[..., :n]


def quantize(
    x: Tensor, bits: int, zeros: bool, scale_dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise x float [..., n] to codes uint8 [..., n], with scale [...] and zero fp16 [...] or
    None.

    scale_dtype: float16, or float8_e4m3fn for symmetric scales, which then hold s * 2^bits (about
        twice the largest number) to within 1/16, in 2^-6 .. 448: half the bytes, for numbers of
        known size.

    With s the scale, L = 2^bits - 1, u = 2^-11 the round-off of fp16, and up to the round-off of
    fp32:
    zeros (asymmetric): zero = min, scale = (max - min) / L, x_hat = zero + code * s and
        |x - x_hat| <= (max - min) / 2L + u (|min| + max - min) + (L + 1) 2^-25.
    no zeros (symmetric): x_hat = (code - L / 2) * s, a grid without a zero level, and
        |x - x_hat| <= max(s / 2, max|x| - s L / 2). s is the best of five (`_symmetric_scale`), so
        the group's squared error is at most that of covering the maximum, s = 2 max|x| / L, and
        |x - x_hat| <= (1 + 2u) sqrt(n) max|x| / L + L 2^-26.

    A group of one value (symmetric: of one magnitude) is reproduced to the precision of fp16, and
    from 32752 on symmetrically within u. NaN or inf makes the scale and all numbers of the group
    NaN. Scale and zero saturate at +-65504; the bounds hold where neither does.
    """
    x = x.float()
    low = x.amin(-1)
    high = x.amax(-1)
    scale = (high - low) / (2**bits - 1) if zeros else _symmetric_scale(x, bits, scale_dtype)
    scale = torch.where(low.isfinite() & high.isfinite(), scale, torch.nan)
    stored = _stored(scale, bits, scale_dtype)
    scale = scale_of(stored, bits)
    zero = low.clamp(-FP16_MAX, FP16_MAX).half() if zeros else None
    codes = (x - lowest(scale, zero, bits)).div_(scale[..., None])
    # NaN if the scale is 0 or NaN: any code is right, but casting NaN to an integer is undefined.
    codes = codes.round_().clamp_(0, 2**bits - 1).nan_to_num_(0.0).to(torch.uint8)
    return codes, stored, zero


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, out: Tensor | None = None
) -> Tensor:
    """Dequantise codes uint8 [..., n], with scale fp32 (from `scale_of`) and zero [...], to fp32
    [..., n].

    out: where to write, in its dtype; for fp32, of any strides, this needs no extra pass.
    """
    # code * scale is exact (8 by 11 bits fit in fp32's 24), so fused multiply-add changes nothing.
    direct = out is not None and out.dtype is torch.float32
    # A pass that only casts is several times faster than a product of mixed dtypes.
    steps = out.copy_(codes) if out is not None and direct else codes.float()
    steps.mul_(scale[..., None]).add_(lowest(scale, zero, bits))
    return steps if out is None or direct else out.copy_(steps)


def scale_of(stored: Tensor, bits: int) -> Tensor:
    """The fp32 value of a stored scale, which is fp16 or fp8."""
    scale = stored.float()
    return scale * 2.0**-bits if stored.dtype.itemsize == 1 else scale


def _stored(scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1:
        return (scale * 2.0**bits).clamp(max=FP8_MAX).to(dtype)
    return scale.clamp(max=FP16_MAX).to(dtype)


def _symmetric_scale(x: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The scale [...] with the least squared error among five candidates.

    Rotated numbers are nearly Gaussian, and clipping them is better than covering the maximum.
    Candidates: the optimal step for the group's rms, and 0.9 of it; the step that reaches max|x|,
    and the geometric mean of both, for heavier tails; 2 max|x|, whose two inner levels are
    +-max|x|, for groups of constant magnitude.
    """
    peak = x.abs().amax(-1)
    wide = peak / ((2**bits - 1) / 2)
    narrow = torch.minimum(GAUSSIAN_STEP[bits] * x.square().mean(-1).sqrt(), wide)
    candidates = torch.stack((2 * peak, wide, (narrow * wide).sqrt(), narrow, 0.9 * narrow))
    candidates = scale_of(_stored(candidates, bits, dtype), bits)
    # One reciprocal, as in the kernels. If it rounds to another level, both levels are equally far.
    steps = x * candidates.reciprocal()[..., None]
    half = 2 ** (bits - 1)  # levels are at +-0.5, +-1.5 .. +-(half - 0.5) steps
    difference = steps.floor().clamp_(-half, half - 1).add_(0.5).sub_(steps)
    error = torch.linalg.vector_norm(difference, dim=-1) * candidates
    # A scale that rounds to 0 makes its error NaN, and argmin would choose it.
    return candidates.gather(0, error.nan_to_num_(torch.inf).argmin(0, keepdim=True))[0]


def lowest(scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """The value of code 0, fp32 [..., 1]; without a zero point the grid is symmetric."""
    low = scale * (-(2**bits - 1) / 2) if zero is None else zero.float()
    return low[..., None]
