"""Compiled pieces of a model: the engine's logits, few compilations, and a model left as it was.

On CPUs nothing is compiled unasked; these tests ask, with backends that generate no code.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import model_types
from engine_compiled_cases import runner_of
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.compiled import TOKENS, Compiled, wanted
from kvfold.engine.runner.runner import ModelRunner
from kvfold.models import pointwise
from kvfold.models.pointwise import PointwiseOps
from steps import sequences_of, step
from tolerance import assert_same_logits

MOST = 22  # tokens that one attends to

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setenv("KVFOLD_BACKEND", "reference")  # whose pieces are compiled on a GPU
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compile_pieces(runner: ModelRunner, backend="eager") -> int:
    """Graphs that it took."""
    runner.compiled = Compiled(runner.model, runner.family, backend)
    runner.compiled.warm_up(runner.forward, runner.device)
    return counters["stats"]["unique_graphs"]


def conversation(runner: ModelRunner) -> Tensor:
    """Chunks and decodes of one sequence and of several, beside each other and alone."""
    a, b, *others = sequences_of(runner, 19, 2, 5, 6, 7)
    found = [step(runner, (a, 15), (b, 2)), step(runner, (a, 4), *((x, 5) for x in others))]
    found += [step(runner, (a, 1)), step(runner, *((x, 1) for x in (a, b, *others)))]
    found.append(step(runner, (a, 1), (b, 1), (others[0], 3)))
    for x in (a, b, *others):
        runner.pool.free_slot(x.open_slot)
    return torch.cat(found)


def is_clean(model: torch.nn.Module) -> bool:
    return not any({"forward", "pointwise"} & vars(x).keys() for x in model.modules())


@pytest.mark.parametrize(
    ("name", "settings", "modules", "graphs"),
    [
        # Attentions and what is around them, in 2 layers, and the final norm; for one token and for
        # any number, how a layer begins (without a sum, the first) and how it ends, queries and
        # rows, and where keys are mapped a turn, or a norm.
        ("llama-gqa", {}, 2 * 2 + 1, 10),
        ("llama-gqa", {"bits": 8}, 2 * 2 + 1, 12),
        ("qwen3", {}, 2 * 4 + 1, 12),
        ("phi3", {"bits": 4}, 2 * 2 + 1, 12),
        ("gemma2", {}, 2 * 2 + 1, 10),
        # Norms and the MLP, or an MLP's activation, each by itself.
        ("gpt-neox", {}, 2 * 2, 6),
        ("opt", {}, 2, 2),
    ],
)
def test_same_logits_and_nothing_compiled_later(name, settings, modules, graphs) -> None:
    runner = runner_of(name, **settings)
    plain = conversation(runner)
    compiled = compile_pieces(runner)
    assert compiled <= graphs + 2  # heads of several numbers may take one more
    assert len(runner.compiled.swaps) == modules
    assert_same_logits(conversation(runner), plain, runner.model.config, MOST)
    assert counters["stats"]["unique_graphs"] == compiled
    assert not counters["graph_break"]
    runner.compiled.remove()
    assert is_clean(runner.model)


@pytest.mark.parametrize("name", ["smollm3", "gemma3_text", "cohere2"])
def test_layers_beside_maps_are_compiled_once_for_all(name: str) -> None:
    """Attention, whose maps differ from layer to layer, is one operation of theirs."""
    model = model_types.tiny(name)
    runner = build_runner(model, CacheConfig(page=16), num_slots=5, max_tokens=64)
    plain = conversation(runner)
    compiled = compile_pieces(runner)
    layers = model.config.get_text_config().num_hidden_layers
    assert compiled <= 6 < 2 * layers  # layers with and without a window or RoPE, and a norm
    assert len(runner.compiled.swaps) == layers + 1
    assert_same_logits(conversation(runner), plain, runner.model.config, MOST)
    assert counters["stats"]["unique_graphs"] == compiled
    assert not counters["graph_break"]
    runner.compiled.remove()
    assert is_clean(runner.model)


def test_pieces_are_what_runs() -> None:
    runner = runner_of("llama-gqa", bits=8)
    plain = conversation(runner)
    runner.compiled = Compiled(runner.model, runner.family, "eager")
    wrong = PointwiseOps(
        rows=lambda k, tables, shift, rest: pointwise.rows(k, tables, shift, -rest)
    )

    def spoiled(x: Tensor | tuple[Tensor, Tensor], **_) -> Tensor:
        return torch.zeros_like(x[0] if isinstance(x, tuple) else x)

    found = {"forward": spoiled, "pointwise": wrong}
    swaps = runner.compiled.swaps
    for kind in found:
        runner.compiled.remove()
        runner.compiled.swaps = [(x, name, found[name]) for x, name, _ in swaps if name == kind]
        runner.compiled.install()
        assert (conversation(runner) - plain).abs().max() > 1e-2


def test_ranks_are_no_constants() -> None:
    """Layers that keep different numbers share code, parameters or not."""
    runner = runner_of("llama-gqa", bits=8)
    compile_pieces(runner)
    found = next(x for _, name, x in runner.compiled.swaps if name == "pointwise")
    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        for width in (6, 5, 7, 9, 16):
            k, rest = torch.randn(1, TOKENS, width), torch.randn(1, TOKENS, 2 * width)
            shift = torch.nn.Parameter(torch.randn(width))
            torch.testing.assert_close(found.rows(k, None, shift, rest)[..., :width], k + shift)
            q, up = torch.randn(1, TOKENS, 4, 12), torch.randn(2, 12, width)
            torch.testing.assert_close(
                found.queries(q, None, up), pointwise.queries(q, None, up), rtol=1e-5, atol=1e-5
            )
    assert counters["stats"]["unique_graphs"] <= before + 4


def test_without_a_compiler_the_engine_goes_on() -> None:
    def broken(graph, inputs):
        raise OSError("no compiler on this machine")

    runner = runner_of("llama-gqa")
    plain = conversation(runner)
    with pytest.warns(UserWarning, match="KVFOLD_COMPILE=off") as caught:
        compile_pieces(runner, broken)
    assert len(caught) == 1
    assert "no compiler" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(conversation(runner), plain)
    assert is_clean(runner.model)


def test_model_is_as_before() -> None:
    """What others put in place of a forward stays."""
    runner = runner_of("llama-gqa")
    norm = runner.model.model.norm
    norm.forward = own = lambda x: x
    keys = runner.model.state_dict().keys()
    runner.compiled = Compiled(runner.model, runner.family, "eager")
    assert norm not in [module for module, _, _ in runner.compiled.swaps]
    runner.compiled.install()
    assert not is_clean(runner.model.model.layers)
    runner.compiled.remove()
    assert norm.forward is own
    del norm.forward
    assert is_clean(runner.model)
    assert copy.deepcopy(runner.model).state_dict().keys() == keys


def test_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFOLD_COMPILE", raising=False)
    assert wanted("cuda")
    assert not wanted("cpu")
    monkeypatch.setenv("KVFOLD_COMPILE", "off")
    assert not wanted("cuda")
    monkeypatch.setenv("KVFOLD_COMPILE", "on")
    with pytest.raises(ValueError, match="KVFOLD_COMPILE must be auto or off; got 'on'"):
        wanted("cuda")
