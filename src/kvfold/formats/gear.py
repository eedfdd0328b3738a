"""GEAR (§3): few bits, the largest and the smallest numbers as they are, and a low-rank part of
what that leaves. Keys by channel of a page, values by token.

Shapes: M pages of P rows, g groups, n numbers of a row; r rank, k outliers at either end of a line,
which is a channel of a page of keys or a row of values.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.formats.base import Asked, Format
from kvfold.formats.integers import dequantize, pack, quantize, unpack
from kvfold.formats.kvquant import words

SHARE = 0.02  # of numbers that are outliers, half of them at either end
ROUNDS = 3  # of power iteration
SMALL = 64  # rows of the pages that are packed as published while text is generated
MOST = 256  # numbers of a line, whose places fit a byte
OUTLIER = 3  # bytes: its place and fp16


class Line(NamedTuple):
    """What is stored of lines of n numbers [.., n]: codes uint8 [.., n]; scale, zero fp16 [..];
    where uint8 [.., 2k] and outliers fp16 [.., 2k], the largest first."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    where: Tensor
    outliers: Tensor

    @classmethod
    def of(cls, x: Tensor, bits: int) -> "Line":
        """x fp32 [.., n]; outliers count as the mean of their line."""
        k = num_outliers(x.shape[-1])
        where = torch.cat([x.topk(k, -1, largest=end).indices for end in (True, False)], -1)
        outliers = x.gather(-1, where).clamp(-65504, 65504).half()
        mean = x.mean(-1, keepdim=True).expand_as(outliers)
        codes, scale, zero = quantize(x.scatter(-1, where, mean), bits, zeros=True)
        assert zero is not None
        return cls(codes, scale, zero, where.to(torch.uint8), outliers)

    def numbers(self, bits: int, more: Tensor | None = None) -> Tensor:
        """fp32 [.., n]; more: is added to all but outliers."""
        found = dequantize(self.codes, self.scale.float(), self.zero.float(), bits)
        if more is not None:
            found += more
        where = self.where.long().clamp(max=found.shape[-1] - 1)
        return found.scatter_(-1, where, self.outliers.float())


@dataclass(frozen=True, kw_only=True)
class Gear(Format):
    """by_channel: keys, with a scale, a zero and outliers for every column of a page; else values,
    with those in the rows. Every row has r numbers, and every column of a page, of the low-rank
    part."""

    by_channel: bool
    page: int
    rank: int

    name = "gear"
    per_channel = True
    widths = (4, 3, 2)
    rotates = False
    rows = SMALL
    residual = SMALL
    sub_group = 64

    @property
    def num_metadata(self) -> int:
        return self.rank + (2 + 3 * num_outliers(self.page) if self.by_channel else 0)

    def row_bytes(self, width: int) -> int:
        return self._code_bytes(width) + self.sparse_bytes(width)

    def sparse_bytes(self, width: int) -> int:
        """The row's part of the low rank; of values a scale, a zero and outliers too."""
        line = 0 if self.by_channel else 4 + 2 * num_outliers(width) * OUTLIER
        return 2 * self.rank + line

    def _code_bytes(self, width: int) -> int:
        return pack(torch.zeros(width, dtype=torch.uint8), self.bits).numel()

    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows = x.float().unflatten(0, (-1, page)).transpose(1, 2)  # [M, g, P, n]
        lines = rows.mT if self.by_channel else rows
        line = Line.of(lines, self.bits)
        left = lines - line.numbers(self.bits)
        left = left.mT if self.by_channel else left
        down, up = low_rank(left, self.rank)
        codes = line.codes.mT if self.by_channel else line.codes
        parts = [pack(codes, self.bits), _bytes(down)]
        metadata = list(up.unbind(-1))
        if self.by_channel:
            metadata += [line.scale, line.zero, *line.outliers.unbind(-1)]
            metadata += _bytes(line.where).view(torch.half).unbind(-1)
        else:
            parts += [_bytes(torch.stack((line.scale, line.zero), -1))]
            parts += [_bytes(line.where), _bytes(line.outliers)]
        return torch.cat(parts, -1).transpose(1, 2).flatten(0, 1), tuple(metadata)

    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        """Pages that hold a row hold all."""
        n, r, start = out.shape[-1], self.rank, self._code_bytes(out.shape[-1])
        numbers = unpack(codes[..., :start], n, self.bits)
        down = words(codes[..., start : start + 2 * r], torch.half).float()
        up = torch.stack(metadata[:r], -1)
        more = down @ up.float().mT
        if self.by_channel:
            k = num_outliers(self.page)
            scale, zero, *others = metadata[r:]
            where = words(torch.stack(others[2 * k :], -1), torch.uint8)
            line = Line(numbers.mT, scale, zero, where, torch.stack(others[: 2 * k], -1))
            found = line.numbers(self.bits, more.mT).mT
        else:
            k, rest = num_outliers(n), codes[..., start + 2 * r :]
            scale, zero = words(rest[..., :4], torch.half).unbind(-1)
            where = words(rest[..., 4 : 4 + 2 * k], torch.uint8)
            line = Line(numbers, scale, zero, where, words(rest[..., 4 + 2 * k :], torch.half))
            found = line.numbers(self.bits, more)
        out.copy_(found.masked_fill_(~inside[..., None], 0.0))

    def cut(self, width: int, sub_group: int | None) -> list[int]:
        """Values as those whose numbers share metadata do: they share a line."""
        most = width if self.by_channel else min(sub_group or MOST, MOST)
        count = -(-width // most) if width else 1
        return [width * (i + 1) // count - width * i // count for i in range(count)]

    @classmethod
    def of(cls, asked: Asked) -> Format:
        if asked.zeros:
            raise ValueError("format='gear' stores zeros in any case: leave zeros out")
        if asked.page > MOST:
            raise ValueError(
                f"format='gear' has pages of at most {MOST} rows, got {asked.page}: take smaller "
                "ones"
            )
        rank = 2 if asked.page <= SMALL else 4
        return cls(bits=asked.bits, by_channel=asked.side == "k", page=asked.page, rank=rank)

    @classmethod
    def refusal(cls, side: str, keys: str, num_heads: int) -> str | None:
        if side != "kv":
            return None
        return (
            "format='gear' packs keys by channel and values by token, but this model stores one "
            "latent for both (recipe small): leave format out, or use another recipe, such as zdc"
        )


def num_outliers(length: int) -> int:
    """At either end of a line, at least one."""
    return max(1, round(length * SHARE / 2))


def low_rank(left: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """down fp16 [.., P, rank] and up fp16 [.., n, rank] of the best down up^T for left fp32
    [.., P, n], nearly: ROUNDS of power iteration. Zeros beyond the rank that there can be."""
    num_rows, n = left.shape[-2:]
    width = min(rank, num_rows, n)
    up = _start(n, width, left.device).expand(*left.shape[:-2], -1, -1)
    for i in range(ROUNDS):
        last = i == ROUNDS - 1
        down = left @ (torch.linalg.qr(up).Q if last else up)
        down = torch.linalg.qr(down).Q if last else down
        up = left.mT @ down
    more = (0, rank - width)
    found = (torch.nn.functional.pad(x, more) for x in (down, up.clamp(-65504, 65504)))
    a, b = (x.half() for x in found)
    return a, b


@lru_cache
def _start(n: int, rank: int, device: torch.device) -> Tensor:
    """The same for all pages, so that bytes depend on rows alone."""
    return torch.rand(n, rank, generator=torch.Generator().manual_seed(0)).to(device)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
