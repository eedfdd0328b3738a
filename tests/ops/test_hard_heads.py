"""Every decode kernel on heads as real models have them: biases, and a first token unlike others.

Without a GPU kernels run in Triton's interpreter.
"""

import pytest
import torch

import decode_triton_cases as direct
import rebuild_triton_cases as rebuild
import split_triton_cases as split
from decode_triton_cases import check, poisoned  # noqa: F401
from hard_heads import ALL, FIRST
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.latent_decode import reference, triton_pieces
from kvfold.ops.latent_decode import triton as latent_triton
from pages import Case, per_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
]
# The last tile's last rows are missing, by none, by some and by whole spans of 16.
ROWS = [[64], [17], [33], [5], [0]]
STORED = ["four bits", "three precisions", "sixteen bits", "tracked"]


def slack(level: str, bits: int) -> float:
    """What tensor cores may leave out of a score, in log2: codes are subnormal numbers there, and
    sums keep 24 bits below 2^-14, a subnormal's exponent, times the largest query, rounded up to a
    power of two."""
    bias, query = ALL[level]
    return 2.0**-14 * 2 * abs(query) * bias / 2 ** (bits - 1) * 0.1 * LOG2_E


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("name", STORED)
def test_stored_keys_in_two_passes(name: str, level: str) -> None:
    case = Case.of(split.LAYOUTS[name], ROWS, 3, torch.float16, level=ALL[level], first=FIRST)
    cuts = split.SMALL[0], Tuning(block=64, stages=2, warps=1, slices=1)
    check(case, *split.run(case, cuts), slack(level, 4))


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_stored_keys_in_one_program(bits: int, level: str) -> None:
    layout = per_head([(16, 32)], bits=None if bits == 16 else bits, page=16)
    case = Case.of(layout, ROWS, 7, torch.float16, level=ALL[level], first=FIRST)
    tuning = Tuning(block=32, stages=1, warps=1, slices=1)
    check(case, *direct.run(case, tuning, 3), slack(level, bits))


RUNS = [((16, 8), (16, 4)), ((32, 4),)]  # of keys, of values
KERNELS = {
    "pieces": (triton_pieces.latent_decode, {"kind": "lean", "keys": [32, 32], "runs": RUNS}),
    "pieces, joint": (
        triton_pieces.latent_decode,
        {"kind": "small", "keys": [0, 0], "tiers": [8, 4]},
    ),
    "held": (latent_triton.latent_decode, {"kind": "lean", "keys": [32, 32], "bits": 4}),
    "held, joint": (latent_triton.latent_decode, {"kind": "small", "keys": [0, 0]}),
}


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("name", KERNELS)
def test_rebuilt_keys(name: str, level: str) -> None:
    """Scores may differ by what rounding to fp16 makes of keys that a bias is not in, and rounding
    to fp32 of those that it is in."""
    kernel, options = KERNELS[name]
    lengths = [n for (n,) in ROWS]
    case = rebuild.Case(
        **options, values=32, lengths=lengths, queries=3, d=64, page=64, level=ALL[level],
        first=FIRST,
    )  # fmt: skip
    out, lse = case.run(kernel)
    want, exact = case.run(reference.latent_decode, dtype=torch.float64)
    bias, query = ALL[level]
    size = bias * abs(query) * 0.1 * LOG2_E
    # A first key without its bias, and what a query makes of its map, are near FIRST times a unit
    # in the biased number: both are rounded, each twice.
    bound = 16 * 2.0**-24 * size + 4 * 2.0**-11 * FIRST * abs(query) * 0.1 * LOG2_E
    assert out.isfinite().all()
    torch.testing.assert_close(lse, exact.float(), rtol=0, atol=bound)
    values = want.float().abs().amax(-1, keepdim=True)
    assert ((out.float() - want.float()).abs() <= (2 * bound + 2e-3) * values + 1e-3).all()
