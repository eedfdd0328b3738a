"""What bits and eviction cost in quality, on the paged cache: one section of the tables at a time.

    python benchmarks/cache_quality.py --section policies --text wiki.txt --json policies.json

Sections: policies (each at 2, 4, 8, 16 times fewer tokens), metric (KV-Compress Table 2: power,
window, all queries), bits (with and without rotation, Palu Table 7; KIVI), factor (dimensions and
bits together, then eviction on top). Rows are written as they are measured; those already in the
file are kept.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfold import recipes
from kvfold.cache.eviction import policies
from kvfold.cli.common import named_texts, versions
from kvfold.cli.evaluate import finite
from kvfold.compression.calibration_text import CALIBRATION_TOKENS
from kvfold.compression.compressor import Compressor, Prepared
from kvfold.config import CacheConfig
from kvfold.engine.build import build_runner
from kvfold.evaluation.needle import evaluate_needle
from kvfold.evaluation.paged import PagedReader, paged_perplexity
from kvfold.evaluation.run import QUESTION_ROOM, text_windows
from kvfold.files import write_json
from kvfold.loading import load, load_tokenizer
from kvfold.models.copies import shared_copy

KEEPS = (0.5, 0.25, 0.125, 0.0625)
METRIC = {  # edits of kv-compress
    "w8-L2": {},
    "w8-L1": {"power": 1},
    "w32-L2": {"window": 32},
    "w32-L1": {"window": 32, "power": 1},
    "full-L2": {"window": None, "exclude": 10, "pool": 1, "recent": 32},
    "full-L1": {"window": None, "exclude": 10, "pool": 1, "recent": 32, "power": 1},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: how tokens are stored, and how many times smaller dims and bits were planned."""

    name: str
    cache: CacheConfig
    edit: dict[str, Any] = dataclasses.field(default_factory=dict)
    factor: float | None = None


def cases(section: str) -> Iterator[Case]:
    evict = {"page": 16}
    if section == "policies":
        for name in policies.POLICIES:
            for keep in KEEPS:
                cache = CacheConfig(evict=name, keep_tokens=keep, **evict)
                yield Case(name=f"{name} {keep:g}", cache=cache)
    if section == "metric":
        for name, edit in METRIC.items():
            for keep in KEEPS[1:]:
                cache = CacheConfig(evict="kv-compress", keep_tokens=keep, **evict)
                yield Case(name=f"{name} {keep:g}", cache=cache, edit=edit)
    if section == "bits":
        for bits in (8, 4, 3, 2):
            for zeros in (False, True):
                for rotate in (True, False):
                    cache = CacheConfig(bits=bits, zeros=zeros, rotate=rotate)
                    turned = "rotated" if rotate else "as they are"
                    zero = ", zeros" if zeros else ""
                    yield Case(name=f"{bits} bits, {turned}{zero}", cache=cache)
            yield Case(name=f"{bits} bits, KIVI", cache=CacheConfig(bits=bits, format="kivi"))
    if section == "factor":
        for factor in (8, 10, 14, 18, 24):
            yield Case(name=f"factor {factor}", cache=CacheConfig(), factor=factor)
        for factor, keep in ((14, 0.25), (28, 0.5)):
            cache = CacheConfig(evict="kv-compress", keep_tokens=keep, **evict)
            for window in (8, 32):
                name = f"tokens {keep:g}, factor {factor}, w{window}"
                yield Case(name=name, cache=cache, factor=factor, edit={"window": window})


class Bench:
    """A model, its texts and questions; the same for every case."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model = load(arguments.model, dtype="float32")
        self.tokenizer = load_tokenizer(arguments.model)
        self.contexts, self.lengths = arguments.contexts, arguments.lengths
        most = arguments.windows * arguments.ctx
        texts = named_texts([Path(path) for path in arguments.text])
        self.texts = text_windows(
            self.model, self.tokenizer, texts, ctx=arguments.ctx, max_tokens=most
        )
        self.prepared: Prepared | None = None
        self.stats, self.calib_tokens = arguments.stats, arguments.calib_tokens

    def row(self, case: Case) -> dict[str, Any]:
        begin = time.perf_counter()
        longest = max([*self.lengths, *(ids.shape[1] for ids in self.texts.values())])
        limit = min(longest + QUESTION_ROOM, self.model.config.max_position_embeddings)
        runner = build_runner(self._model(case), case.cache, num_slots=1, max_tokens=limit)
        if case.edit:
            runner.policy = dataclasses.replace(runner.policy, **case.edit)
        found: dict[str, Any] = {"name": case.name, "cache": dataclasses.asdict(case.cache)}
        found["texts"] = {}
        for name, ids in self.texts.items():
            result, held = paged_perplexity(runner, ids, scored_from=ids.shape[1] // 2)
            found["texts"][name] = dataclasses.asdict(result)
            found |= dataclasses.asdict(held)
        for asked, agnostic in (("after", True), ("before", False)):
            if agnostic or case.cache.evict:
                found[f"needle_{asked}"] = self._needle(runner, agnostic)
        return found | {"seconds": time.perf_counter() - begin}

    def _model(self, case: Case) -> Any:
        if case.factor is None:
            return shared_copy(self.model)
        if self.prepared is None:
            small, most = recipes.get("small"), self.calib_tokens
            compressor = Compressor(self.model, small, self.tokenizer, max_tokens=most)
            self.prepared = compressor.prepare(self.stats)
        return self.prepared.folded_copy(self.prepared.plan_factor(case.factor, 1))

    def _needle(self, runner: Any, agnostic: bool) -> dict[int, Any]:
        reader = PagedReader(runner, agnostic=agnostic)
        results = evaluate_needle(
            self.model,
            self.tokenizer,
            lengths=self.lengths,
            num_contexts=self.contexts,
            reader=reader,
        )
        reader.close()
        return {result.length: dataclasses.asdict(result) for result in results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ("policies", "metric", "bits", "factor")
    parser.add_argument("--section", choices=sections, required=True)
    parser.add_argument("--model", default="reference:gqa")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--contexts", type=int, default=25)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--stats", type=Path, metavar="FILE")
    parser.add_argument("--calib-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--only", nargs="+", help="cases whose names begin with one of these")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    known = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else []
    rows = {row["name"]: row for row in known}
    plain = Case(name="original", cache=CacheConfig())
    only = tuple(arguments.only or ("",))
    for case in (plain, *cases(arguments.section)):
        if case.name.startswith(only) and case.name not in rows:
            rows[case.name] = bench.row(case)
            settings = {key: str(value) for key, value in vars(arguments).items()}
            report = {"settings": settings, "versions": versions(bench.model.device)}
            write_json(arguments.json, finite({**report, "rows": list(rows.values())}))
            print(case.name, f"{rows[case.name]['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
