"""A number format: the bytes that a segment's numbers become, and the numbers that come back.

Shapes: n numbers of a segment of one row; P rows a page; M pages, N = M * P rows; g groups; ... any
leading dimensions. *Metadata* are the numbers beside the codes, such as a scale and a zero: those
of a row, or where a format is *per channel*, of each of the n columns of a page.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.formats import Codebooks

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a latent's numbers are to be stored in. side: k, v or kv; page: rows; zeros: beside
    scales; planned: a checkpoint's bits; codebooks: the latent's."""

    side: str
    bits: int
    page: int
    zeros: bool = False
    planned: bool = False
    codebooks: Codebooks | None = None


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """How the numbers of a segment are stored.

    bits: of a number, as it counts as stored; metadata: the dtype of its scales and zeros.
    kernels: folders of `ops` whose kernels read it; in the others it is left to plain PyTorch.

    Of all numbers of a cache in this format: widths: bits that it has; plans: whether a checkpoint
    may plan bits in it, so that none need be given; rotates: whether numbers that share a scale are
    turned first, so that they are alike; sub_group: most of them, rows: of a page, and residual:
    rows that wait unquantised, where nothing else is asked for (None: a whole latent, as many as
    ever, and none).
    """

    bits: int
    metadata: torch.dtype = torch.float16

    name: ClassVar[str]
    kernels: ClassVar[frozenset[str]] = frozenset()
    per_channel: ClassVar[bool] = False
    widths: ClassVar[tuple[int, ...]] = ()
    plans: ClassVar[bool] = False
    rotates: ClassVar[bool] = True
    rows: ClassVar[int | None] = None
    sub_group: ClassVar[int | None] = None
    residual: ClassVar[int | None] = None

    @property
    def num_metadata(self) -> int:
        """Metadata numbers of a row, or per channel of a column of a page."""
        return 1

    @abstractmethod
    def row_bytes(self, width: int) -> int:
        """Bytes of one row's codes of `width` numbers."""

    def sparse_bytes(self, width: int) -> int:
        """Bytes of a row's codes, of those of `row_bytes`, that are beside the `bits` of each
        number, such as outliers."""
        return 0

    @abstractmethod
    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x float [N, g, n] -> codes uint8 [N, g, row_bytes(n)] and metadata, each [N, g]; per
        channel, for which N rows are whole pages in order, each [M, g, n]."""

    @abstractmethod
    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        """Fill out [..., P, n], of any float dtype and strides.

        codes uint8 [..., P, row_bytes(n)]; metadata each [..., P], per channel [..., n]. Rows that
        are not inside (bool [..., P]; per channel a page's all or none) become 0, whatever their
        bytes are.
        """

    @classmethod
    def of(cls, asked: Asked) -> "Format":
        """The format of a latent's numbers. Raises ValueError for what it cannot store, and for
        codebooks that it needs and are not there."""
        if asked.zeros:
            raise ValueError(f"format={cls.name!r} stores no zeros: leave zeros out")
        return cls(bits=asked.bits)

    @classmethod
    def refusal(cls, side: str, keys: str, num_heads: int) -> str | None:
        """Why a latent cannot be stored so, if it cannot: its side, the kind of its layer's keys,
        how many heads it serves."""
        return None

    def cut(self, width: int, sub_group: int | None) -> list[int]:
        """Widths of the segments of `width` numbers: nearly equal, at most `sub_group`, since the
        numbers of a segment share their metadata."""
        shared = self.num_metadata > 0 and not self.per_channel
        count = -(-width // sub_group) if sub_group and shared else 1
        return [width * (i + 1) // count - width * i // count for i in range(count)]
