"""The KIVI format (§3.2-3.3): keys quantised per channel of a page, values per token, both with
zero points."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.layout.formats.base import Format, FormatRequest
from kvfold.layout.formats.integers import (
    Integers,
    dequantize,
    pack,
    quantize,
    unpack,
)


@dataclass(frozen=True, kw_only=True)
class Kivi(Integers):
    """Low-bit integer keys, with a scale and a zero point per column of a page. Values are
    `Integers`, per row in sub-groups. The defaults are those of KIVI's experiments."""

    zeros: bool = True

    name = "kivi"
    kernels = frozenset()
    per_channel = True
    plans = False
    wants_rotation = False
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
        """As in Format. The rows of a page are all inside or none."""
        scale, zero = (torch.where(inside[..., :1], x.float(), 0.0) for x in metadata)
        columns = unpack(codes, out.shape[-1], self.bits).mT
        out.copy_(dequantize(columns, scale, zero, self.bits).mT)

    @classmethod
    def for_request(cls, request: FormatRequest) -> Format:
        kind = cls if request.side == "k" else Integers
        return kind(bits=request.bits, zeros=True)

    @classmethod
    def unsupported_reason(cls, side: str, keys: str, num_heads: int) -> str | None:
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
