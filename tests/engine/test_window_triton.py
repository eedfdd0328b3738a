"""Exact windows on kernels: the reference's logits, step by step and in a CUDA graph.

Without a GPU the kernels run in Triton's interpreter.
"""

import os
from collections import Counter
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

import kvfold
from kvfold.attention import window
from kvfold.attention.triton_decode import LatentDecode, TritonDecode
from kvfold.config import CacheConfig
from kvfold.engine.runner import metadata
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.graphs import DecodeGraphs
from kvfold.engine.runner.runner import ModelRunner
from matrix import slow
from model_types import tiny
from sidecar_cases import bytes_tokenizer
from steps import DEVICE, backends, sequences_of, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory):
    """A tiny fp16 model of one layer, and maps of a recipe for half of its numbers (None: none)."""
    model: Any = tiny("llama")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    tokenizer = bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    settings = {"keep": 0.5, "align": 8, "max_tokens": 1024, "tokenizer": tokenizer}
    model = torch.nn.Module.half(model).to(DEVICE)
    made = {x: kvfold.compress(model, recipe=x, **settings) for x in ("swift", "small")}
    return lambda recipe: (model, made.get(recipe))


def runner_of(model: Any, maps: Any, bits: int | None, slots: int = 2) -> ModelRunner:
    config = CacheConfig(page=16, kv_bytes=2**17, window=5, bits=bits)
    return build_runner(model, config, num_slots=slots, max_tokens=96, maps=maps)


def steps_of(runner: ModelRunner) -> torch.Tensor:
    """Prompts in chunks, shorter and longer than the window, and decodes beside them."""
    first, second = sequences_of(runner, 9, 2)
    found = [step(runner, (first, 7)), step(runner, (first, 2), (second, 2))]
    found += [step(runner, (first, 1), (second, 1)) for _ in range(2)]
    runner.pool.check_integrity()
    return torch.cat(found)


CASES = [
    ("swift", None, TritonDecode),
    ("small", None, LatentDecode),
    slow("plain", 4, TritonDecode),
    slow("small", 8, LatentDecode),
]


@pytest.mark.parametrize(("recipe", "bits", "kind"), CASES)
def test_logits_are_the_reference_s(
    recipe: str, bits: int | None, kind: type, backend, compressed, monkeypatch
) -> None:
    prefills: Counter = Counter()
    inner = window.prefill

    def prefill(q: torch.Tensor, *inputs: Any) -> Any:
        prefills["triton" if "triton" in os.environ["KVFOLD_BACKEND"] else "plain"] += 1
        return inner(q, *inputs)

    monkeypatch.setattr(window, "prefill", prefill)
    monkeypatch.setattr(window, "BLOCK", 2)
    monkeypatch.setattr(metadata, "BATCHED_DEVICES", {DEVICE})  # one call a step on every device
    found = {}
    for name in ("reference", "triton"):
        backend(name)
        runner = runner_of(*compressed(recipe), bits)
        found[name] = steps_of(runner)
    assert runner.attention.window is not None
    assert [x.kinds[0] for x in runner.attention.window.decoders] == [kind, TritonDecode]
    # Two steps prefill: one attention to the window, and one to the entries before it.
    assert prefills == {"triton": 4, "plain": 4}
    error = (found["triton"] - found["reference"]).abs().max()
    assert error < 2e-2 * found["reference"].abs().max()


class Replayed:
    """In place of a CUDA graph: the step itself."""

    def __init__(self, graphs: DecodeGraphs, size: int, forward) -> None:
        self.replay = lambda: graphs._step(size, forward)
        self.replay()


@pytest.mark.parametrize("recipe", ["swift", slow("small")])
def test_steps_that_graphs_hold(
    recipe: str, backend, compressed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing from the host."""
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *args: Replayed(*args))
    found = []
    for name in ("reference", "triton"):
        backend(name)
        runner = runner_of(*compressed(recipe), None, slots=2)
        if name == "triton":
            assert runner.attention.window is not None and runner.attention.window.supports_graphs
            runner.graphs = runner._graphs()
            runner.warm_up()
        one, two = sequences_of(runner, 4, 1)
        step(runner, (one, 4), (two, 1))
        found.append(torch.cat([step(runner, (one, 1), (two, 1)) for _ in range(3)]))
        found[-1] = torch.cat((found[-1], step(runner, (one, 1))))
    assert list(runner.graphs.captured) == [2, 1]
    assert (found[1] - found[0]).abs().max() < 2e-2 * found[0].abs().max()
