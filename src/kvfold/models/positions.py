"""Store the positions of tokens in a transformers cache, next to each token's numbers.

A cache crops, reorders, drops and pads its tokens by itself. Keys that are reconstructed before
RoPE are then still rotated at their tokens' positions. Shapes: B batch, S tokens, R numbers of an
entry.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import StaticLayer

from kvfold.utils.errors import SettingError

DIGITS = 3  # base-256 digits of a position; 0 to 255 is exact in any dtype
QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


def digits_of(positions: Tensor) -> Tensor:
    """Split positions [..] below 2^24 into base-256 digits [.., DIGITS]."""
    return torch.stack((positions >> 16, positions >> 8 & 255, positions & 255), -1)


def positions_of(digits: Tensor) -> Tensor:
    """Inverse of `digits_of`."""
    high, middle, low = digits.long().unbind(-1)
    return (high << 16) + (middle << 8) + low


def entries_of(rows: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a cache stores as keys and as values for entries [B, S, R]: the entries, and the digits
    of their positions [B, S] if there are any, each as one head."""
    if positions is None:
        digits = rows.new_empty(*rows.shape[:2], 0)
    else:
        digits = digits_of(positions).to(rows.dtype)
    return rows[:, None], digits[:, None]


def check_exact(cache: Any, index: int, way_out: str) -> None:
    """Raises SettingError if layer `index` of a cache rounds numbers. way_out: advice for users."""
    if index < len(cache.layers) and isinstance(cache.layers[index], QUANTIZED):
        raise SettingError(
            "a quantized cache would round the positions that keys before RoPE need beside every"
            f" token: take another cache, or {way_out}"
        )


def fit_static(cache: Any, index: int, key: Tensor, value: Tensor) -> None:
    """Allocate layer `index` of a static cache, which is still empty, for the shapes of projected
    keys and values. transformers assumes equally many heads for both, and may have allocated the
    heads of the model's config before the first tokens."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not isinstance(layer, StaticLayer):
        return
    pairs = ((layer.keys, key), (layer.values, value))
    if layer.is_initialized and all(
        old is None or old.shape[1::2] == new.shape[1::2] for old, new in pairs
    ):
        return
    layer.lazy_initialization(key, value)
    if value.shape[1] != key.shape[1]:
        shape = (*value.shape[:2], layer.max_cache_len, value.shape[3])
        layer.values = value.new_zeros(shape)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(layer.values)
