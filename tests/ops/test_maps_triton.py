"""Maps around attention: plain PyTorch against the formula, the kernel against plain PyTorch.
Without a GPU the kernel runs in Triton's interpreter."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.ops.maps import EntryMaps, OutputMaps, outputs, reference, triton
from model_types import tiny
from sinks_cases import STEPS, expected, far, logits_of, maps_of
from steps import backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch):
    """Maps are packed for the kernel wherever it runs."""
    for use in backends(monkeypatch):
        use("triton")
        yield


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer's shape. keys, values: ranks of its latents."""

    queries: int = 2
    d: int = 32
    dv: int = 32
    keys: tuple[int, ...] = (16, 16, 16, 16)
    values: tuple[int, ...] = (32, 32, 32, 32)

    @property
    def heads(self) -> int:
        return len(self.keys)

    def entry_maps(self, dtype: torch.dtype = torch.float16) -> EntryMaps:
        each = self.heads // len(self.values) * self.dv
        keys, values = max(self.keys), max(self.values)
        return EntryMaps(
            key_up=within(self.keys, normal(self.heads, self.d, keys), dtype),
            key_down=within(self.keys, normal(self.heads, self.d, keys), dtype),
            key_shift=within(self.keys, normal(self.heads, 1, keys), dtype)[:, 0],
            value_down=within(self.values, normal(len(self.values), each, values), dtype),
            value_shift=within(self.values, normal(len(self.values), 1, values), dtype)[:, 0],
            key_ranks=self.keys,
            value_ranks=self.values,
            head_dim=self.dv,
            queries=self.queries,
        )

    def output_maps(self, dtype: torch.dtype = torch.float16) -> OutputMaps:
        ranks = tuple(x for x in self.values for _ in range(self.heads // len(self.values)))
        return OutputMaps(
            value_up=within(ranks, normal(self.heads, self.dv, max(ranks)), dtype),
            mean=normal(self.heads, self.dv).to(DEVICE, dtype),
            ranks=ranks,
            queries=self.queries,
        )

    def inputs(self, tokens: int) -> list[Tensor]:
        """Slices of one buffer, as a model's merged projection gives them, of which the numbers
        beside it are not finite."""
        sizes = (self.heads * self.queries * self.d, self.heads * self.d, self.heads * self.dv)
        whole = torch.full((tokens + 1, sum(sizes) + 16), torch.nan)
        whole[:tokens, : sum(sizes)] = normal(tokens, sum(sizes))
        parts = whole.half().to(DEVICE)[:tokens, : sum(sizes)].split(sizes, 1)
        widths = self.d, self.d, self.dv
        return [x.unflatten(1, (-1, n)) for x, n in zip(parts, widths, strict=True)]


SHAPES = {
    "a latent a head": Shape(),
    "unequal ranks": Shape(keys=(16, 1, 24, 9), values=(40, 3, 16, 17)),
    "two heads a latent": Shape(values=(48, 24)),
    "a latent for all": Shape(values=(88,), queries=4),
    "80": Shape(d=80, dv=80, values=(72, 130)),
    "256": Shape(d=256, dv=256, keys=(40, 64), values=(96,), queries=3),
    "unlike widths": Shape(d=48, dv=32, keys=(48, 20), values=(32, 32)),
    "odd": Shape(d=20, dv=20, keys=(20, 7), values=(33,), queries=1),
    "keys store nothing": Shape(keys=(0, 0), values=(32, 8)),
    "values store nothing": Shape(keys=(16, 8), values=(0, 0)),
    "a head stores nothing": Shape(keys=(16, 0), values=(0, 24)),
}


def normal(*size: int) -> Tensor:
    return torch.randn(*size) / max(1, size[-2] if len(size) > 2 else 1) ** 0.5


def within(ranks: tuple[int, ...], x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [n, .., r] with zeros beyond every latent's rank."""
    inside = torch.arange(x.shape[-1]) < torch.tensor(ranks)[:, None, None]
    return (x * inside).to(DEVICE, dtype)


def exact(maps: Any) -> Any:
    """The same maps in float64."""
    tensors = {k: x.double() for k, x in vars(maps).items() if isinstance(x, Tensor)}
    return replace(maps, **tensors)


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == torch.float16
    torch.testing.assert_close(found.double(), wanted.double(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("tokens", [1, 3, 17, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_entries_and_queries_are_the_reference_s(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    maps, inputs = SHAPES[name].entry_maps(), SHAPES[name].inputs(tokens)
    found = triton.score_space(maps, *inputs)
    wanted = reference.score_space(exact(maps), *(x.double() for x in inputs))
    for x, y in zip(found, wanted, strict=True):
        close(x, y)
    assert found[0].transpose(0, 1).is_contiguous() and found[1].is_contiguous()
    alone, nothing = triton.score_space(maps, inputs[0], None, None)
    assert nothing is None
    close(alone, wanted[0])  # tiles of another size may round otherwise


@pytest.mark.parametrize("tokens", [1, 3, 17, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_the_reference_s(name: str, tokens: int) -> None:
    """Of a token of each sequence, and of a chunk of one; into memory that lies between others."""
    torch.manual_seed(0)
    maps = SHAPES[name].output_maps()
    heads, rank = len(maps.ranks) * maps.queries, maps.value_up.shape[2]
    steps = normal(tokens, heads, 1, rank).to(DEVICE, torch.float16)
    chunk = steps[:, :, 0].transpose(0, 1)[None]
    wanted = reference.outputs(exact(maps), steps.double())
    close(triton.outputs(maps, steps), wanted)
    close(triton.outputs(maps, chunk), wanted.transpose(0, 1))
    whole = torch.full((tokens + 2, maps.output_width), torch.nan, dtype=torch.float16)
    whole = whole.to(DEVICE)
    into = whole[1:-1, None]
    assert triton.outputs(maps, steps, into) is into
    close(into, wanted)
    assert whole[0].isnan().all() and whole[-1].isnan().all()


def test_the_reference_is_the_formula() -> None:
    """Latent by latent, head by head."""
    torch.manual_seed(0)
    shape = SHAPES["unequal ranks"]
    maps, (query, key, value) = exact(shape.entry_maps()), (x.double() for x in shape.inputs(5))
    q, entries = reference.score_space(maps, query, key, value)
    keys = [
        key[:, i] @ maps.key_down[i, :, :rank] - maps.key_shift[i, :rank]
        for i, rank in enumerate(shape.keys)
    ]
    values = [
        value[:, i] @ maps.value_down[i, :, :rank] - maps.value_shift[i, :rank]
        for i, rank in enumerate(shape.values)
    ]
    torch.testing.assert_close(entries, torch.cat(keys + values, 1))
    wanted = [query[:, i] @ maps.key_up[i // shape.queries] for i in range(query.shape[1])]
    torch.testing.assert_close(q, torch.stack(wanted))
    maps = exact(shape.output_maps())
    out = torch.randn(5, 8, 1, 40, dtype=torch.float64, device=DEVICE)
    wanted = [out[:, i, 0] @ maps.value_up[i // 2].mT + maps.mean[i // 2] for i in range(8)]
    torch.testing.assert_close(reference.outputs(maps, out)[:, 0], torch.cat(wanted, 1))
    mapped = torch.randn(1, 8, 5, 32, dtype=torch.float64, device=DEVICE)
    wanted = mapped[0].transpose(0, 1) + maps.mean.repeat_interleave(2, 0)
    torch.testing.assert_close(outputs(maps, mapped, mapped=True)[0], wanted.flatten(1))


@pytest.mark.parametrize("tokens", [0, triton.FEW + 1])
def test_other_numbers_of_tokens_are_pytorch_s(tokens: int) -> None:
    torch.manual_seed(0)
    shape = SHAPES["a latent for all"]
    maps, inputs = shape.entry_maps(), shape.inputs(tokens)
    for x, y in zip(
        triton.score_space(maps, *inputs), reference.score_space(maps, *inputs), strict=True
    ):
        assert torch.equal(x, y)
    out = torch.zeros(tokens, 16, 1, 88, dtype=torch.float16, device=DEVICE)
    assert triton.outputs(shape.output_maps(), out).shape == (tokens, 1, 16 * 32)


def test_gradients_pass_through() -> None:
    torch.manual_seed(0)
    shape = SHAPES["a latent for all"]
    inputs = [x.clone().requires_grad_() for x in shape.inputs(3)]
    q, entries = triton.score_space(shape.entry_maps(), *inputs)
    out = torch.zeros(3, 16, 1, 88, dtype=torch.float16, device=DEVICE).requires_grad_()
    loss = q.sum() + entries.sum() + triton.outputs(shape.output_maps(), out).sum()
    loss.backward()
    assert all(x.grad is not None and x.grad.any() for x in (*inputs, out))


def test_steps_of_other_sequences_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch's constants are those of its layer and of the tokens of a program."""

    compiled: set[str] = set()

    class Counted:
        def __getitem__(self, grid):
            return lambda *args, **constants: compiled.add(str(constants))

    monkeypatch.setattr(triton, "maps_kernel", Counted())
    shape = SHAPES["a latent for all"]
    maps, outs = shape.entry_maps(), shape.output_maps()
    for tokens in range(1, 12):
        triton.score_space(maps, *shape.inputs(tokens))
    assert len(compiled) == 1
    compiled.clear()
    for tokens in (1, 3, 5, 11, 200):
        triton.outputs(outs, torch.zeros(tokens, 16, 1, 88, dtype=torch.float16, device=DEVICE))
    assert len(compiled) == 3  # 16, 32 and 64 inputs of a program


def test_launches_are_cut_for_a_large_gpu() -> None:
    """Of Llama-3.1-8B's shape: enough programs in both launches, and nothing filled up."""
    shape = Shape(queries=4, d=128, dv=128, keys=(64,) * 8, values=(704,))
    entries, outs = shape.entry_maps().packed, shape.output_maps().packed
    assert (entries.depth, len(entries.table), entries.num_query_tiles) == (128, 108, 32)
    assert (outs.depth, len(outs.table)) == (64, 64)
    assert entries.weights.numel() == 2 * 8 * 128 * 64 + 1024 * 704
    assert outs.weights.numel() == 1024 * 704


def test_an_engine_s_steps_take_both_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Means of keys and values included: as transformers with the same maps attached."""
    torch.manual_seed(0)
    model = tiny("qwen2")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias.add_(1.0)
    made = maps_of(model, 0.5, tmp_path)
    model, ids = model.half().to(DEVICE), [[5, 9, 22, 7, 31, 8, 4], [70, 3, 5, 90, 11]]
    wanted = expected(model, made, ids)
    launches: list[int] = []
    kernel = triton.maps_kernel

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(triton, "maps_kernel", Counted())
    assert all(maps.value_mean.abs().max() > 0.5 for maps in made.maps.values())
    assert far(logits_of(model, made, ids), wanted) < 0.01
    assert len(launches) >= 2 * 2 * STEPS
