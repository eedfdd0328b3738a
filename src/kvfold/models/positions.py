"""Positions of tokens, stored in a transformers cache beside each token's numbers.

A cache crops, reorders, drops and pads its tokens by itself. Keys that are reconstructed before
RoPE are then still rotated at the positions that the model was told. Shapes: B batch, S tokens.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import StaticLayer

from kvfold.utils.errors import SettingError

DIGITS = 3  # numbers that say a token's position in a cache, from 0 to 255: exact in any dtype
QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


def digits_of(positions: Tensor) -> Tensor:
    """Positions [..] below 2^24 as numbers of 8 bits [.., DIGITS]."""
    return torch.stack((positions >> 16, positions >> 8 & 255, positions & 255), -1)


def positions_of(digits: Tensor) -> Tensor:
    """The inverse."""
    high, middle, low = digits.long().unbind(-1)
    return (high << 16) + (middle << 8) + low


def entries_of(rows: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a cache stores for the keys and for the values of tokens [B, S, R]: their numbers, and
    their positions [B, S] if they have any, each as of one head."""
    if positions is None:
        beside = rows.new_empty(*rows.shape[:2], 0)
    else:
        beside = digits_of(positions).to(rows.dtype)
    return rows[:, None], beside[:, None]


def check_exact(cache: Any, index: int, way_out: str) -> None:
    """Raises SettingError for a cache whose layer `index` rounds numbers. way_out: for users."""
    if index < len(cache.layers) and isinstance(cache.layers[index], QUANTIZED):
        raise SettingError(
            "a quantized cache would round the positions that keys before RoPE need beside every"
            f" token: take another cache, or {way_out}"
        )


def fit_static(cache: Any, index: int, key: Tensor, value: Tensor) -> None:
    """Allocate layer `index` of a static cache, which has no tokens yet, for keys and values as
    they are stored: transformers takes both to have as many heads, and may have allocated the heads
    of the model's config before it saw the first tokens."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not isinstance(layer, StaticLayer):
        return
    pairs = ((layer.keys, key), (layer.values, value))
    if layer.is_initialized and all(x is None or x.shape[1::2] == y.shape[1::2] for x, y in pairs):
        return
    layer.lazy_initialization(key, value)
    if value.shape[1] != key.shape[1]:
        shape = (*value.shape[:2], layer.max_cache_len, value.shape[3])
        layer.values = value.new_zeros(shape)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(layer.values)
