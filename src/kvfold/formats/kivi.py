"""KIVI (§3.2-3.3): keys per channel of a page, values per token, both with zeros."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.formats.base import Asked, Format
from kvfold.formats.integers import Integers, dequantize, pack, quantize, unpack


@dataclass(frozen=True, kw_only=True)
class Kivi(Integers):
    """Few-bit integers of keys, with a scale and a zero for every column of a page. Values are
    integers by row, in sub-groups; the defaults are those of KIVI's own experiments."""

    zeros: bool = True

    name = "kivi"
    kernels = frozenset()
    per_channel = True
    plans = False
    rotates = False
    sub_group = 32
    residual = 128

    def encode(self, x: Tensor, page: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        columns = x.unflatten(0, (-1, page)).movedim(1, -1)
        codes, scale, zero = quantize(columns, self.bits, zeros=True)
        assert zero is not None
        return pack(codes.movedim(-1, 1).flatten(0, 1), self.bits), (scale, zero)

    def decode(
        self, codes: Tensor, metadata: tuple[Tensor, ...], inside: Tensor, out: Tensor
    ) -> None:
        """Pages that hold a row hold all."""
        scale, zero = (torch.where(inside[..., :1], x.float(), 0.0) for x in metadata)
        columns = unpack(codes, out.shape[-1], self.bits).mT
        out.copy_(dequantize(columns, scale, zero, self.bits).mT)

    @classmethod
    def of(cls, asked: Asked) -> Format:
        kind = cls if asked.side == "k" else Integers
        return kind(bits=asked.bits, zeros=True)

    @classmethod
    def refusal(cls, side: str, keys: str, num_heads: int) -> str | None:
        if side == "kv":
            what = "one latent for keys and values (recipe small)"
        elif side == "k" and keys == "pre_rope" and num_heads > 1:
            what = "key latents of several heads before RoPE (recipes lorc, palu-g, palu-j)"
        else:
            return None
        return (
            f"format='kivi' needs keys of their own, by head, but this model stores {what}: leave "
            "format out, or compress with a recipe that keeps keys per head, such as fast"
        )
