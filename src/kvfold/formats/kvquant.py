"""KVQuant (§3.1-3.4): codes of calibrated levels, and the numbers furthest out as they are.

Shapes: n numbers of a segment of one row, k of them outliers; L = 2^bits levels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.formats.base import Asked, Format
from kvfold.formats.integers import FP16_MAX, pack, unpack

SHARE = 100  # one number in so many, rounded up, is an outlier


@dataclass(frozen=True, kw_only=True)
class KVQuant(Format):
    """The nearest of `levels`, ascending in -1 .. 1. ranged: with a half range and a middle beside
    every row, of what its outliers leave; else numbers come in that range, since maps have their
    channels' calibrated ranges in them, and those furthest from 0 are outliers."""

    levels: tuple[float, ...]
    ranged: bool

    name = "kvquant"
    widths = (4, 3, 2)
    rotates = False

    @property
    def num_metadata(self) -> int:
        return 2 if self.ranged else 0

    def row_bytes(self, width: int) -> int:
        """Codes, then outliers: where they are, and fp16."""
        return self._code_bytes(width) + self.sparse_bytes(width)

    def sparse_bytes(self, width: int) -> int:
        return num_outliers(width) * (_place(width).itemsize + 2)

    def _code_bytes(self, width: int) -> int:
        return pack(torch.zeros(width, dtype=torch.uint8), self.bits).numel()

    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = x.float()
        where, half, middle = split(x, self.ranged)
        outliers = x.gather(-1, where).clamp(-FP16_MAX, FP16_MAX).half()
        inliers = (x - middle[..., None].float()) / half[..., None].float()
        codes = torch.bucketize(inliers.nan_to_num_(0.0), self._borders(x.device))
        parts = where.to(_place(x.shape[-1])), outliers
        found = [pack(codes.to(torch.uint8), self.bits), *(y.view(torch.uint8) for y in parts)]
        return torch.cat(found, -1), (half, middle) if self.ranged else ()

    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        n = out.shape[-1]
        k, place = num_outliers(n), _place(n)
        first, last = self._code_bytes(n), self._code_bytes(n) + k * place.itemsize
        levels = torch.tensor(self.levels, device=codes.device)
        found = levels[unpack(codes[..., :first], n, self.bits).long()]
        if self.ranged:
            half, middle = (torch.where(inside, x.float(), 0.0)[..., None] for x in metadata)
            found.mul_(half).add_(middle)
        where = words(codes[..., first:last], place).long()
        outliers = words(codes[..., last:], torch.float16).float()
        found.scatter_(-1, where.clamp(0, n - 1), outliers)
        out.copy_(found.masked_fill_(~inside[..., None], 0.0))

    def _borders(self, device: torch.device) -> Tensor:
        levels = torch.tensor(self.levels, device=device)
        return (levels[1:] + levels[:-1]) / 2

    @classmethod
    def refusal(cls, side: str, keys: str, num_heads: int) -> str | None:
        if side != "kv":
            return None
        return (
            "format='kvquant' has ranges of keys by channel and of values by token, but this model "
            "stores one latent for both (recipe small): leave format out, or use recipe kvquant-z"
        )

    @classmethod
    def of(cls, asked: Asked) -> Format:
        levels = next((x for x in asked.codebooks or () if len(x) == 2**asked.bits), None)
        if asked.zeros:
            raise ValueError("format='kvquant' stores zeros where it needs them: leave zeros out")
        if levels is None:
            raise ValueError(
                "format='kvquant' needs levels that were calibrated on the model: compress it with"
                " recipe kvquant (keep 1) or kvquant-z first, or take another format"
            )
        return cls(bits=asked.bits, levels=levels, ranged=asked.side == "v")


def words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes uint8 [.., n] wherever they lie, read as another dtype."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def num_outliers(width: int) -> int:
    return -(-width // SHARE)


def split(x: Tensor, ranged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Columns int64 [.., k] of the outliers of x fp32 [.., n], and half range and middle fp16 [..]
    of the others: those furthest from the row's median; or from 0, and 1 and 0."""
    k = num_outliers(x.shape[-1])
    if not ranged:
        one = torch.ones_like(x[..., 0], dtype=torch.half)
        return x.abs().topk(k, -1).indices, one, torch.zeros_like(one)
    where = (x - x.median(-1, keepdim=True).values).abs().topk(k, -1).indices
    low, high = (x.scatter(-1, where, fill) for fill in (torch.inf, -torch.inf))
    low, high = low.amin(-1), high.amax(-1)
    half, middle = ((y / 2).clamp(-FP16_MAX, FP16_MAX).half() for y in (high - low, high + low))
    return where, half, middle


def _place(width: int) -> torch.dtype:
    return torch.uint8 if width <= 256 else torch.int16
