"""The interface of a number format: it encodes the numbers of a segment as bytes and decodes them.

Shapes: n numbers of a segment of one row; P rows a page; M pages, N = M * P rows; g groups; ... any
leading dimensions. *Metadata* are the numbers stored in addition to the codes, such as a scale and
a zero point: per row, or in a *per-channel* format per column (n) of a page.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.layout.formats import Codebooks

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, kw_only=True)
class FormatRequest:
    """What a format must store: one tier of a latent.

    side: k, v or kv
    bits: of a number
    page: rows of a page
    zeros: store zero points
    planned: the bits come from the checkpoint's plan
    codebooks: calibrated levels of the latent
    """

    side: str
    bits: int
    page: int
    zeros: bool = False
    planned: bool = False
    codebooks: Codebooks | None = None


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """How the numbers of a segment are stored.

    bits: nominal bits of a number.
    metadata: dtype of scales and zero points.
    kernels: folders of `ops` whose kernels read this format; the other operations use plain
        PyTorch.

    Class attributes, for a cache in this format:

    per_channel: scales belong to columns of a page instead of rows.
    widths: bit widths that it supports.
    plans: whether a checkpoint may plan bits for it, so that `bits` need not be set.
    wants_rotation: whether numbers that share a scale are rotated first (Hadamard), to spread
        outliers.
    rows, sub_group, residual: defaults for the rows of a page, the most numbers that share a scale,
        and the rows of the residual block (None: the usual page, a whole latent, no residual).
    """

    bits: int
    metadata: torch.dtype = torch.float16

    name: ClassVar[str]
    kernels: ClassVar[frozenset[str]] = frozenset()
    per_channel: ClassVar[bool] = False
    widths: ClassVar[tuple[int, ...]] = ()
    plans: ClassVar[bool] = False
    wants_rotation: ClassVar[bool] = True
    rows: ClassVar[int | None] = None
    sub_group: ClassVar[int | None] = None
    residual: ClassVar[int | None] = None

    @property
    def num_metadata(self) -> int:
        """Metadata numbers per row, or per column of a page in a per-channel format."""
        return 1

    @abstractmethod
    def row_bytes(self, width: int) -> int:
        """Bytes of the codes of one row of `width` numbers."""

    def sparse_bytes(self, width: int) -> int:
        """The part of `row_bytes` that is not `bits` per number, such as outliers."""
        return 0

    @abstractmethod
    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Quantise x float [N, g, n] to codes uint8 [N, g, row_bytes(n)] and metadata, each [N, g].
        In a per-channel format the N rows are whole pages in order, and metadata are each
        [M, g, n]."""

    @abstractmethod
    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        """Decode to out [..., P, n], of any float dtype and strides.

        codes uint8 [..., P, row_bytes(n)]; metadata each [..., P], per channel [..., n]; inside
        bool [..., P] (per channel all or none of a page): other rows become 0, whatever their
        bytes.
        """

    @classmethod
    def for_request(cls, request: FormatRequest) -> "Format":
        """The format for one tier of a latent. Raises ValueError for what it cannot store, and for
        missing codebooks."""
        if request.zeros:
            raise ValueError(f"format={cls.name!r} stores no zeros: leave zeros out")
        return cls(bits=request.bits)

    @classmethod
    def unsupported_reason(cls, side: str, keys: str, num_heads: int) -> str | None:
        """Why a latent cannot be stored in this format, or None. side: of the latent; keys: the
        kind of its layer's keys; num_heads: heads that share the latent."""
        return None

    def segment_widths(self, width: int, sub_group: int | None) -> list[int]:
        """Divide `width` numbers into segments, whose numbers share metadata: nearly equal widths
        of at most `sub_group`."""
        shared = self.num_metadata > 0 and not self.per_channel
        count = -(-width // sub_group) if sub_group and shared else 1
        return [width * (i + 1) // count - width * i // count for i in range(count)]
