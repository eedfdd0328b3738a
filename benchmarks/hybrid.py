"""ZDC's hybrid ratios (§5.2): enumerated near-optima, variants (§6.5), and the regression.

    python benchmarks/hybrid.py --text wiki-heldout.txt --json benchmarks/results/hybrid-gqa.json
    python benchmarks/hybrid.py --table benchmarks/results/hybrid-gqa.json

Every row is one choice of ratios: what it loses, Q_d = (ppl' - ppl) / ppl over the second half of
every window, and the bytes of pages that the first half then holds. Variants: ZDC; DT, one width
for all tokens; DL, as many important tokens in all layers; LT, ranked in every layer by the
attention that tokens get; random, ranked by lot; the last two at MIDDLE alone, beside ZDC at the
same ratios. Cases come in an order drawn by lot, so that the first rows are a coarser grid; those
that the file holds are kept.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import quality
import torch

from kvfold import recipes
from kvfold.artifact import mark
from kvfold.attention import hybrid as attention
from kvfold.compression.compressor import Compressor
from kvfold.compression.hybrid import agreement, with_leaders
from kvfold.config import CacheConfig, Ratios
from kvfold.evaluation.importance import LENGTH, TEXTS, orders
from kvfold.evaluation.measure import runner_for
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import window_perplexity
from kvfold.spec import Geometry

STEPS = (0.0, 0.25, 0.5, 0.75)  # shares of a head's numbers that are removed
MIDDLE = (0.2, 0.6)  # important tokens of the first and last layer
RISING = ((0.1, 0.3), MIDDLE, (0.4, 0.8))
EVEN = (0.2, 0.4, 0.6)  # of every layer: as many on average
LIMITS = (0.01, 0.02, 0.05, 0.1, 0.2)  # of Q_d


@dataclass(frozen=True)
class Case:
    variant: str
    ratios: Ratios

    @property
    def name(self) -> str:
        r = self.ratios
        wide, narrow = (r.keys, r.values), (r.narrow_keys, r.narrow_values)
        return f"{self.variant} {wide} {narrow} {r.important}..{r.important_last}"


def removals() -> Iterator[dict[str, float]]:
    """What the text allows: unimportant tokens lose more, and keys at least what values do."""
    names = ("keys", "values", "narrow_keys", "narrow_values")
    for keys, values, narrow_keys, narrow_values in product(STEPS, repeat=4):
        less = narrow_keys > keys and narrow_values > values
        if less and keys >= values and narrow_keys >= narrow_values:
            yield dict(zip(names, (keys, values, narrow_keys, narrow_values), strict=True))


def cases() -> list[Case]:
    return random.Random(0).sample(found := list(_cases()), len(found))


def _cases() -> Iterator[Case]:
    eighths = [x / 8 for x in range(8)]
    for keys, values in product(eighths, repeat=2):
        if keys >= values:
            yield Case("DT", uniform(keys, values))
    for removed in removals():
        for first, last in RISING:
            shares = {"important": first, "important_last": last}
            yield Case("ZDC", Ratios(**removed, **shares))
            if (first, last) == MIDDLE:
                yield Case("LT", Ratios(**removed, **shares, by="attention"))
                yield Case("random", Ratios(**removed, **shares))
        for share in EVEN:
            yield Case("DL", Ratios(**removed, important=share, important_last=share))


def uniform(keys: float, values: float) -> Ratios:
    return Ratios(
        keys=keys,
        values=values,
        narrow_keys=keys,
        narrow_values=values,
        important=1,
        important_last=1,
    )


class Hybrids(quality.Bench):
    """A model's bases, its loss, and what ratios lose and take."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        recipe, tokens = recipes.get("zdc"), arguments.calib_tokens
        compressor = Compressor(self.model, recipe, self.tokenizer, max_tokens=tokens)
        self.prepared = compressor.prepare(arguments.stats)
        self.align = compressor.align(None)
        self.whole = self.losses(self.model)
        middle = Ratios(important=0.3, important_last=0.3)
        model = self.folded(Case("ZDC", middle), lead=False)
        self.orders = orders(model, compressor.windows()[:TEXTS, :LENGTH])
        layers = range(compressor.geometry.num_layers - 1)
        self.agreements = [agreement(self.orders, i, i + 1, 0.3) for i in layers]
        self.statistics = self.statistics_of(compressor.geometry)

    def statistics_of(self, geometry: Geometry) -> dict[str, float]:
        """What a regression knows of a model: its sizes, the energy that shares of the directions
        keep, and how much adjacent layers agree."""
        sizes = ("num_layers", "num_query_heads", "num_kv_heads", "head_dim")
        found = {name: math.log2(getattr(geometry, name)) for name in sizes}
        for side, removed in product("kv", STEPS[1:]):
            own = [x.basis.singular.double() for x in self.prepared.candidates if x.side == side]
            kept = [float(s[: round((1 - removed) * len(s))].sum() / s.sum()) for s in own]
            found[f"{side} without {removed}"] = sum(kept) / len(kept)
        found["agreement"] = sum(self.agreements) / max(len(self.agreements), 1)
        return found

    def losses(self, model: Any) -> dict[str, dict[str, Any]]:
        """By text: nats a token, and bytes of the first half's pages."""
        runner = runner_for(model, CacheConfig(), self.arguments.ctx)
        sessions, found = partial(PagedSession, runner), {}
        for name, ids in self.texts.items():
            result, held = window_perplexity(sessions, ids, scored_from=ids.shape[1] // 2)
            found[name] = {
                "nll": result.nll,
                "bytes": held.cache_bytes,
                "kept_fraction": held.kept_fraction,
            }
        return found

    def folded(self, case: Case, lead: bool = True) -> Any:
        """A copy of the model with rows of two widths, or with one in variant DT."""
        spec = self.prepared.plan_hybrid(case.ratios, self.align)
        if case.variant == "DT":
            return self.prepared.folded_copy(type(spec)(geometry=spec.geometry, layers=spec.layers))
        model = self.prepared.folded_copy(spec)
        if lead and case.variant in ("ZDC", "DL"):
            mark(model, with_leaders(spec, self.orders), {})
        return model

    def row(self, case: Case) -> dict[str, Any]:
        model, begin = self.folded(case), time.perf_counter()
        patched = mock.patch.object(attention, "denominators", by_lot)
        if case.variant == "random":
            with patched:
                found = self.losses(model)
        else:
            found = self.losses(model)
        for name, own in found.items():
            whole = self.whole[name]
            own["Q_d"] = float(torch.tensor(own["nll"] - whole["nll"]).expm1())
            own["bytes_fraction"] = own["bytes"] / whole["bytes"]
        seconds = time.perf_counter() - begin
        about = {"name": case.name, "variant": case.variant, "ratios": asdict(case.ratios)}
        return {**about, "texts": found, "seconds": seconds}


def by_lot(lse: torch.Tensor) -> torch.Tensor:
    """A rank of every token, the same whenever it is asked for."""
    count = lse.shape[0] * lse.shape[2]
    return torch.rand(count, generator=torch.Generator().manual_seed(count)).view(lse[:, 0].shape)


def table(path: Path) -> None:
    """Of every text: the fewest bytes within each limit of Q_d, by variant."""
    rows = json.loads(path.read_text())["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    for text in rows[0]["texts"]:
        print(f"| {text} | " + " | ".join(f"Q_d <= {limit}" for limit in LIMITS) + " |")
        print("|---" * (len(LIMITS) + 1) + "|")
        for variant in variants:
            best = [nearest(rows, variant, text, limit) for limit in LIMITS]
            cells = [f"{x['texts'][text]['bytes_fraction']:.3f}" if x else "–" for x in best]
            print(f"| {variant} | " + " | ".join(cells) + " |")


def nearest(
    rows: list[dict[str, Any]], variant: str, text: str, limit: float
) -> dict[str, Any] | None:
    """The row of fewest bytes within a limit."""
    own = (x for x in rows if x["variant"] == variant and x["texts"][text]["Q_d"] <= limit)
    return min(own, key=lambda x: x["texts"][text]["bytes"], default=None)


def main() -> None:
    if sys.argv[1:2] == ["--table"]:
        table(Path(sys.argv[2]))
        return
    arguments = quality.parser(__doc__, model="reference:gqa", ctx=1024, windows=3).parse_args()
    bench = Hybrids(arguments)
    more = {name: getattr(bench, name) for name in ("whole", "agreements", "statistics")}
    for row in bench.run(bench.wanted(cases()), bench.row, **more):
        each = ((name, x["Q_d"], x["bytes_fraction"]) for name, x in row["texts"].items())
        cells = "; ".join(f"{name} {q:+.4f} at {size:.3f}" for name, q, size in each)
        print(f"{row['name']}: {cells} ({row['seconds']:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
