"""The GEAR format (§3): quantised numbers, fp16 outliers, and a low-rank approximation of the
quantisation error. Keys are quantised per channel of a page, values per token.

Shapes: M pages of P rows, g groups, n numbers of a row; r rank; k largest and k smallest outliers
of a vector that shares a scale (`QuantizedVectors`): a channel of a page of keys, or a row of
values.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.layout.formats.base import Format, FormatRequest
from kvfold.layout.formats.integers import dequantize, pack, quantize, unpack
from kvfold.layout.formats.kvquant import view_bytes

SHARE = 0.02  # share of numbers that are outliers: half are the largest, half the smallest
ROUNDS = 3  # steps of power iteration
SMALL = 64  # rows of a page during generation, as published
MOST = 256  # largest vector, so that the index of an outlier fits a byte
OUTLIER = 3  # bytes of an outlier: its index and fp16


class QuantizedVectors(NamedTuple):
    """The stored form of vectors [.., n] without the low-rank part: codes uint8 [.., n]; scale and
    zero fp16 [..]; outliers fp16 [.., 2k], the largest first, and their indices `where` uint8
    [.., 2k]."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    where: Tensor
    outliers: Tensor

    @classmethod
    def of(cls, x: Tensor, bits: int) -> "QuantizedVectors":
        """Quantise x fp32 [.., n]. In the codes, outliers count as the mean of their vector."""
        k = num_outliers(x.shape[-1])
        where = torch.cat([x.topk(k, -1, largest=end).indices for end in (True, False)], -1)
        outliers = x.gather(-1, where).clamp(-65504, 65504).half()
        mean = x.mean(-1, keepdim=True).expand_as(outliers)
        codes, scale, zero = quantize(x.scatter(-1, where, mean), bits, zeros=True)
        assert zero is not None
        return cls(codes, scale, zero, where.to(torch.uint8), outliers)

    def numbers(self, bits: int, more: Tensor | None = None) -> Tensor:
        """Dequantise to fp32 [.., n]. more: is added to all numbers but outliers."""
        x = dequantize(self.codes, self.scale.float(), self.zero.float(), bits)
        if more is not None:
            x += more
        where = self.where.long().clamp(max=x.shape[-1] - 1)
        return x.scatter_(-1, where, self.outliers.float())


