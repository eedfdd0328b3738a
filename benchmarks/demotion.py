"""Answered tokens a second if the page pool is too small, and the loss that demotion causes.

    OMP_NUM_THREADS=2 python benchmarks/demotion.py reference:smollm2 --json demotion.json

The same requests run with a pool that holds all of them, and with two thirds of it: there pages are
demoted from 8 to 4 bits, or requests are pre-empted. Prompts and answers are consecutive text of
the package. For the loss the engine is made to answer with the text itself, so that every run
scores the same tokens; the loss is compared with that of the whole pool in 8 bits, request by
request, beside 4 bits from the start.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold import LLM, SamplingParams
from kvfold.bench.synthetic_engine import random_model
from kvfold.calibration.text import calibration_text
from kvfold.cli.bench_common import RANDOM
from kvfold.cli.common import versions
from kvfold.engine.requests.request import Batch
from kvfold.evaluation.perplexity import mean_and_se
from kvfold.hub.loading import load, load_tokenizer
from kvfold.utils.files import write_json

SHARE = 2 / 3  # of the pool that all requests need
RUNS: dict[str, dict[str, Any]] = {
    "whole pool": {"bits": 8},
    "demotion": {"bits": 8, "when_full": "demote"},
    "pre-emption": {"bits": 8},
    "4 bits from the start": {"bits": 4},
}
WHOLE = ("whole pool", "4 bits from the start")


class Forced:
    """Stands before an engine's runner: makes every request answer with its text, and keeps the
    loss of each answered token, in nats."""

    def __init__(self, llm: LLM, texts: Sequence[Sequence[int]]) -> None:
        self.run, self.texts = llm.runner.run, texts
        self.losses: dict[int, dict[int, float]] = {i: {} for i in range(len(texts))}
        vars(llm.runner)["run"] = self

    def __call__(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        assert tokens is None, "a step launched ahead does not wait for the text"
        logits = self.run(batch)
        chunks = batch.with_logits
        answers = torch.tensor(
            [self.texts[x.request.id][x.end] for x in chunks], device=logits.device
        )
        losses = torch.nn.functional.cross_entropy(logits.float(), answers, reduction="none")
        for chunk, loss in zip(chunks, losses.tolist(), strict=True):
            self.losses[chunk.request.id][chunk.end] = loss
        return torch.full_like(logits, -100.0).scatter_(1, answers[:, None], 100.0)


def texts_of(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """`count` texts of `length` tokens, spread over the packaged text."""
    ids = tokenizer(calibration_text(None, tokenizer))["input_ids"]
    step = (len(ids) - length) // max(count - 1, 1)
    assert step > 0, f"the packaged text has only {len(ids)} tokens: ask for shorter requests"
    return [ids[i * step : i * step + length] for i in range(count)]


def engine(model: Any, tokenizer: Any, name: str, count: int, length: int, **settings: Any) -> LLM:
    """An engine for a run. The pool is the same for both runs that are short of memory."""
    sizes: dict[str, Any] = {"max_sequences": count, "max_tokens": length}
    make = {"tokenizer": tokenizer, "prefix_caching": False, **sizes, **settings, **RUNS[name]}
    if name in WHOLE:
        return LLM(model, **make)
    layout = LLM(model, **make | {"when_full": "pre-empt"}).runner.pool.layout
    need = layout.page_bytes * count * -(-length // layout.page)
    return LLM(model, **make, kv_bytes=int(need * SHARE))


def run(llm: LLM, texts: Sequence[Sequence[int]], outputs: int) -> dict[str, Any]:
    """Answer all texts at once, `outputs` tokens each."""
    sampling = SamplingParams(max_new_tokens=outputs, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([list(x[:-outputs]) for x in texts], sampling)
    seconds, scheduler = time.perf_counter() - start, llm.engine.scheduler
    return {
        "pool_bytes": llm.runner.pool.num_bytes,
        "seconds": seconds,
        "answered_tokens_per_s": len(texts) * outputs / seconds,
        "preemptions": scheduler.num_preemptions,
        "demotions": scheduler.num_demotions,
        "steps": scheduler.num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--outputs", type=int, default=256)
    parser.add_argument("--no-loss", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    length = given.prompt + given.outputs
    if given.model.startswith(RANDOM):
        shape, device = given.model[len(RANDOM) :], torch.device(given.device)
        model, tokenizer = random_model(shape, None, device), None
        draw, size = torch.Generator().manual_seed(0), (given.requests, length)
        texts = torch.randint(model.config.vocab_size, size, generator=draw).tolist()
    else:
        model, tokenizer = load(given.model, device=given.device), load_tokenizer(given.model)
        texts = texts_of(tokenizer, given.requests, length)
    rows: dict[str, dict[str, Any]] = {}
    losses: dict[str, dict[int, dict[int, float]]] = {}
    for name in RUNS:
        make = model, tokenizer, name, given.requests, length
        if name != "4 bits from the start":
            llm = engine(*make)
            llm.generate([x[:16] for x in texts], SamplingParams(max_new_tokens=4))  # warm up
            rows[name] = run(llm, texts, given.outputs)
        if not given.no_loss and name != "pre-emption":
            llm = engine(*make)
            llm.engine.async_scheduling = False
            forced = Forced(llm, texts)
            found = run(llm, texts, given.outputs)
            losses[name] = forced.losses
            rows.setdefault(name, {})["forced"] = found
            change = [
                (torch.tensor([*own.values()]) - torch.tensor([base[i] for i in own])).mean()
                for own, base in zip(
                    forced.losses.values(), losses["whole pool"].values(), strict=True
                )
            ]
            mean, error = mean_and_se(torch.stack(change).tolist())
            rows[name] |= {"added_loss_nats": mean, "added_loss_se": error}
        print(name, rows.get(name), flush=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
    report = {
        "benchmark": "demotion",
        "settings": settings,
        "versions": versions(given.device),
        "rows": rows,
    }
    write_json(given.json, report)


if __name__ == "__main__":
    main()
