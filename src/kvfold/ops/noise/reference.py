"""Add Gumbel noise in plain PyTorch. Shapes: n or r rows of logits, V candidate tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


# Splitmix64 (Steele, Lea, Flood 2014, with the constants of Vigna): an odd step, then shifts and
# multiplications that spread every bit over all bits.
_STEP = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))
_BITS = 52  # of a uniform number


def keys_of(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Combine seed and position of each row into the key of its noise: int64 [n] on the CPU."""
    start, number = (torch.tensor(x, dtype=torch.int64) for x in (seeds, positions))
    return splitmix(start, number)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise fp32 [r, V] for tokens int64 [V] or [r, V], in rows with keys
    int64 [r].

    The token with the largest log-probability plus noise is a sample. Logits with other rounding
    rarely change it, while in a running sum of probabilities a change moves all later tokens.
    """
    return gumbel_of(splitmix(keys[:, None], tokens))


def add_gumbel(values: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Like `ops.noise.add_gumbel`."""
    all_tokens = torch.arange(values.shape[-1], device=values.device)
    return values.add_(gumbel(keys, all_tokens if ids is None else ids))


def splitmix(start: Tensor, number: Tensor) -> Tensor:
    """Return number `number` (from 0) of the random stream that begins at `start`: int64,
    broadcast, the same on every device."""
    bits = start + (number + 1) * _STEP
    shifted = torch.empty_like(bits)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(bits, shift, out=shifted)
        shifted.bitwise_and_(2 ** (64 - shift) - 1)  # the shift repeats the sign
        bits.bitwise_xor_(shifted).mul_(factor)
    return bits


def gumbel_of(bits: Tensor) -> Tensor:
    """Return -log(-log(1 - w)) fp32 of w uniform in (0, 1), from bits int64, which are overwritten.

    Unlikely tokens are sampled if w is tiny, where fp32 has all of its digits.
    """
    w = bits.bitwise_right_shift_(64 - _BITS).bitwise_and_(2**_BITS - 1).float()
    w.add_(0.5).mul_(2.0**-_BITS).clamp_(max=1 - 2.0**-24)  # below 1 in fp32
    return w.neg_().log1p_().neg_().log_().neg_()
