"""The share of the cache that keeps a share of a task's accuracy (ZACK §6.3), and the share that a
perplexity budget finds.

    python benchmarks/accuracy_budget.py --tasks piqa.jsonl arc_easy.jsonl --statistics made \\
        --json accuracy.json

Three ways to choose ranks: `zack` (one removal rate for all heads), `zack-equal` (ZACK/AC of §6.5:
the same directions, equal ranks), and `zdc`. Every size that a search tries answers the first
questions of a file once, for all shares. `searches` is what `evaluation.accuracy.search_share`
finds. Several questions are packed into one sequence, where each choice sees its context alone:
`--check N` compares N answers with those of `kvfold eval`. The file is written after every size,
and the same command goes on from there.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold import recipes
from kvfold.cli.common import versions
from kvfold.compression.compressor import Compressor, Prepared
from kvfold.config import Recipe
from kvfold.evaluation.accuracy import Scores, check_original, search_share
from kvfold.evaluation.budget import held_out
from kvfold.evaluation.dense import inference
from kvfold.evaluation.perplexity import perplexity
from kvfold.evaluation.tasks import read_tasks
from kvfold.evaluation.tasks.base import Prompt, Task, TaskAnswer
from kvfold.evaluation.tasks.run import run_tasks
from kvfold.hub.loading import default_device, load, load_tokenizer
from kvfold.utils.files import finite
from kvfold.utils.search import search

RECIPES = {
    "zack": recipes.get("zack"),
    "zack-equal": Recipe(name="zack-equal", basis="zack", ranks="uniform"),
    "zdc": recipes.get("zdc"),
}
DECISIVE = ("model", "rows", "align", "calib_tokens", "windows", "ctx")  # what answers depend on
# Tokens of a packed sequence, at most, but for one long question. A GPU waits for launches.
PACKED = 1024 if default_device() == "cuda" else 256


class Questions:
    """The first questions of a file, asked through a model, several in one sequence."""

    def __init__(self, path: Path, count: int, tokenizer: Any) -> None:
        self.tasks: list[Task] = read_tasks(path)[:count]
        self.tokenizer = tokenizer
        self.prompts = [task.prompts(tokenizer) for task in self.tasks]

    @property
    def guessed(self) -> float:
        return sum(task.guessed for task in self.tasks) / len(self.tasks)

    def scores(self, model: Any) -> Scores:
        """The main score of every question."""
        prompts = [prompt for own in self.prompts for prompt in own]
        answers: list[TaskAnswer] = []
        with inference(model):
            for pack in _packs(prompts):
                answers += _answers(model, pack)
        scores, start = [], 0
        for task, own in zip(self.tasks, self.prompts, strict=True):
            mine = answers[start : start + len(own)]
            scores.append(task.score(self.tokenizer, mine)[task.scores[0]])
            start += len(own)
        return tuple(scores)


def _size(prompt: Prompt) -> int:
    return len(prompt.context) + sum(len(ending) - 1 for ending in prompt.endings)


def _packs(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts in order, of at most PACKED tokens together."""
    pack: list[Prompt] = []
    for prompt in prompts:
        if pack and sum(map(_size, pack)) + _size(prompt) > PACKED:
            yield pack
            pack = []
        pack.append(prompt)
    yield pack


def _answers(model: Any, prompts: Sequence[Prompt]) -> list[TaskAnswer]:
    """Log-likelihoods of the endings of prompts, from one forward pass over all of them."""
    total = sum(map(_size, prompts))
    sees = torch.zeros(total, total, dtype=torch.bool)
    ids, positions, start = list[int](), list[int](), 0
    places: list[list[tuple[list[int], list[int]]]] = []  # rows that predict an ending, its tokens
    for prompt in prompts:
        first, length = start, len(prompt.context)
        ids += prompt.context
        positions += range(length)
        sees[first : first + length, first : first + length] = _causal(length)
        start += length
        own = []
        for ending in prompt.endings:
            size = len(ending) - 1  # the last token predicts nothing
            ids += ending[:-1]
            positions += range(length, length + size)
            sees[start : start + size, first : first + length] = True
            sees[start : start + size, start : start + size] = _causal(size)
            own.append(([first + length - 1, *range(start, start + size)], ending))
            start += size
        places.append(own)
    mask = torch.zeros(total, total).masked_fill(~sees, torch.finfo(torch.float32).min)
    hidden = model.model(
        input_ids=torch.tensor([ids], device=model.device),
        attention_mask=mask[None, None].to(model.device),
        position_ids=torch.tensor([positions], device=model.device),
        use_cache=False,
    ).last_hidden_state[0]
    answers = []
    for own in places:
        values = []
        for rows, ending in own:
            logits: Tensor = model.lm_head(hidden[rows]).float().log_softmax(-1)
            values.append(float(logits[range(len(ending)), ending].sum()))
        answers.append(TaskAnswer(log_likelihoods=values, tokens=[]))
    return answers


def _causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


