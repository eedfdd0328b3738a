"""A runner driven by hand on tiny fp16 models, by the reference or by kernels."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold import compress, recipes
from kvfold.attention.cpu_paged import CpuPaged
from kvfold.attention.fallback import Fallback
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig, Recipe
from kvfold.engine.requests.request import Batch, Request, SamplingParams, ScheduledChunk
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.evaluation.session import Session
from kvfold.models.families import family_of
from kvfold.ops.backend import use_triton
from kvfold.ops.store import gather
from models import tiny, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """For a fixture: a function that sets the backend by name."""

    def use(name: str) -> None:
        monkeypatch.setenv("KVFOLD_BACKEND", name)
        use_triton.cache_clear()

    yield use
    use_triton.cache_clear()


def folded(recipe: Recipe | None, align: int = 8, layers: int = 1, name: str = "llama3-scaling"):
    """A tiny fp16 model of so many layers, folded as a recipe says to half of its numbers."""
    model: Any = tiny(name)
    body = getattr(model.model, "decoder", model.model)  # OPT's
    body.layers, model.config.num_hidden_layers = body.layers[:layers], layers
    if recipe is not None:
        wanted = Compressor(model, recipe).needs
        statistics = calibrate(model, family_of(model.config), tokens(8, 64), wanted)
        model = compress(model, recipe, statistics=statistics, keep=0.5, align=align, fold=True)
    return torch.nn.Module.half(model).to(DEVICE)  # transformers refuses it for compressed models


def even(name: str) -> Recipe:
    """A recipe that keeps as much of every head."""
    return replace(recipes.get(name), ranks="uniform", equal_ranks=False, whole_share=0.0)


def runner_of(model, slots: int = 3, **settings) -> ModelRunner:
    config = CacheConfig(page=16, kv_bytes=2**20, **settings)
    return build_runner(model, config, num_slots=slots, max_tokens=96)


def logits_of(session: Session, ids: list[int], **how) -> Tensor:
    """Append tokens to a sequence of its own; logits [T, V]."""
    return torch.cat(list(session.chunks(torch.tensor([ids]), **how)), 1)[0]


def sequences_of(runner: ModelRunner, *prompts: int, more: int = 30) -> list[Request]:
    """Sequences with slots, their prompts of so many tokens and what they go on with."""
    found = []
    for i, length in enumerate(prompts):
        ids = tokens(1, length + more, seed=i)[0].tolist()
        one = Request(id=i, token_ids=ids, num_prompt=length, sampling=SamplingParams())
        one.slot, one.num_prefill = runner.pool.allocate_slot(), length
        found.append(one)
    return found


def stored_rows(runner: ModelRunner, sequences: Iterable[Request]) -> list[Tensor]:
    """Of each layer, the rows [B, T, R] of sequences as they come back."""
    slots, found = torch.tensor([x.open_slot for x in sequences], device=DEVICE), []
    for where in runner.pool.layout.layer_groups:
        pages = runner.pool.pages(where)
        lengths = pages.lengths[slots]
        found.append(gather(pages, slots, lengths, torch.float32, int(lengths.max())).rows)
    return found


def step(runner: ModelRunner, *work: tuple[Request, int], every: bool = False) -> Tensor:
    """Logits of the last of the next tokens of every sequence, or of every token."""
    runner.pool.extend([x.open_slot for x, _ in work], [count for _, count in work])
    chunks = []
    for x, count in work:
        part = tuple(x.token_ids[x.num_computed : x.num_computed + count])
        chunks.append(
            ScheduledChunk(request=x, start=x.num_computed, tokens=part, wants_logits=True)
        )
    run = runner.run_all if every else runner.run
    found = run(Batch(chunks=tuple(chunks))).clone()
    for x, count in work:
        x.num_computed += count
    return found


def broken(
    monkeypatch: pytest.MonkeyPatch, layer: int, rows: int, factor: float = torch.nan
) -> None:
    """Attention of a layer comes out so many times too large where a sequence has so many rows, or
    more."""
    for backend in (Fallback, CpuPaged):

        def wrong(self, maps, part, q, into=None, *, attend=backend.attend):
            out = attend(self, maps, part, q, into)
            bad = maps.index == layer and int(part.positions.max()) + 1 >= rows
            return out * factor if bad else out

        monkeypatch.setattr(backend, "attend", wrong)
