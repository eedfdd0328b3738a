"""The noise of the kernel: its bits are the reference's, and so are its logarithms, to rounding.

Without a GPU it runs in Triton's interpreter.
"""

import json
import sys
from unittest import mock

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from decode_compile_cases import operations  # noqa: E402
from hopper import need_compiler, run_alone  # noqa: E402
from kvfold.engine.requests.request import SamplingParams  # noqa: E402
from kvfold.engine.runner.sampler import sample  # noqa: E402
from kvfold.ops.backend import use_triton  # noqa: E402
from kvfold.ops.noise import keys_of, reference  # noqa: E402
from kvfold.ops.noise import triton as noise_triton  # noqa: E402
from kvfold.ops.noise.triton import BLOCK, gumbel_of, splitmix  # noqa: E402
from matrix import slow  # noqa: E402
from prefill_compile_cases import Launch  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENDS = [0, 1, -1, 2**12 - 1, 2**12, 2**62, 2**63 - 1, -(2**63), -(2**12), 1 - 2**63]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]


def random_bits(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=source)


@triton.jit
def bits_kernel(found, start, number, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    bits = splitmix(tl.load(start + at), tl.load(number + at))
    tl.store(found + at, bits.to(tl.int64, bitcast=True))


@triton.jit
def numbers_kernel(found, bits, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(found + at, gumbel_of(tl.load(bits + at).to(tl.uint64, bitcast=True)))


def test_bits_are_the_references() -> None:
    start = torch.cat([torch.tensor(ENDS), random_bits(1024 - len(ENDS))]).to(DEVICE)
    for number in (torch.arange(1024), random_bits(1024, seed=1)):
        found = torch.empty_like(start)
        bits_kernel[(1,)](found, start, number.to(DEVICE), SIZE=1024)
        assert torch.equal(found, reference.splitmix(start, number.to(DEVICE)))


def test_numbers_are_the_references_from_the_rarest_token_to_the_likeliest() -> None:
    """Of ends, random bits, and such as come near both ends of the uniform numbers."""
    near = random_bits(1024, seed=2) >> torch.arange(1024) % 64
    bits = torch.cat([torch.tensor(ENDS), near, ~near, random_bits(2**11 - len(ENDS), seed=3)])
    found = torch.empty(len(bits), device=DEVICE)
    numbers_kernel[(1,)](found, bits.to(DEVICE), SIZE=len(bits))
    wanted = reference.gumbel_of(bits.clone())
    assert wanted.max() > 36 and wanted.min() < -2.8
    torch.testing.assert_close(found.cpu(), wanted, rtol=3e-7, atol=5e-7)


@pytest.mark.parametrize("chosen", [False, True], ids=["all", "chosen"])
@pytest.mark.parametrize("rows, tokens", [(1, 1), (3, 37), (2, BLOCK), (5, 2 * BLOCK + 1)])
def test_noise_is_added_in_place_and_nowhere_else(rows: int, tokens: int, chosen: bool) -> None:
    logits = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(tokens)) - 5
    logits[0, -1] = -torch.inf
    keys = keys_of(range(rows), [2**40] * rows)
    ids = random_bits(rows, tokens).remainder(200_000) if chosen else None
    around = torch.full((rows * tokens + 2 * BLOCK,), torch.nan, device=DEVICE)
    values = around[BLOCK:-BLOCK].view(rows, tokens).copy_(logits)
    place = keys.to(DEVICE), ids if ids is None else ids.to(DEVICE)
    assert noise_triton.add_gumbel(values, *place) is values
    wanted = reference.add_gumbel(logits, keys, ids)
    torch.testing.assert_close(values.cpu(), wanted, rtol=3e-7, atol=2e-6)
    assert around[:BLOCK].isnan().all() and around[-BLOCK:].isnan().all()


LIMITS = [{}, {"top_p": 0.9}, {"top_k": 1}, {"top_k": 40, "top_p": 0.7}, {"temperature": 0.0}]


def test_draws_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with all kinds of limits at once; a GPU draws what a CPU does."""
    rows = [SamplingParams(**{"temperature": 1.5} | x) for x in LIMITS] * 8
    logits = torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(0)) * 3
    places = range(len(rows)), [11] * len(rows)
    used = mock.Mock(wraps=noise_triton.add_gumbel)
    monkeypatch.setattr(noise_triton, "add_gumbel", used)
    wanted = sample(logits, rows, *places).tokens
    assert not used.called and len(wanted.unique()) > 20
    monkeypatch.setenv("KVFOLD_BACKEND", "triton")
    use_triton.cache_clear()
    found = sample(logits.to(DEVICE), rows, *places).tokens
    use_triton.cache_clear()
    assert used.call_count == 4
    assert torch.equal(found.cpu(), wanted)


# -- compiled for sm_90a, in a process of its own: this one's may belong to the interpreter -------


def compile_all(number: int) -> None:
    """What a launch would be, see test_decode_compile: for all tokens, and where number is 2 for
    chosen ones."""
    values, ids = torch.zeros(2, 2048), torch.zeros(2, 2048, dtype=torch.int64)
    for tokens in (None, ids)[:number]:
        recorder = Launch(noise_triton.gumbel_kernel)
        with mock.patch.object(noise_triton, "gumbel_kernel", recorder):
            noise_triton.add_gumbel(values, ids[:, 0], tokens)
        names, _ = operations(recorder.compiled()[0])
        print(json.dumps([x.split()[0] for x in names]), flush=True)


@pytest.mark.parametrize("number", [1, slow(2)])
def test_kernel_compiles_well_for_hopper(number: int) -> None:
    """Nothing spills; logarithms are not the device's quick ones, which are wrong near 1."""
    need_compiler()
    reports = [json.loads(line) for line in run_alone(__file__, str(number))]
    assert len(reports) == number
    for names in reports:
        assert not any(x.startswith(("STL", "LDL", "MUFU")) for x in names), names
        assert len(names) <= 110 * (BLOCK // 128), len(names)  # for each number of a thread


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