class Results:
    """What was measured, in a file that is written after every size."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self.path = path
        self.record: dict[str, Any] = {**conditions, "answers": {}, "perplexity": {}}
        if path.exists():
            before = json.loads(path.read_text())
            if any(before[name] != conditions[name] for name in DECISIVE):
                raise ValueError(f"{path} was measured with other settings: name a new file")
            self.record |= {name: before[name] for name in ("answers", "perplexity")}

    def once(self, table: str, row: str, column: str, measure: Callable[[], Any]) -> Any:
        """A value of the file, or what `measure` returns, which is then in the file."""
        values = self.record[table].setdefault(row, {})
        if column not in values:
            begin = time.perf_counter()
            values[column] = measure()
            print(table, row, column, f"{time.perf_counter() - begin:.0f} s", flush=True)
            self.write()
        return values[column]

    def write(self) -> None:
        self.path.write_text(json.dumps(finite(self.record), indent=1) + "\n")


class Measuring:
    """The original, and the sizes of every recipe, each folded when it is first asked for."""

    def __init__(self, given: argparse.Namespace, results: Results) -> None:
        self.given, self.results = given, results
        self.tokenizer = load_tokenizer(given.model)
        self.model = load(given.model, dtype="float32")
        self.questions = {
            path.stem: Questions(path, given.rows, self.tokenizer) for path in given.tasks
        }
        self._prepared: dict[str, Prepared] = {}

    def prepared(self, name: str) -> Prepared:
        if name not in self._prepared:
            recipe = RECIPES[name]
            statistics = self.given.statistics / f"{'zdc' if recipe.reduce else 'zack'}.safetensors"
            compressor = Compressor(
                self.model, recipe, self.tokenizer, max_tokens=self.given.calib_tokens
            )
            self._prepared = {name: compressor.prepare(statistics)}  # of one recipe at a time
        return self._prepared[name]

    def stored(self, name: str, keep: float) -> dict[str, Any]:
        """What a token of a size stores."""
        spec = self.prepared(name).plan(keep, self.given.align)
        ranks = [latent.rank for layer in spec.layers for latent in layer.latents]
        return {
            "kept_fraction": spec.kept_fraction,
            "bytes_per_token": spec.bytes_per_token(),
            "least_rank": min(ranks),
            "largest_rank": max(ranks),
        }

    def folded(self, name: str, keep: float) -> Any:
        prepared = self.prepared(name)
        return prepared.folded_copy(prepared.plan(keep, self.given.align))

    def answers(self, name: str, task: str, keep: float | None) -> Scores:
        """The scores of the questions of a task; keep: None for the original."""

        def measure() -> list[int]:
            model = self.model if keep is None else self.folded(name, keep)
            return [int(x) for x in self.questions[task].scores(model)]

        row = f"{name}, {task}"
        column = "" if keep is None else f"{keep:g}"
        return tuple(map(float, self.results.once("answers", row, column, measure)))

    def ratio(self, name: str, keep: float) -> float:
        """The perplexity on held-out text over the original's."""

        def measure(model: Any) -> float:
            ids = held_out(self.prepared(name).compressor, self.given.ctx, self.given.windows)
            return perplexity(model, ids).perplexity

        table = "perplexity"
        original = self.results.once(table, "original", "", lambda: measure(self.model))
        size = self.results.once(table, name, f"{keep:g}", lambda: measure(self.folded(name, keep)))
        return float(size / original)

    def search(self, name: str, task: str, share: float) -> dict[str, Any]:
        """The row of a recipe at a share of a task's accuracy."""
        original = self.answers("original", task, None)
        check_original(original, self.questions[task].guessed, share)
        keep, kept = search_share(
            lambda keep: self.answers(name, task, keep), original, share, **self.options
        )
        budget = f"accuracy>={share:g}"
        row = {"recipe": name, "task": task, "budget": budget, "keep": keep}
        return row | kept.record() | self.stored(name, keep)

    def search_perplexity(self, name: str, limit: float) -> dict[str, Any]:
        """The row of a recipe at a ratio of perplexities."""
        keep, ratio = search(lambda keep: self.ratio(name, keep), limit, **self.options)
        row = {"recipe": name, "task": "perplexity", "budget": f"ppl<={limit:g}", "keep": keep}
        return row | {"limit": limit, "ratio": ratio} | self.stored(name, keep)

    @property
    def options(self) -> dict[str, float]:
        return {"low": self.given.low, "tolerance": self.given.tolerance}

    def check(self, count: int) -> None:
        """Print how many of the first answers are those of `kvfold eval`, compressed and not."""
        for model in (self.model, self.folded("zack", 0.8)):
            for name, questions in self.questions.items():
                few = questions.tasks[:count]
                theirs = run_tasks(model, self.tokenizer, few).main_scores
                questions.prompts = questions.prompts[:count]
                questions.tasks = few
                ours = questions.scores(model)
                same = sum(x == y for x, y in zip(ours, theirs, strict=True))
                print(f"{name}: {same} of {count} answers as `kvfold eval` has them", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="reference:smollm2")
    parser.add_argument("--tasks", nargs="+", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200, help="first questions of each file")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.95, 0.99])
    parser.add_argument("--ratios", nargs="*", type=float, default=[1.05, 1.01])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--align", type=int, default=1)
    parser.add_argument("--calib-tokens", type=int, default=8192)
    parser.add_argument("--statistics", type=Path, required=True, help="folder for statistics")
    parser.add_argument("--windows", type=int, default=4, help="of held-out text")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--low", type=float, default=0.5, help="smallest share that is tried")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--check", type=int, metavar="N")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    given.statistics.mkdir(parents=True, exist_ok=True)
    names = ("model", "rows", "align", "calib_tokens", "windows", "ctx", "low", "tolerance")
    conditions = {name: getattr(given, name) for name in names}
    results = Results(given.json, conditions | {"versions": versions(default_device())})
    measuring = Measuring(given, results)
    if given.check:
        measuring.check(given.check)
        return
    searches: list[dict[str, Any]] = []
    results.record["searches"] = searches
    for task in measuring.questions:
        for name in given.recipes:
            for share in given.shares:
                searches.append(measuring.search(name, task, share))
                results.write()
    for name in given.recipes:
        for limit in given.ratios:
            searches.append(measuring.search_perplexity(name, limit))
            results.write()
    for row in searches:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
