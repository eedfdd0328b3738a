"""What bits and eviction cost in quality, on the paged cache: one section of the tables at a time.

    python benchmarks/cache_quality.py --section policies --text wiki.txt --json policies.json

Sections, one or more: policies (each at 2, 4, 8, 16 times fewer tokens), metric (KV-Compress Table
2: power, window, all queries), bits (with and without rotation, Palu Table 7; KIVI), factor
(dimensions and bits together, then eviction on top), recipes (ours, planned in dimensions and bits,
beside plain ones), papers (methods that the papers compare themselves with, alone and over their
bases, beside ours at the same bytes). Rows are written as they are measured; those already in the
file are kept.
--together feeds all contexts and windows at once. Then facts are those of asked_after.py: a model
that chats gets them as a user's turn, and an answer counts where it holds the number.
"""

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import quality
import together
from kvfold.cache.eviction import policies
from kvfold.cli.methods import read
from kvfold.config import CacheConfig, Prefer
from kvfold.evaluation import ruler
from kvfold.evaluation.measure import Measured, Measurement, runner_for
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import window_perplexity

KEEPS = (0.5, 0.25, 0.125, 0.0625)
SIZES = {"swift": (3, 4, 5, 6), "lean": (3, 4, 5, 6, 8), "small": (4, 6, 8, 14)}
FOR_SPEED = {"swift": (3, 4, 5, 6), "lean": (4, 6, 8)}
RECIPES = ["int8", "int4", "KIVI 4 bits", "KIVI 2 bits"]
RECIPES += [f"{recipe} {factor}x" for recipe, factors in SIZES.items() for factor in factors]
RECIPES += [f"{recipe} {n}x --prefer speed" for recipe, own in FOR_SPEED.items() for n in own]
METHODS = {"recipes": "; ".join(RECIPES), "papers": "papers"}  # of `kvfold compare`, by section
METRIC: dict[str, dict[str, Any]] = {  # edits of kv-compress
    "w8-L2": {},
    "w8-L1": {"power": 1},
    "w32-L2": {"window": 32},
    "w32-L1": {"window": 32, "power": 1},
    "full-L2": {"window": None, "exclude": 10, "pool": 1, "recent": 32},
    "full-L1": {"window": None, "exclude": 10, "pool": 1, "recent": 32, "power": 1},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: how tokens are stored, and how many times smaller a recipe planned dims and bits, or
    which share of the dimensions it kept."""

    name: str
    cache: CacheConfig
    edit: dict[str, Any] = dataclasses.field(default_factory=dict)
    recipe: str = "small"
    factor: float | None = None
    keep: float | None = None
    prefer: Prefer = "balanced"


def cases(section: str) -> Iterator[Case]:
    evict: dict[str, Any] = {"page": 16}
    if section == "policies":
        for name in (x for x in policies.POLICIES if x != "learned"):
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
    for method, storage in read(METHODS[section]) if section in METHODS else ():
        target, recipe = method.target, method.recipe
        yield Case(
            name=method.name,
            cache=storage.config(target.plans_bits) or CacheConfig(),
            recipe=recipe.name if recipe else "",
            factor=target.factor,
            keep=target.keep if recipe else None,
            prefer=target.prefer or "balanced",
        )
    if section == "factor":
        for factor in (8, 10, 14, 18, 24):
            yield Case(name=f"factor {factor}", cache=CacheConfig(), factor=factor)
        for factor, keep in ((14, 0.25), (28, 0.5)):
            cache = CacheConfig(evict="kv-compress", keep_tokens=keep, **evict)
            for window in (8, 32):
                name = f"tokens {keep:g}, factor {factor}, w{window}"
                yield Case(name=name, cache=cache, factor=factor, edit={"window": window})


class Bench(quality.Bench):
    """Questions are the same for every case too."""

    def row(self, case: Case) -> dict[str, Any]:
        return (self._together if self.arguments.together else self._apart)(case)

    def _together(self, case: Case) -> dict[str, Any]:
        """Whose policies are as they are registered."""
        assert not case.edit
        begin, model, given = time.perf_counter(), self._model(case), self.arguments
        found: dict[str, Any] = {"name": case.name, "cache": dataclasses.asdict(case.cache)}

        def measured(texts: Any, length: int = 0, agnostic: bool = True) -> Measured:
            how = {"length": length, "contexts": given.contexts}
            rows = {"keys": ruler.examples("keys", self.tokenizer, **how)} if length else {}
            what = Measurement(windows=texts, tasks=rows, cache=case.cache, agnostic=agnostic)
            return together.measure(model, self.tokenizer, what)

        whole = measured(self.texts)
        found["texts"] = {name: dataclasses.asdict(x) for name, x in whole.texts.items()}
        if whole.footprint is not None:
            found |= dataclasses.asdict(whole.footprint)
        for asked, agnostic in asked_of(case):
            each = {x: measured({}, x, agnostic).tasks["keys"] for x in given.lengths}
            found[f"needle_{asked}"] = {
                length: {"exact": x.scores["contains"].mean, "num_questions": x.num_examples}
                for length, x in each.items()
            }
        return found | {"seconds": time.perf_counter() - begin}

    def _apart(self, case: Case) -> dict[str, Any]:
        begin = time.perf_counter()
        longest = max([*self.arguments.lengths, *(ids.shape[1] for ids in self.texts.values())])
        policy = policies.get(case.cache.evict) if case.cache.evict else None
        if policy and case.edit:
            policy = policy.changed(**case.edit)
        runner = runner_for(self._model(case), case.cache, longest, policy=policy)
        found: dict[str, Any] = {"name": case.name, "cache": dataclasses.asdict(case.cache)}
        found["texts"], sessions = {}, partial(PagedSession, runner)
        for name, ids in self.texts.items():
            result, held = window_perplexity(sessions, ids, scored_from=ids.shape[1] // 2)
            found["texts"][name] = dataclasses.asdict(result)
            found |= dataclasses.asdict(held)
        for asked, agnostic in asked_of(case):
            found[f"needle_{asked}"] = self.needle(sessions, agnostic)
        return found | {"seconds": time.perf_counter() - begin}

    def _model(self, case: Case) -> Any:
        if case.factor is not None:
            prepared = self.prepared[case.recipe]
            return prepared.folded_copy(prepared.plan_factor(case.factor, prefer=case.prefer))
        if case.keep is not None:
            prepared = self.prepared[case.recipe]
            return prepared.folded_copy(prepared.plan(case.keep))
        return self.model


def asked_of(case: Case) -> list[tuple[str, bool]]:
    """When questions are asked, and whether a context is compressed without them."""
    return [("after", True), *([("before", False)] if case.cache.evict else [])]


def main() -> None:
    parser = quality.parser(__doc__, model="reference:gqa", ctx=1024, windows=24)
    sections = ("policies", "metric", "bits", "factor", "recipes", "papers")
    parser.add_argument("--section", choices=sections, nargs="+", required=True)
    parser.add_argument("--contexts", type=int, default=25)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--together", action="store_true", help="all contexts at once, for GPUs")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    every = {case.name: case for section in arguments.section for case in cases(section)}
    original = Case(name="original", cache=CacheConfig())
    wanted = bench.wanted([original, *every.values()])
    bench.prepare(x.recipe for x in wanted if x.factor or x.keep)
    for row in bench.run(wanted, bench.row):
        print(row["name"], f"{row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
