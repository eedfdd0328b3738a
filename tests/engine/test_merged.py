"""Products that share their inputs run as one: the same logits, the same bytes, the same names."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kvfold.config import CacheConfig
from kvfold.engine.runner import build
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.models.folded import FoldedAttention
from kvfold.models.merged import GatedMLP, MergedLinear
from llm_cases import compressed
from models import CONFIGS, tiny
from steps import sequences_of, step, stored_rows
from tolerance import assert_same_logits, flipped

MOST = 21  # tokens that one attends to


def runner_of(model, **settings) -> ModelRunner:
    config = CacheConfig(page=16, kv_bytes=2**20, **settings)
    return build_runner(model, config, num_slots=3, max_tokens=64)


def conversation(runner: ModelRunner) -> Tensor:
    return logits_and_rows(runner)[0]


def logits_and_rows(runner: ModelRunner) -> tuple[Tensor, list[Tensor]]:
    """Logits, and what the cache holds in the end."""
    a, b = sequences_of(runner, 19, 2)
    found = [step(runner, (a, 15), (b, 2)), step(runner, (a, 4), (b, 1))]
    found += [step(runner, (a, 1), (b, 1)), step(runner, (a, 1))]
    return torch.cat(found), stored_rows(runner, (a, b))


def num_bytes(*models: nn.Module) -> int:
    """Of all memory that parameters lie in, and that products read."""
    tensors = [x for model in models for x in model.parameters()]
    merged = [x.merged for model in models for x in model.modules() if hasattr(x, "merged")]
    tensors += [x for one in merged if one is not None for x in one if x is not None]
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(found.values())


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(x, before[k]) for k, x in now.items())


def clones(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


class Counted(nn.Module):
    """A product that says how often it was asked for; a module, as vLLM compiles only such."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.product, self.calls = MergedLinear.of(linears), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.product(x)


def test_a_product_may_be_a_module() -> None:
    runner = runner_of(tiny("llama-gqa"))
    layers = list(runner.family.attentions(runner.model))
    for layer in layers:
        layer.merged = Counted(layer.products)
        layer.output = Counted([layer.o_proj])
    conversation(runner)
    assert {x.calls for layer in layers for x in (layer.merged, layer.output)} == {4}


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_products_one_by_one(name: str, bits, monkeypatch) -> None:
    if bits and name.endswith("sliding"):
        bits = 4
    if bits:  # products of one kernel, since codes jump where sums differ by a rounding
        monkeypatch.setenv("KVFOLD_BACKEND", "reference")
    merged, rows = logits_and_rows(runner_of(tiny(name), bits=bits))
    monkeypatch.setattr(build, "merge_products", lambda *_: None)
    apart, wanted = logits_and_rows(runner_of(tiny(name), bits=bits))
    codes = flipped(rows, wanted) if bits else 0.0
    assert_same_logits(merged, apart, CONFIGS[name](), MOST, codes)


@pytest.mark.parametrize("recipe", ["fast", "lean", "small"])
def test_so_are_a_compressed_models(recipe: str, monkeypatch) -> None:
    model = compressed("llama-gqa", recipe, keep=0.6)
    before, size = clones(model), num_bytes(model)
    served = runner_of(model)
    merged = conversation(served)
    assert same(model, before) and num_bytes(model, served.model) == size
    monkeypatch.setattr(build, "merge_products", lambda *_: None)
    assert_same_logits(merged, conversation(runner_of(model)), model.config, MOST)


@pytest.mark.parametrize(
    ("name", "products"),
    # Attention's input and output, gate and up, down; elsewhere the MLP as it is.
    [("llama-gqa", 4), ("qwen3", 4), ("gemma2", 4), ("phi3", 4), ("opt", 4), ("gpt-neox", 4)],
)
def test_a_layer_has_four_products(name: str, products: int, monkeypatch) -> None:
    monkeypatch.setenv("KVFOLD_BACKEND", "reference")  # whose products can be counted
    runner = runner_of(tiny(name))
    (a,) = sequences_of(runner, 5)
    counts: Counter[str] = Counter()
    linear = nn.functional.linear

    def counted(*args):
        counts["linear"] += 1
        return linear(*args)

    monkeypatch.setattr(nn.functional, "linear", counted)
    step(runner, (a, 5))
    assert counts["linear"] == 2 * products + 1


def test_weights_exist_once_however_many_engines_read_them() -> None:
    model = tiny("llama-gqa")
    before, attentions = clones(model), [layer.self_attn for layer in model.model.layers]
    size = num_bytes(model)
    first = runner_of(model).model
    own = sum(x.nbytes for at in first.model.layers for x in at.self_attn.parameters())
    assert num_bytes(model, first) == size + own
    second = runner_of(model).model
    assert num_bytes(model, first, second) == size + 2 * own
    gated = [x.model.layers[1].mlp.merged.weight.data_ptr() for x in (first, second)]
    assert gated[0] == gated[1] == model.model.layers[1].mlp.gate_proj.weight.data_ptr()
    assert same(model, before)
    assert [layer.self_attn for layer in model.model.layers] == attentions
    assert not any(isinstance(x, GatedMLP | FoldedAttention) for x in model.modules())


def test_a_model_in_use_is_saved_and_trained_as_before(tmp_path) -> None:
    model = tiny("llama-gqa")
    names, before = [name for name, _ in model.named_parameters()], clones(model)
    served = runner_of(model)
    assert [name for name, _ in model.named_parameters()] == names
    model.save_pretrained(tmp_path)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), before)
    logits = conversation(served)
    layer = model.model.layers[0].mlp
    with torch.no_grad():
        layer.up_proj.weight.mul_(1.5)
    for slot in served.pool.open_slots:
        served.pool.free_slot(slot)
    assert (conversation(served) - logits).abs().max() > 1e-3  # it is the same weight
    model(torch.arange(9)[None]).logits.sum().backward()
    assert layer.up_proj.weight.grad.shape == layer.up_proj.weight.shape


def test_an_owned_model_keeps_its_names() -> None:
    model = tiny("qwen2")
    names = {name for name in model.state_dict() if "self_attn" not in name}
    config = CacheConfig(page=16, kv_bytes=2**20)
    served = build_runner(model, config, num_slots=3, max_tokens=64, owned=True).model
    assert served is model
    assert {name for name in served.state_dict() if "self_attn" not in name} == names


def test_what_lies_in_order_is_not_moved() -> None:
    whole = torch.randn(7, 5)
    linears = [nn.Linear(5, rows, bias=False) for rows in (4, 3)]
    for linear, own in zip(linears, whole.split([4, 3]), strict=True):
        linear.weight.data = own
    assert MergedLinear.of(linears).weight.data_ptr() == whole.data_ptr()
    with torch.inference_mode():
        turned = MergedLinear.of(linears[::-1]).weight
    assert not turned.is_inference() and turned.data_ptr() != whole.data_ptr()
    assert torch.equal(turned, torch.cat((whole[4:], whole[:4])))
    assert linears[0].weight.data_ptr() == turned[3:].data_ptr()


def test_a_forward_that_somebody_put_there_stays() -> None:
    model = tiny("llama-gqa")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.forward = lambda x: nn.functional.linear(x, -mlp.up_proj.weight)
    served = runner_of(model).model
    assert not isinstance(served.model.layers[0].mlp, GatedMLP)
    assert isinstance(served.model.layers[1].mlp, GatedMLP)
