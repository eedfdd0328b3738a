"""The KVQuant format (§3.1-3.4): codes of calibrated non-uniform levels, and outliers in fp16.

Shapes: n numbers of a segment of one row, k of them outliers; L = 2^bits levels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.layout.formats.base import Format, FormatRequest
from kvfold.layout.formats.integers import FP16_MAX, pack, unpack

SHARE = 100  # one number in 100, rounded up, is an outlier


@dataclass(frozen=True, kw_only=True)
class KVQuant(Format):
    """Round each number to the nearest of `levels`, ascending in -1 .. 1.

    ranged: each row stores half the range and the middle of its inliers. Without it, numbers arrive
        scaled to -1 .. 1, because the key projections contain the calibrated ranges of channels,
        and the numbers furthest from 0 are outliers.
    """

    levels: tuple[float, ...]
    ranged: bool

    name = "kvquant"
    widths = (4, 3, 2)
    wants_rotation = False

    @property
    def num_metadata(self) -> int:
        return 2 if self.ranged else 0

    def row_bytes(self, width: int) -> int:
        """Bytes of a row: codes, then outliers (index and fp16)."""
        return self._code_bytes(width) + self.sparse_bytes(width)

    def sparse_bytes(self, width: int) -> int:
        return num_outliers(width) * (_index_dtype(width).itemsize + 2)

    def _code_bytes(self, width: int) -> int:
        return pack(torch.zeros(width, dtype=torch.uint8), self.bits).numel()

    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = x.float()
        indices, half, middle = split_outliers(x, self.ranged)
        outliers = x.gather(-1, indices).clamp(-FP16_MAX, FP16_MAX).half()
        inliers = (x - middle[..., None].float()) / half[..., None].float()
        codes = torch.bucketize(inliers.nan_to_num_(0.0), self._borders(x.device))
        sparse = indices.to(_index_dtype(x.shape[-1])), outliers
        parts = [
            pack(codes.to(torch.uint8), self.bits),
            *(part.view(torch.uint8) for part in sparse),
        ]
        return torch.cat(parts, -1), (half, middle) if self.ranged else ()

    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        n = out.shape[-1]
        k, index_dtype = num_outliers(n), _index_dtype(n)
        first, last = self._code_bytes(n), self._code_bytes(n) + k * index_dtype.itemsize
        levels = torch.tensor(self.levels, device=codes.device)
        x = levels[unpack(codes[..., :first], n, self.bits).long()]
        if self.ranged:
            half, middle = (torch.where(inside, y.float(), 0.0)[..., None] for y in metadata)
            x.mul_(half).add_(middle)
        indices = view_bytes(codes[..., first:last], index_dtype).long()
        outliers = view_bytes(codes[..., last:], torch.float16).float()
        x.scatter_(-1, indices.clamp(0, n - 1), outliers)
        out.copy_(x.masked_fill_(~inside[..., None], 0.0))

    def _borders(self, device: torch.device) -> Tensor:
        levels = torch.tensor(self.levels, device=device)
        return (levels[1:] + levels[:-1]) / 2

    @classmethod
    def unsupported_reason(cls, side: str, keys: str, num_heads: int) -> str | None:
        if side != "kv":
            return None
        return (
            "format='kvquant' has ranges of keys by channel and of values by token, but this model "
            "stores one latent for both (recipe small): leave format out, or use recipe kvquant-z"
        )

    @classmethod
    def for_request(cls, request: FormatRequest) -> Format:
        levels = next((x for x in request.codebooks or () if len(x) == 2**request.bits), None)
        if request.zeros:
            raise ValueError("format='kvquant' stores zeros where it needs them: leave zeros out")
        if levels is None:
            raise ValueError(
                "format='kvquant' needs levels that were calibrated on the model: compress it with"
                " recipe kvquant (keep 1) or kvquant-z first, or take another format"
            )
        return cls(bits=request.bits, levels=levels, ranged=request.side == "v")


def view_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes uint8 [.., n], of any strides, as another dtype (a copy)."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def num_outliers(width: int) -> int:
    """Number of outliers of a row."""
    return -(-width // SHARE)


def split_outliers(x: Tensor, ranged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Find the outliers of x fp32 [.., n]: their columns int64 [.., k], and half the range and the
    middle of the other numbers, fp16 [..].

    Outliers are the numbers furthest from the row's median. Without `ranged` they are those
    furthest from 0, and the range is fixed (1 and 0).
    """
    k = num_outliers(x.shape[-1])
    if not ranged:
        one = torch.ones_like(x[..., 0], dtype=torch.half)
        return x.abs().topk(k, -1).indices, one, torch.zeros_like(one)
    where = (x - x.median(-1, keepdim=True).values).abs().topk(k, -1).indices
    low, high = (x.scatter(-1, where, fill) for fill in (torch.inf, -torch.inf))
    low, high = low.amin(-1), high.amax(-1)
    half, middle = ((y / 2).clamp(-FP16_MAX, FP16_MAX).half() for y in (high - low, high + low))
    return where, half, middle


def _index_dtype(width: int) -> torch.dtype:
    """The dtype of an outlier's index."""
    return torch.uint8 if width <= 256 else torch.int16
