"""OSCAR and TurboQuant as benchmarks round them, and the model that answers suites with them."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import published_quantisers
import quantised_tasks
from kvfold.engine.api.llm import LLM
from kvfold.evaluation.suites.engines import ByKVFold
from kvfold.evaluation.suites.prompts import Prompt
from kvfold.evaluation.suites.run import SuiteResult
from kvfold.hub.loading import load, load_tokenizer
from published_quantisers import NAMES, Moments, Oscar, TurboQuant, moments, watched
from quantised_tasks import ByPyTorch
from windowed import Window, windowed

D = 128


@pytest.fixture(scope="module")
def model() -> Any:
    return load("reference:gqa", dtype="float32")


@pytest.fixture(scope="module")
def layers(model: Any) -> list[Moments]:
    return moments(model, torch.arange(600).view(2, 300) + 40)


def alike(layers: int = 6) -> list[Moments]:
    """Moments in which all numbers are alike."""
    eye = torch.eye(D, dtype=torch.float64)[None]
    ones = torch.ones(1, D, dtype=torch.float64)
    return [Moments(eye, eye, ones, ones, ones[:, 0])] * layers


def error(rounded: Tensor, x: Tensor) -> float:
    return float((rounded - x).square().sum() / x.square().sum())


@pytest.mark.parametrize(
    ("name", "key_bytes", "value_bytes"),
    [
        ("oscar-2", 32 + 4, 32 + 4),
        ("oscar-heads-2", 32 + 4, 32 + 4),
        ("turboquant-2.5", 24 + 16 + 4, 24 + 16 + 4),
        ("turboquant-3.5", 32 + 24 + 4, 32 + 24 + 4),
        ("turboquant-vllm-4", 64 + 2, 64 + 4),  # vLLM's key_packed_size and value_packed_size
        ("turboquant-vllm-3", 48 + 2, 48 + 4),
    ],
)
def test_bits_count_scales_and_norms(name: str, key_bytes: int, value_bytes: int) -> None:
    stored = 8 * (key_bytes + value_bytes) / (2 * D)
    if "vllm" in name:  # four of six layers are in 16 bits
        stored = (stored + 16 * 2) / 3
    assert NAMES[name](alike()).stored_bits == pytest.approx(stored)


@pytest.mark.parametrize(("bits", "lost"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
def test_directions_lose_what_turboquant_states(bits: int, lost: float) -> None:
    """Theorem 1 for random unit vectors, whose last digit is rounded."""
    x = torch.randn(4, 500, D, generator=torch.Generator().manual_seed(0)).exp()
    found = error(published_quantisers.on_sphere(x, bits), x)
    assert found == pytest.approx(lost, rel=0.15)


def turboquant(x: np.ndarray, bits: int, rng: np.random.Generator) -> np.ndarray:
    """TurboQuant's algorithm 1 as its paper has it, for x [n, d]: axes from a Gaussian's QR, and
    the levels of least squared error for a number of a random unit vector, whose density is
    (1 - y^2)^((d - 3) / 2)."""
    d = x.shape[1]
    grid = np.linspace(-1, 1, 5001)
    density = (1 - grid**2) ** ((d - 3) / 2)
    shares = density.cumsum() / density.sum()
    levels = np.interp((np.arange(2**bits) + 0.5) / 2**bits, shares, grid)
    for _ in range(200):
        nearest = np.abs(grid[:, None] - levels).argmin(1)
        weights = np.bincount(nearest, density)
        levels = np.bincount(nearest, density * grid) / weights
    axes = np.linalg.qr(rng.standard_normal((d, d)))[0]
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    codes = np.abs((x / norms @ axes)[..., None] - levels).argmin(-1)
    return levels[codes] @ axes.T * norms


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 2.5, 3.5])
def test_turboquant_is_as_good_as_the_papers_algorithm(bits: float) -> None:
    """A Hadamard matrix with random signs and a Gaussian's levels in place of the paper's."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, D))
    halves = [math.ceil(bits), math.floor(bits)] if bits % 1 else [int(bits)]
    parts = zip(np.split(x, len(halves), 1), halves, strict=True)
    wanted = np.concatenate([turboquant(part, own, rng) for part, own in parts], 1)
    found = TurboQuant(alike(1), bits).keys(0, torch.tensor(x[None], dtype=torch.float32))
    exact = torch.tensor(x)
    assert error(found[0], exact) == pytest.approx(error(torch.tensor(wanted), exact), rel=0.02)