@dataclass(frozen=True, kw_only=True)
class Gear(Format):
    """The format of one segment. by_channel: keys, with a scale, a zero point and outliers per
    column of a page; otherwise values, which store these per row. The low-rank part has r numbers
    per row and per column of a page."""

    by_channel: bool
    page: int
    rank: int

    name = "gear"
    per_channel = True
    widths = (4, 3, 2)
    wants_rotation = False
    rows = SMALL
    residual = SMALL
    sub_group = 64

    @property
    def num_metadata(self) -> int:
        return self.rank + (2 + 3 * num_outliers(self.page) if self.by_channel else 0)

    def row_bytes(self, width: int) -> int:
        return self._code_bytes(width) + self.sparse_bytes(width)

    def sparse_bytes(self, width: int) -> int:
        """The low-rank numbers of the row; for values also a scale, a zero point and outliers."""
        per_vector = 0 if self.by_channel else 4 + 2 * num_outliers(width) * OUTLIER
        return 2 * self.rank + per_vector

    def _code_bytes(self, width: int) -> int:
        return pack(torch.zeros(width, dtype=torch.uint8), self.bits).numel()

    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows = x.float().unflatten(0, (-1, page)).transpose(1, 2)  # [M, g, P, n]
        floats = rows.mT if self.by_channel else rows
        vectors = QuantizedVectors.of(floats, self.bits)
        error = floats - vectors.numbers(self.bits)
        error = error.mT if self.by_channel else error
        down, up = low_rank(error, self.rank)
        codes = vectors.codes.mT if self.by_channel else vectors.codes
        parts = [pack(codes, self.bits), _bytes(down)]
        metadata = list(up.unbind(-1))
        if self.by_channel:
            metadata += [vectors.scale, vectors.zero, *vectors.outliers.unbind(-1)]
            metadata += _bytes(vectors.where).view(torch.half).unbind(-1)
        else:
            parts += [_bytes(torch.stack((vectors.scale, vectors.zero), -1))]
            parts += [_bytes(vectors.where), _bytes(vectors.outliers)]
        return torch.cat(parts, -1).transpose(1, 2).flatten(0, 1), tuple(metadata)

    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        """As in Format. The rows of a page are all inside or none."""
        n, r, start = out.shape[-1], self.rank, self._code_bytes(out.shape[-1])
        numbers = unpack(codes[..., :start], n, self.bits)
        down = view_bytes(codes[..., start : start + 2 * r], torch.half).float()
        up = torch.stack(metadata[:r], -1)
        low_rank_part = down @ up.float().mT
        if self.by_channel:
            k = num_outliers(self.page)
            scale, zero, *rest = metadata[r:]
            where = view_bytes(torch.stack(rest[2 * k :], -1), torch.uint8)
            vectors = QuantizedVectors(
                numbers.mT, scale, zero, where, torch.stack(rest[: 2 * k], -1)
            )
            x = vectors.numbers(self.bits, low_rank_part.mT).mT
        else:
            k, sparse = num_outliers(n), codes[..., start + 2 * r :]
            scale, zero = view_bytes(sparse[..., :4], torch.half).unbind(-1)
            where = view_bytes(sparse[..., 4 : 4 + 2 * k], torch.uint8)
            vectors = QuantizedVectors(
                numbers, scale, zero, where, view_bytes(sparse[..., 4 + 2 * k :], torch.half)
            )
            x = vectors.numbers(self.bits, low_rank_part)
        out.copy_(x.masked_fill_(~inside[..., None], 0.0))

    def segment_widths(self, width: int, sub_group: int | None) -> list[int]:
        """Values are divided although they have no metadata numbers: a segment is one vector with a
        scale."""
        limit = width if self.by_channel else min(sub_group or MOST, MOST)
        count = -(-width // limit) if width else 1
        return [width * (i + 1) // count - width * i // count for i in range(count)]

    @classmethod
    def for_request(cls, request: FormatRequest) -> Format:
        if request.zeros:
            raise ValueError("format='gear' stores zeros in any case: leave zeros out")
        if request.page > MOST:
            raise ValueError(
                f"format='gear' has pages of at most {MOST} rows, got {request.page}: take smaller "
                "ones"
            )
        rank = 2 if request.page <= SMALL else 4
        return cls(bits=request.bits, by_channel=request.side == "k", page=request.page, rank=rank)

    @classmethod
    def unsupported_reason(cls, side: str, keys: str, num_heads: int) -> str | None:
        if side != "kv":
            return None
        return (
            "format='gear' packs keys by channel and values by token, but this model stores one "
            "latent for both (recipe small): leave format out, or use another recipe, such as zdc"
        )


def num_outliers(length: int) -> int:
    """Number of the largest outliers of a vector (and of the smallest), at least one."""
    return max(1, round(length * SHARE / 2))


def low_rank(left: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Approximate the error left fp32 [.., P, n] by down up^T, with down fp16 [.., P, rank] and up
    fp16 [.., n, rank]: nearly the best of this rank (ROUNDS of power iteration), zeros beyond the
    possible rank."""
    num_rows, n = left.shape[-2:]
    width = min(rank, num_rows, n)
    up = _start(n, width, left.device).expand(*left.shape[:-2], -1, -1)
    for i in range(ROUNDS):
        last = i == ROUNDS - 1
        down = left @ (torch.linalg.qr(up).Q if last else up)
        down = torch.linalg.qr(down).Q if last else down
        up = left.mT @ down
    padding = (0, rank - width)
    factors = (torch.nn.functional.pad(x, padding) for x in (down, up.clamp(-65504, 65504)))
    a, b = (x.half() for x in factors)
    return a, b


@lru_cache
def _start(n: int, rank: int, device: torch.device) -> Tensor:
    """Random start of the power iteration; the same for all pages, so that bytes depend on rows
    alone."""
    return torch.rand(n, rank, generator=torch.Generator().manual_seed(0)).to(device)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
