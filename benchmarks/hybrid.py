"""ZDC's hybrid ratios (§5.2): enumerated near-optima, variants (§6.5), and the regression.

    python benchmarks/hybrid.py --text wiki-heldout.txt --json benchmarks/results/hybrid-gqa.json
    python benchmarks/hybrid.py --table benchmarks/results/hybrid-gqa.json

Every row is one choice of ratios: what it loses, Q_d = (ppl' - ppl) / ppl over the second half of
every window, and the bytes of pages that the first half then holds. Variants: ZDC; DT, one width
for all tokens; DL, as many important tokens in all layers. At MIDDLE alone, beside ZDC at the same
ratios: LT, ranked in every layer by the attention that tokens get; OC, with rotations of a window's
own first half, and the seconds that they take; random, ranked by lot, alike in all layers; by
layer, by lot in each; lowest, by the least denominators. Beside DL: first, by those of the first
layer in all. ZO, which restores rows for every query, computes the same: its time is one of
--times, with LT's. Cases come in an order drawn by lot, so that the first (--most) are a coarser
grid; those that the file holds are kept.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import quality
from kvfold import recipes
from kvfold.attention import hybrid as attention
from kvfold.attention.hybrid import denominators
from kvfold.cache.pool import Pool
from kvfold.calibration.calibrate import calibrate
from kvfold.cli.common import versions
from kvfold.compression.compressor import Compressor, Prepared
from kvfold.config import CacheConfig, Ratios
from kvfold.evaluation.importance import LENGTH, TEXTS, orders
from kvfold.evaluation.measure import runner_for
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import mean_and_se, window_perplexity
from kvfold.evaluation.ratios import RISING, STEPS, removals
from kvfold.experimental.hybrid import agreement, with_leaders
from kvfold.hub.checkpoint import mark
from kvfold.layout import Geometry
from kvfold.utils.files import write_json

MIDDLE = RISING[1]
EVEN = (0.2, 0.4, 0.6)  # of every layer: as many on average
REPEATS = 7
USEFUL = 0.5  # Q_d beyond which nothing is compared
LIMITS = (0.01, 0.02, 0.05, 0.1, 0.2)  # of Q_d


@dataclass(frozen=True)
class Case:
    variant: str
    ratios: Ratios

    @property
    def name(self) -> str:
        r = self.ratios
        wide, narrow = (r.keys, r.values), (r.low_rank_keys, r.low_rank_values)
        return f"{self.variant} {wide} {narrow} {r.important}..{r.important_last}"


def cases() -> list[Case]:
    found = [*map(variants, removals()), *([Case("DT", x)] for x in uniforms())]
    return list(chain.from_iterable(random.Random(0).sample(found, len(found))))


def variants(removed: Ratios) -> list[Case]:
    """All that tell tokens apart."""
    rising = [replace(removed, important=a, important_last=b) for a, b in RISING]
    found = [Case("ZDC", ratios) for ratios in rising]
    found += [Case("DL", replace(removed, important=x, important_last=x)) for x in EVEN]
    middle = rising[RISING.index(MIDDLE)]
    found.append(Case("LT", replace(middle, by="attention")))
    found += [Case(name, middle) for name in ("OC", "random", "by layer", "lowest")]
    return [*found, Case("first", found[4].ratios)]


def uniforms() -> Iterator[Ratios]:
    eighths = [x / 8 for x in range(8)]
    return (uniform(*pair) for pair in product(eighths, repeat=2) if pair[0] >= pair[1])


def uniform(keys: float, values: float) -> Ratios:
    return Ratios(
        keys=keys,
        values=values,
        low_rank_keys=keys,
        low_rank_values=values,
        important=1,
        important_last=1,
    )


class Hybrids(quality.Bench):
    """A model's bases, its loss, and what ratios lose and take."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        recipe, tokens = recipes.get("zdc"), arguments.calib_tokens
        compressor = Compressor(self.model, recipe, self.tokenizer, max_tokens=tokens)
        self.bases = compressor.prepare(arguments.stats)
        self.prepared_of: dict[tuple[str, int], Prepared] = {}
        self.seconds: dict[tuple[str, int], float] = {}
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
            own = [x.basis.singular.double() for x in self.bases.candidates if x.side == side]
            kept = [float(s[: round((1 - removed) * len(s))].sum() / s.sum()) for s in own]
            found[f"{side} without {removed}"] = sum(kept) / len(kept)
        found["agreement"] = sum(self.agreements) / max(len(self.agreements), 1)
        return found

    def losses(self, model: Any) -> dict[str, dict[str, Any]]:
        """By text: nats a token, and bytes of the first half's pages."""
        return {name: self.loss(model, ids) for name, ids in self.texts.items()}

    def loss(self, model: Any, ids: Tensor) -> dict[str, Any]:
        runner = runner_for(model, CacheConfig(), self.arguments.ctx)
        sessions = partial(PagedSession, runner)
        result, held = window_perplexity(sessions, ids, scored_from=ids.shape[1] // 2)
        kept = held.kept_fraction
        return {"nll": result.nll, "bytes": held.cache_bytes, "kept_fraction": kept}

    def online(self, case: Case) -> dict[str, dict[str, Any]]:
        """As `losses`, a window at a time with rotations of its first half."""
        found = {}
        for name, ids in self.texts.items():
            each = [self.loss(self.own(i, name, case), ids[i : i + 1]) for i in range(len(ids))]
            nll = sum(x["nll"] for x in each) / len(each)
            seconds = sum(self.seconds[name, i] for i in range(len(ids))) / len(ids)
            found[name] = {**each[-1], "nll": nll, "rotations_seconds": seconds}
        return found

    def own(self, i: int, name: str, case: Case) -> Any:
        """The model with rotations of a window, which are kept for other ratios."""
        if (name, i) not in self.prepared_of:
            compressor, begin = Compressor(self.model, recipes.get("zack")), time.perf_counter()
            half = self.texts[name][i : i + 1, : self.arguments.ctx // 2]
            statistics = calibrate(self.model, compressor.family, half, compressor.needs)
            self.prepared_of[name, i] = compressor.prepare(statistics)
            self.seconds[name, i] = time.perf_counter() - begin
        prepared = self.prepared_of[name, i]
        return prepared.folded_copy(prepared.plan_hybrid(case.ratios, self.align))

    def folded(self, case: Case, lead: bool = True) -> Any:
        """A copy of the model with rows of two widths, or with one in variant DT."""
        spec = self.bases.plan_hybrid(case.ratios, self.align)
        if case.variant == "DT":
            return self.bases.folded_copy(type(spec)(geometry=spec.geometry, layers=spec.layers))
        model = self.bases.folded_copy(spec)
        if lead and case.variant in ("ZDC", "DL"):
            mark(model, with_leaders(spec, self.orders), {})
        if case.variant == "first":
            alike = [np.broadcast_to(order[:1], order.shape) for order in self.orders]
            mark(model, with_leaders(spec, alike), {})
        return model

    def row(self, case: Case) -> dict[str, Any]:
        begin = time.perf_counter()
        if case.variant == "OC":
            found = self.online(case)
        else:
            with ranking(case.variant):
                found = self.losses(self.folded(case))
        for name, own in found.items():
            whole = self.whole[name]
            own["Q_d"] = float(torch.tensor(own["nll"] - whole["nll"]).expm1())
            own["bytes_fraction"] = own["bytes"] / whole["bytes"]
        seconds = time.perf_counter() - begin
        about = {"name": case.name, "variant": case.variant, "ratios": asdict(case.ratios)}
        return {**about, "texts": found, "seconds": seconds}


def ranking(variant: str) -> AbstractContextManager[Any]:
    """How tokens are ranked meanwhile."""
    drawn = torch.Generator().manual_seed(0)
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "random": by_lot,
        "by layer": lambda lse: torch.rand(lse[:, 0].shape, generator=drawn),
        "lowest": lambda lse: -denominators(lse),
    }
    other = others.get(variant)
    return mock.patch.object(attention, "denominators", other) if other else nullcontext()


def by_lot(lse: Tensor) -> Tensor:
    """A rank of every token, the same in all layers."""
    count = lse.shape[0] * lse.shape[2]
    return torch.rand(count, generator=torch.Generator().manual_seed(count)).view(lse[:, 0].shape)


def times(bench: Hybrids) -> dict[str, float]:
    """Milliseconds, the least of REPEATS: reading a window with either ranking, making its rows
    narrow, a token after that, and what ZO adds to it."""
    removed, ids = next(removals()), next(iter(bench.texts.values()))[0, :-REPEATS].tolist()
    found: dict[str, list[float]] = defaultdict(list)
    for by in ("denominators", "attention"):
        ratios = replace(removed, important=0.3, important_last=0.3, by=by)
        runner = runner_for(bench.folded(Case("ZDC", ratios)), CacheConfig(), bench.arguments.ctx)
        for _ in range(REPEATS):
            with PagedSession(runner) as session:
                found[f"read, {by}"].append(timed(partial(session.read, ids, prompt=len(ids))))
                found["made narrow"].append(timed(session.compress))
                found[f"token, {by}"].append(timed(partial(session.read, [5])))
                pairs = to_restore(runner.pool, session.sequence.open_slot)
            found["restored (ZO)"].append(timed(partial(restore, pairs)))
    return {name: 1000 * min(seconds) for name, seconds in found.items()}


def to_restore(pool: Pool, slot: int) -> list[tuple[Tensor, Tensor]]:
    """As many rows as a sequence has, of both widths, and maps to whole keys and values."""
    assert pool.coarse is not None
    dim, found = pool.layout.spec.geometry.head_dim, []
    for own in (pool, pool.coarse):
        for layer, where in zip(own.layout.spec.layers, own.layout.layer_groups, strict=True):
            rows = int(own.host_lengths[slot, where.start])
            found += [(torch.randn(rows, x.rank), torch.randn(x.rank, dim)) for x in layer.latents]
    return found


def restore(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [z @ up for z, up in pairs]


def timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def table(path: Path) -> None:
    """The fewest bytes within each limit of Q_d by variant, and losses at ZDC's ratios."""
    rows = json.loads(path.read_text())["rows"]
    print("| fewest bytes of pages | " + " | ".join(f"Q_d <= {limit}" for limit in LIMITS) + " |")
    print("|---" * (len(LIMITS) + 1) + "|")
    for variant in ("ZDC", "DL", "DT"):
        best = [nearest(rows, variant, limit) for limit in LIMITS]
        cells = [f"{measured(x, 'bytes_fraction'):.3f}" if x else "–" for x in best]
        print(f"| {variant} | " + " | ".join(cells) + " |")
    print("\n| at the same ratios | pairs | ZDC's Q_d | more than that |")
    print("|---|---|---|---|")
    rising, even = (
        {json.dumps({**x["ratios"], "by": ""}): x for x in rows if x["variant"] == name}
        for name in ("ZDC", "DL")
    )
    for variant in ("LT", "OC", "random", "by layer", "lowest", "first"):
        known = even if variant == "first" else rising
        each = [(x, known.get(json.dumps({**x["ratios"], "by": ""}))) for x in rows]
        pairs = [
            (measured(x, "Q_d"), measured(own, "Q_d"))
            for x, own in each
            if own and x["variant"] == variant and measured(own, "Q_d") < USEFUL
        ]
        base, _ = mean_and_se([own for _, own in pairs])
        mean, error = mean_and_se([x - own for x, own in pairs])
        print(f"| {variant} | {len(pairs)} | {base:.3f} | {mean:+.3f} ± {error:.3f} |")


def measured(row: dict[str, Any], what: str, text: str | None = None) -> float:
    """Of one text, or the mean over all."""
    found = [x[what] for name, x in row["texts"].items() if text in (None, name)]
    return float(sum(found) / len(found))


def nearest(
    rows: list[dict[str, Any]], variant: str, limit: float, text: str | None = None
) -> dict[str, Any] | None:
    """The row of fewest bytes within a limit of Q_d."""
    own = (x for x in rows if x["variant"] == variant and measured(x, "Q_d", text) <= limit)
    return min(own, key=lambda x: measured(x, "bytes", text), default=None)


def main() -> None:
    if sys.argv[1:2] == ["--table"]:
        table(Path(sys.argv[2]))
        return
    parser = quality.parser(__doc__, model="reference:gqa", ctx=1024, windows=2)
    parser.add_argument("--most", type=int, help="cases")
    parser.add_argument("--times", action="store_true", help="instead of losses")
    arguments = parser.parse_args()
    bench = Hybrids(arguments)
    if arguments.times:
        write_json(arguments.json, {"versions": versions(bench.model.device), "ms": times(bench)})
        return
    more = {name: getattr(bench, name) for name in ("whole", "agreements", "statistics")}
    for row in bench.run(bench.wanted(cases()[: arguments.most]), bench.row, **more):
        each = ((name, x["Q_d"], x["bytes_fraction"]) for name, x in row["texts"].items())
        cells = "; ".join(f"{name} {q:+.4f} at {size:.3f}" for name, q, size in each)
        print(f"{row['name']}: {cells} ({row['seconds']:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
