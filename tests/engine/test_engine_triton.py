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
from kvfold.engine.runner.graphs import DecodeGraphs, sizes_up_to
from kvfold.engine.runner.runner import ModelRunner
from matrix import matrix, slow
from steps import DEVICE, backends, even, folded, runner_of, sequences_of, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]


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
    inner = fallback.Fallback.attend

    def attend(self, layer, part, q, into=None) -> Tensor:
        taken["torch" if part.decode else "chunk in torch"] += 1
        return inner(self, layer, part, q, into)

    monkeypatch.setattr(fallback.Fallback, "attend", attend)
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
        slow(even("lean"), 8, 1, {"bits": 8}, "rebuilt"),
        (even("lean"), 8, 1, OBSERVED, "rebuilt"),
        (even("swift"), 8, 1, OBSERVED, "direct"),
        (even("small"), 8, 2, {}, "rebuilt"),
        slow(even("palu-m"), 4, 1, STREAMING, "rebuilt"),
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
    assert not ways["torch"]
    apart = recipe == recipes.fast() or settings is not OBSERVED
    assert not (apart and ways["chunk in torch"]), "rows of one head, or no query is observed"


@pytest.mark.parametrize(("name", "settings"), matrix(["palu-g", "palu-j"], [{}, OBSERVED]))
def test_heads_that_share_absorbed_latents(
    name: str, settings: dict, backend, ways: Counter
) -> None:
    """Palu's groups of four and all heads of a model without RoPE."""
    backend("reference")
    wanted = conversation(runner_of(folded(even(name), 4, name="opt"), **settings))
    ways.clear()
    backend("triton")
    runner = runner_of(folded(even(name), 4, name="opt"), **settings)
    assert runner.pool.layout.spec.layers[0].keys == "absorbed"
    close(conversation(runner), wanted)
    assert ways["direct"] >= 2 and not ways["torch"]


class Replayed:
    """In place of a CUDA graph: the step itself."""

    def __init__(self, graphs: DecodeGraphs, size: int, forward) -> None:
        self.replay = lambda: graphs._step(size, forward)
        self.replay()


@pytest.mark.parametrize(
    ("recipe", "settings", "warm"),
    [
        (None, OBSERVED, True),
        slow(even("small"), {}, True),
        (even("small"), OBSERVED, False),
        slow(even("swift"), OBSERVED | {"bits": 4}, True),
    ],
)
def test_steps_that_graphs_hold(
    recipe, settings: dict, warm: bool, backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing from the host, and a bound in place of the number of rows; captured before
    sequences come, or when the first are there."""
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *args: Replayed(*args))
    found, metrics = [], []
    for name in ("reference", "triton"):
        backend(name)
        runner = runner_of(folded(recipe), slots=4, **settings)
        if name == "triton":
            runner.graphs = runner._graphs()
            if warm:
                runner.warm_up()
        one, two, three = sequences_of(runner, 17, 3, 5)
        step(runner, (one, 17), (two, 3), (three, 5))
        all_ = [step(runner, (one, 1), (two, 1), (three, 1)) for _ in range(2)]
        found.append(torch.cat([*all_, step(runner, (one, 1), (three, 1))]))
        runner.pool.check_integrity()
        if runner.policy is not None:
            metrics.append(runner.eviction.tracked(one.open_slot)[0])
        assert (runner.graphs is not None) is (name == "triton") or DEVICE == "cuda"
    assert list(runner.graphs.captured) == ([4, 2, 1] if warm else [4, 2])
    assert len(runner.graphs.logits) == 4
    close(found[1], found[0])
    if metrics:
        close(metrics[1], metrics[0], 1e-2)


def test_graphs_of_their_own_read_demoted_pages(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two sequences has pages in fewer bits; later, when it has ended, none has."""
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *args: Replayed(*args))
    found = []
    for name in ("reference", "triton"):
        backend(name)
        runner = runner_of(folded(None), bits=8, when_full="demote")
        if name == "triton":
            runner.graphs, runner.demoted_graphs = runner._graphs(), runner._graphs()
        one, two = sequences_of(runner, 70, 9, more=20)
        step(runner, (one, 70), (two, 9))
        runner.demote(one)
        assert runner.pool.coarse is not None and runner.pool.coarse.host_lengths[one.open_slot, 0]
        found.append(torch.cat([step(runner, (one, 1), (two, 1)), step(runner, (two, 1))]))
    assert runner.demoted_graphs is not None and list(runner.demoted_graphs.captured) == [2]
    assert runner.graphs is not None and list(runner.graphs.captured) == [1]
    close(found[1], found[0])


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 63, 64, 65, 256, 257])
def test_sizes_of_graphs_are_few_and_none_is_much_too_large(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and len(sizes) <= 3 + 7 + most / 16
    for batch in range(1, most + 1):
        larger = next(size for size in sizes if size >= batch)
        assert larger < 2 * batch and larger - batch < 16
