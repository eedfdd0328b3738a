"""Products of few tokens by kernels: the reference's numbers, and the reference where they do not
serve. Without a GPU the kernels run in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.ops.linear import reference, triton

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INPUTS, OUTPUTS = 1024, 256


def data(*tokens: int, gate: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    x = torch.randn(*tokens, INPUTS, generator=make)
    weight = torch.randn(OUTPUTS * (1 + gate), INPUTS, generator=make) / 32
    bias = torch.randn(OUTPUTS, generator=make)
    return tuple(y.half().to(DEVICE) for y in (x, weight, bias))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_the_reference_s(tokens: int, biased: bool) -> None:
    x, weight, bias = data(1, tokens)
    bias = bias if biased else None
    close(triton.product(x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_gated_products_are_the_reference_s(tokens: int) -> None:
    x, weight, _ = data(1, tokens, gate=True)
    close(triton.product(x, weight, gated=True), reference.gated(x, weight))


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("numbers", [1, 1000, 2500])
def test_activations_of_many_are_the_reference_s(tokens: int, numbers: int) -> None:
    both = torch.randn(1, tokens, 2 * numbers).half().to(DEVICE)
    gate, up = both.chunk(2, -1)
    close(triton.activated(both), torch.nn.functional.silu(gate) * up)


def test_inputs_may_lie_anywhere() -> None:
    x, weight, _ = data(3, 2)
    close(triton.product(x.transpose(0, 1), weight), reference.linear(x.transpose(0, 1), weight))


def test_a_token_s_sums_leave_others_alone() -> None:
    x, weight, _ = data(4)
    spoiled = x.clone()
    spoiled[2] = torch.nan
    found = triton.product(spoiled, weight)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], triton.product(x, weight)[[0, 1, 3]])


def test_what_is_not_served_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_on_hopper", lambda device: True)
    x, weight, _ = data(2)
    assert triton.unserved(x, weight) is None
    assert "float32" in triton.unserved(x.float(), weight)
    assert "(200, 1024)" in triton.unserved(x, weight[:200])
    assert "(256, 512)" not in str(triton.unserved(x[:, :512], weight[:, :512].contiguous()))
    assert "(256, 500)" in triton.unserved(x[:, :500], weight[:, :500].contiguous())
    assert "rows" in triton.unserved(x[:, ::2], weight[:, ::2])
    assert "no tokens" in triton.unserved(x[:0], weight)
    monkeypatch.undo()
    assert DEVICE == "cuda" or "device" in triton.unserved(x, weight)


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65])
def test_many_tokens_are_pytorch_s(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_on_hopper", lambda device: True)
    taken: list[bool] = []
    product = triton.product

    def counted(*args, gated: bool = False):
        taken.append(gated)
        return product(*args, gated=gated)

    monkeypatch.setattr(triton, "product", counted)
    x, weight, bias = data(tokens)
    close(triton.linear(x, weight, bias), reference.linear(x, weight, bias))
    _, weight, _ = data(tokens, gate=True)
    close(triton.gated(x, weight), reference.gated(x, weight))
    assert taken == [False] * (tokens <= 16) + [True] * (tokens <= 64)


def test_torch_compile_keeps_them_whole() -> None:
    """As a layer's end has them; how many tokens there are is not in the code."""
    x, weight, _ = data(1, 5, gate=True)
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(torch.ops.kvfold.gated, backend=backend, dynamic=True)
    for tokens in (5, 3, 4):
        part = x[:, :tokens].clone()
        close(compiled(part, weight), reference.gated(part, weight))
    assert set(seen) == {"kvfold.gated"}
    torch._dynamo.reset()
    fake = torch.ops.kvfold.gated(x.to("meta"), weight.to("meta"))
    assert fake.shape == (1, 5, OUTPUTS) and fake.is_meta
    assert torch.ops.kvfold.linear(x.to("meta"), weight.to("meta"), None).shape == (1, 5, 512)