def test_halves_have_bits_of_their_own() -> None:
    """The numbers with the largest moments lose less, wherever they are."""
    power = torch.where(torch.arange(D) % 2 == 0, 9.0, 1.0).double()[None]
    eye = torch.eye(D, dtype=torch.float64)[None]
    layer = Moments(eye, eye, power, power.flip(1), power[:, 0])
    quantiser = NAMES["turboquant-2.5"]([layer])
    x = torch.randn(1, 500, D) * power.sqrt().float()
    rounded = quantiser.keys(0, x)
    assert error(rounded[..., ::2], x[..., ::2]) == pytest.approx(0.034, rel=0.1)
    assert error(rounded[..., 1::2], x[..., 1::2]) == pytest.approx(0.117, rel=0.1)
    assert error(quantiser.values(0, x)[..., ::2], x[..., ::2]) > 0.1


def test_moments_are_oscars(model: Any) -> None:
    """As OSCAR's `compute_qqt` and `compute_sst` have them, of all tokens at once."""
    ids = torch.arange(160).view(2, 80) + 40
    seen: dict[int, list[tuple[Tensor, ...]]] = {}
    with watched(model, lambda i, *x: seen.setdefault(i, []).append(x)), torch.no_grad():
        for window in ids:
            model(window[None], use_cache=False)
    found = moments(model, ids)
    assert len(found) == len(seen) == model.config.num_hidden_layers
    for layer, parts in seen.items():
        q, k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        queries = values = torch.zeros(())
        for head in range(len(k)):
            own = q.chunk(len(k))[head].flatten(0, 1)
            square = own.T @ own
            weights = ((k[head] @ square) * k[head]).sum(1)
            weights = weights / weights.sum()
            queries = queries + square / len(k)
            values = values + (v[head] * weights[:, None]).T @ v[head] / len(k)
        torch.testing.assert_close(found[layer].queries.mean(0), queries)
        torch.testing.assert_close(found[layer].values.mean(0), values)


