"""The format of numbers that are not quantised, in the dtype of the rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.layout.formats.base import INTS, Format


@dataclass(frozen=True, kw_only=True)
class Unquantized(Format):
    """Floats of `itemsize` bytes. They count as 16 bits, whatever their size."""

    bits: int = 16
    itemsize: int

    name = "unquantized"
    kernels = frozenset({"store", "decode", "latent_decode"})

    @property
    def num_metadata(self) -> int:
        return 0

    def row_bytes(self, width: int) -> int:
        return width * self.itemsize

    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x.contiguous().view(torch.uint8), ()

    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        """As in Format, bit for bit."""
        # Masks bits, because stale bytes may be NaN; mask and copy are one pass.
        ints = INTS[self.itemsize]
        torch.bitwise_and(codes.view(ints), -inside.to(ints)[..., None], out=out.view(ints))
