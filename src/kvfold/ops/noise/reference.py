"""Noise in plain PyTorch. Shapes: n rows, r of them, V tokens that may be drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


# Splitmix64 (Steele, Lea, Flood 2014, with the constants of Vigna): an odd step, then shifts and
# multiplications that spread every bit over all.
_STEP = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))
_BITS = 52  # of a uniform number


def keys_of(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One number of both, which noise depends on: int64 [n] on the CPU."""
    start, number = (torch.tensor(x, dtype=torch.int64) for x in (seeds, positions))
    return splitmix(start, number)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of tokens int64 [V] or [r, V] in rows with keys int64 [r]: fp32 [r, V].

    The largest of log-probabilities plus noise is a draw. Logits that are rounded otherwise rarely
    change it, while in a running sum of probabilities a change moves all tokens behind it.
    """
    return gumbel_of(splitmix(keys[:, None], tokens))


def add_gumbel(values: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Like `ops.noise.add_gumbel`."""
    every = torch.arange(values.shape[-1], device=values.device)
    return values.add_(gumbel(keys, every if ids is None else ids))


def splitmix(start: Tensor, number: Tensor) -> Tensor:
    """Number `number` (from 0) of the stream of random bits that begins at `start`: int64,
    broadcast, the same on every device."""
    bits = start + (number + 1) * _STEP
    shifted = torch.empty_like(bits)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(bits, shift, out=shifted)
        shifted.bitwise_and_(2 ** (64 - shift) - 1)  # the shift repeats the sign
        bits.bitwise_xor_(shifted).mul_(factor)
    return bits


def gumbel_of(bits: Tensor) -> Tensor:
    """-log(-log(1 - w)) of w uniform in (0, 1), fp32, from bits int64, which are overwritten.

    Rare tokens are drawn where w is tiny, and there fp32 has all of its digits.
    """
    w = bits.bitwise_right_shift_(64 - _BITS).bitwise_and_(2**_BITS - 1).float()
    w.add_(0.5).mul_(2.0**-_BITS).clamp_(max=1 - 2.0**-24)  # below 1 in fp32
    return w.neg_().log1p_().neg_().log_().neg_()