def test_oscar_clips_and_keeps_2_bits(layers: list[Moments]) -> None:
    quantiser = Oscar(layers)
    x = torch.randn(2, 7, D)
    turn = quantiser.value_rotations[3]
    torch.testing.assert_close(turn @ turn.T, torch.eye(D), atol=1e-5, rtol=0)
    rotated, exact = quantiser.values(3, x) @ turn, x @ turn
    for row, whole in zip(rotated.flatten(0, 1), exact.flatten(0, 1), strict=True):
        assert len((row * 1e2).round().unique()) <= 4
        highest = whole.abs().sort().values[int(0.92 * D)]
        assert row.abs().max() == pytest.approx(float(highest), rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_exact_tokens_lose_nothing_and_rounded_ones_do(
    model: Any, layers: list[Moments], name: str
) -> None:
    ids, quantiser = list(range(40, 90)), NAMES[name](layers)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    found = []
    for tokens, first in ((50, 0), (0, 50), (20, 4), (0, 0)):
        window = Window(kind="whole", tokens=tokens, first=first)
        with windowed(model, None, 16, window, quantiser) as read:
            found.append(float((read(ids) - wanted).square().mean()))
    assert max(found[:2]) < 1e-6
    assert all(less < more for less, more in pairwise(found[1:])), found


PROMPTS = [
    Prompt(ids=list(range(40, 40 + count)), max_new_tokens=new)
    for count, new in ((12, 9), (30, 20), (5, 14), (21, 1), (17, 11))
]


def test_an_exact_cache_answers_as_the_engine(model: Any) -> None:
    """Slots are used again, and answers end at their own lengths."""
    tokenizer = load_tokenizer("reference:gqa")
    engine = ByPyTorch(model, tokenizer, None, Window(kind="whole"), slots=2)
    found = engine.answer(PROMPTS)
    llm = LLM(model, tokenizer=tokenizer, max_sequences=2, max_tokens=64)
    assert found == ByKVFold(llm).answer(PROMPTS)
    stopped = [Prompt(ids=PROMPTS[1].ids, max_new_tokens=20, stop=(found[1].text[3:6],))]
    assert engine.answer(stopped) == ByKVFold(llm).answer(stopped)


def watch(engine: ByPyTorch, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Append the logits [B, V] of every prompt and step to `seen`."""

    def logits(ids: Tensor, positions: Tensor) -> Tensor:
        seen.append(ByPyTorch._logits(engine, ids, positions))
        return seen[-1]

    monkeypatch.setattr(engine, "_logits", logits)


@pytest.mark.parametrize(("recent", "first"), [(0, 0), (7, 3), (0, 4), (16, 4)])
def test_slots_decode_what_all_tokens_at_once_read(
    layers: list[Moments], recent: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("reference:gqa", dtype="float64")  # so that few codes are rounded otherwise
    quantiser, window = NAMES["oscar-2"](layers), Window(kind="whole", tokens=recent, first=first)
    engine = ByPyTorch(model, load_tokenizer("reference:gqa"), quantiser, window, slots=2)
    seen = list[Tensor]()
    watch(engine, seen, monkeypatch)
    prompts = PROMPTS[:2]
    replies = engine.answer(prompts)
    for slot, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        answer = list(reply.token_ids)
        own = [seen[slot][0]] + [x[slot] for x in seen[2 : 1 + len(answer)]]
        with windowed(model, None, 16, window, quantiser) as read:
            wanted = read([*prompt.ids, *answer[:-1]])[len(prompt.ids) - 1 :]
        apart = (torch.stack(own) - wanted).abs().amax(1)
        assert apart.median() < 1e-4, "from a code that is rounded otherwise, few tokens differ"
        assert apart.max() < 0.1


def test_an_exact_prompt_is_read_exactly(
    model: Any, layers: list[Moments], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, quantiser = load_tokenizer("reference:gqa"), NAMES["turboquant-2.5"](layers)
    prompts = [Prompt(ids=list(range(40, 100)), max_new_tokens=1)]
    with torch.no_grad():
        wanted = model(torch.tensor([prompts[0].ids])).logits[0, -1]
    apart = []
    for exact in (True, False):
        window = Window(kind="whole")
        engine = ByPyTorch(model, tokenizer, quantiser, window, slots=1, exact_prompt=exact)
        seen = list[Tensor]()
        with monkeypatch.context() as patch:
            watch(engine, seen, patch)
            engine.answer(prompts)
        apart.append(float((seen[0][0] - wanted).abs().max()))
    assert apart[0] < 1e-3 < 0.05 < apart[1]


def test_the_command_writes_what_eval_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    words = ["quantised_tasks.py", "reference:gqa", "--quantiser", "oscar-2", "--recent", "32"]
    words += ["--first", "4", "--calib-tokens", "4096", "--json", str(file)]
    words += ["--set", "suite-rows=1", "suite-length=1024", "suite-tokens=2", "max-sequences=4"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(quantised_tasks, "calibrated", lambda *_: alike(7))
    quantised_tasks.main()
    data = json.loads(file.read_text())
    result = SuiteResult.from_record(data["suites"]["ruler"])
    assert len(result.answers) == 11 and not any(x.error for x in result.answers)
    assert data["cache"]["stored_bits"] == 2.25
    with pytest.raises(SystemExit):
        monkeypatch.setattr("sys.argv", [*words, "--set", "page=4"])
        quantised_tasks.main()
