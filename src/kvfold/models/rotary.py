"""RoPE as a model computes it: the tables of its own module, kept for all layers."""

from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.base import Rope
from kvfold.ops.common.attention import Tables

LONG_ROPE = ("dynamic", "longrope")  # tables that depend on the longest sequence of a batch


def rope_type(config: Any) -> str:
    """How a model's RoPE is scaled, in transformers' words."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


class RotaryTable:
    """The model's own RoPE tables, computed once per position and shared by all layers."""

    def __init__(self, rotary: nn.Module, rope_type: str) -> None:
        self.rotary, self.rope_type = rotary, rope_type
        self.tables: Tables | None = None

    def __call__(self, x: Tensor, positions: Tensor, stop: int) -> Tables:
        """cos, sin [.., rotary dims] at positions [..] < stop, in x's dtype and device."""
        if self.rope_type in LONG_ROPE:
            return self.rotary(x, positions)
        cos = self.tables[0] if self.tables else None
        if cos is None or cos.shape[0] < stop or (cos.dtype, cos.device) != (x.dtype, x.device):
            length = 1 << (stop - 1).bit_length()
            grid = torch.arange(length, device=x.device)[None]
            self.tables = tuple(table[0] for table in self.rotary(x, grid))
        assert self.tables is not None
        return self.tables[0][positions], self.tables[1][positions]

    def rope(self) -> Rope:
        """The same as data."""
        rotary: Any = self.rotary
        return Rope(
            inv_freq=rotary.inv_freq.float(),
            scaling=rotary.attention_scaling,
            fixed=self.rope_type not in LONG_ROPE,
            tables=self,
        )
