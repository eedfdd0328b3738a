"""RoPE as a model computes it: the tables of its own rotary module, shared by all layers."""

from typing import Any

import torch
from torch import Tensor

from kvfold.ops.common.attention import Tables

LONG_ROPE = ("dynamic", "longrope")  # tables that depend on the longest sequence of a batch


def position_limit(config: Any) -> int | None:
    """Maximum position of a causal LM; None if its config states none, as with ALiBi."""
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    return limit


def rope_type(config: Any) -> str:
    """The rope_type of a model's config."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


def fixed_rope(config: Any) -> bool:
    """Whether RoPE rotates a position by the same angles in sequences of any length."""
    return rope_type(config) not in LONG_ROPE


class RotaryTable:
    """A model's RoPE tables, computed once per position and shared by all layers. Implements `Rope`
    of `attention.base`."""

    def __init__(self, rotary: Any, rope_type: str) -> None:
        self.rotary, self.fixed = rotary, rope_type not in LONG_ROPE
        self.grid: Tables | None = None

    @property
    def inv_freq(self) -> Tensor:
        inv_freq: Tensor = self.rotary.inv_freq
        return inv_freq.float()

    @property
    def scaling(self) -> float:
        return float(self.rotary.attention_scaling)

    def tables(self, like: Tensor, positions: Tensor, stop: int | None) -> Tables:
        """cos, sin [.., rotary dims] at positions [..] < stop (or any positions [B, T] if stop is
        None), with the dtype and device of `like`."""
        if stop is None or not self.fixed:
            tables: Tables = self.rotary(like, positions)
            return tables
        kind = like.dtype, like.device
        grid = self.grid
        if grid is None or len(grid[0]) < stop or (grid[0].dtype, grid[0].device) != kind:
            length = 1 << (stop - 1).bit_length()
            cos, sin = self.rotary(like, torch.arange(length, device=like.device)[None])
            self.grid = grid = cos[0], sin[0]
        return grid[0][positions], grid[1][positions]
