"""The sampler's noise: bits as published, uniform and unrelated, exact where tokens are rare."""

import math

import pytest
import torch
from torch import Tensor

from kvfold.ops.noise.reference import gumbel, gumbel_of, keys_of, splitmix

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bits_of(seeds: int, positions: int, tokens: int) -> Tensor:
    """Of consecutive ones: int64 [seeds, positions, tokens]."""
    pairs = [(s, p) for s in range(seeds) for p in range(positions)]
    keys = keys_of(*zip(*pairs, strict=True)).view(seeds, positions, 1)
    return splitmix(keys, torch.arange(tokens))


def is_uniform(counts: Tensor) -> bool:
    """Whether counts of equally likely events are within five deviations of chi-square's mean."""
    wanted, degrees = counts.sum() / counts.numel(), counts.numel() - 1
    assert wanted > 20
    return bool(((counts - wanted) ** 2 / wanted).sum() < degrees + 5 * (2 * degrees) ** 0.5)


def test_bits_are_splitmix64() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    start = torch.tensor([1234567], device=DEVICE)
    found = splitmix(start, torch.arange(5, device=DEVICE)).tolist()
    assert [bits % 2**64 for bits in found] == published


@pytest.mark.parametrize("shape", [(1, 30_000), (30_000, 1)], ids=["positions", "seeds"])
def test_consecutive_draws_are_uniform_and_unrelated(shape: tuple[int, int]) -> None:
    drawn = bits_of(*shape, 16).flatten(0, 1).argmax(-1)
    assert is_uniform(drawn.bincount(minlength=16))
    assert is_uniform((drawn[1:] * 16 + drawn[:-1]).bincount(minlength=256))


def test_neighbours_are_unrelated() -> None:
    """Those of the next seed, position or token, or two of them: bit by bit, and as numbers."""
    bits = bits_of(24, 48, 96)
    numbers = gumbel_of(bits.clone()).neg().exp().neg().exp()  # uniform again
    assert is_uniform((numbers * 100).long().flatten().bincount(minlength=100))
    for step in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, -1, 0), (0, 1, 1), (0, 1, -1)):
        inner = tuple(slice(1, -1) for _ in step)
        other = tuple(slice(1 + d, d - 1 or None) for d in step)
        x, y = numbers[inner].flatten(), numbers[other].flatten()
        bound = 5 / len(x) ** 0.5
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < bound
        changed = bits[inner] ^ bits[other]
        for bit in range(12, 64):  # the bits that are used
            assert abs((changed >> bit & 1).float().mean() - 0.5) < bound


def test_rare_tokens_keep_their_share() -> None:
    """As often as a token has more than some noise, so often may it win: counted over all bits, of
    which larger ones have less noise."""
    for most in (2.0, 10.0, 20.0, 30.0):
        low, high = 0, 2**52
        while low < high:
            middle = (low + high) // 2
            more = bool(gumbel_of(torch.tensor([middle]) << 12) > most)
            low, high = (middle + 1, high) if more else (low, middle)
        assert low / 2**52 == pytest.approx(-math.expm1(-math.exp(-most)), rel=2e-5)


def test_noise_is_finite() -> None:
    found = gumbel_of(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert found.isfinite().all()
    assert found[0] == pytest.approx(53 * math.log(2))


def test_noise_of_chosen_tokens_is_that_of_all() -> None:
    keys = keys_of([1, 2], [7, 7]).to(DEVICE)
    chosen = torch.tensor([[5, 0, 99], [3, 98, 3]], device=DEVICE)
    every = gumbel(keys, torch.arange(100, device=DEVICE))
    torch.testing.assert_close(gumbel(keys, chosen), every.gather(1, chosen))
