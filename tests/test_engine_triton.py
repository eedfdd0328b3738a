"""The engine on kernels: the reference's logits, whichever way a part takes.

Without a GPU the kernels run in Triton's interpreter.
"""

import os
from collections import Counter

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from kvfold import recipes
from kvfold.attention import fallback, triton_decode, triton_prefill
from kvfold.engine.graphs import DecodeGraphs, _Captured
from kvfold.engine.runner import ModelRunner
from steps import DEVICE, backends, even, folded, runner_of, sequences_of, step

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often every way was taken, and prefill's kernel among them."""
    taken: Counter = Counter()

    def count(owner, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            taken[label] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, outer)

    count(triton_decode.TritonDecode, "attend", "direct")
    count(triton_decode.LatentDecode, "attend", "rebuilt")
    count(fallback.Fallback, "attend", "torch")
    count(triton_prefill, "prefill", "prefill")
    return taken


def close(found: Tensor, wanted: Tensor, error: float = 2e-2) -> None:
    assert (found - wanted).abs().max() < error * wanted.abs().max()


def conversation(runner: ModelRunner) -> Tensor:
    """Prompts in chunks, a decode beside prefills, of which one is a prompt's only token that no
    window policy observes, and after a compression, if there is one, decodes and a chunk."""
    first, second, third = sequences_of(runner, 19, 2, 12)
    found = [step(runner, (first, 15), (third, 3)), step(runner, (first, 4), (second, 2))]
    found.append(step(runner, (first, 1), (second, 1), (third, 9)))
    if runner.policy is not None:
        runner.compress([first])
        assert runner.pool.host_lengths[first.open_slot].max() == 16
    found.append(step(runner, (second, 1), (third, 1), (first, 2), every=True))
    return torch.cat(found)


STREAMING = {"evict": "streaming", "keep_tokens": 0.5}
OBSERVED = {"evict": "kv-compress", "keep_tokens": 0.5}


@pytest.mark.parametrize(
    ("recipe", "align", "layers", "settings", "decoded"),
    [
        (None, 8, 1, {}, "direct"),
        (recipes.fast(), 1, 1, OBSERVED, "direct"),
        (even("lean"), 8, 1, {}, "rebuilt"),
        (even("lean"), 8, 1, {"bits": 8}, "rebuilt"),
        (even("lean"), 8, 1, OBSERVED, "torch"),
        (even("small"), 8, 2, {}, "rebuilt"),
        (even("palu-m"), 4, 1, STREAMING, "rebuilt"),
    ],
)
def test_logits_are_the_reference_s(
    recipe, align: int, layers: int, settings: dict, decoded: str, backend, ways: Counter
) -> None:
    backend("reference")
    wanted = conversation(runner_of(folded(recipe, align, layers), **settings))
    ways.clear()
    backend("triton")
    close(conversation(runner_of(folded(recipe, align, layers), **settings)), wanted)
    assert ways["prefill"] and ways[decoded] >= 2 * layers
    assert decoded == "torch" or not ways["torch"]


class Replayed:
    """In place of a CUDA graph: the step itself."""

    def __init__(self, forward, inputs: Tensor) -> None:
        self.forward, self.inputs, self.logits = forward, inputs, forward(*inputs)

    def replay(self) -> None:
        self.logits.copy_(self.forward(*self.inputs))


@pytest.mark.parametrize(("recipe", "settings"), [(None, OBSERVED), (even("small"), {})])
def test_steps_that_graphs_hold(
    recipe, settings: dict, backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing from the host, and a bound in place of the number of rows."""

    def capture(self: DecodeGraphs, inputs: Tensor) -> _Captured:
        graph = Replayed(self.forward, inputs)
        return _Captured(graph, inputs, graph.logits)

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    found, metrics = [], []
    for name in ("reference", "triton"):
        backend(name)
        runner = runner_of(folded(recipe), **settings)
        if name == "triton":
            runner.graphs = DecodeGraphs(runner._decode, runner.device)
        one, two = sequences_of(runner, 17, 3)
        step(runner, (one, 17), (two, 3))
        found.append(torch.cat([step(runner, (one, 1), (two, 1)) for _ in range(2)]))
        if runner.policy is not None:
            metrics.append(runner.eviction.tracked(one.open_slot)[0])
        assert (runner.graphs is not None) is (name == "triton") or DEVICE == "cuda"
    assert len(runner.graphs.captured) == 1
    close(found[1], found[0])
    if metrics:
        close(metrics[1], metrics[0], 1e-2)
