"""Metrics from the weights that decoding in two passes leaves, against float64 on rows as stored.

Without a GPU the kernels run in Triton's interpreter. Shapes as in `ops.observe`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import rebuild_triton_cases as rebuild
from kvfold.layout.pages import CacheLayout
from kvfold.ops import observe as ops_observe
from kvfold.ops.backend import GPU
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode import triton_split
from kvfold.ops.latent_decode import triton as latent_triton
from kvfold.ops.latent_decode import triton_pieces
from kvfold.ops.observe import observe_weights, weights_triton
from kvfold.ops.store import reference as store
from pages import Case
from rebuild_triton_cases import poisoned  # noqa: F401
from split_triton_cases import SMALL, swift
from store_cases import DEVICE

START = 2.0**-10
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]


@dataclass
class Watched:
    """A filled cache, how it is decoded, and the weights of that in float64.

    Every row begins with a metric of START. queries int64 [B]: positions of which a third of the
    sequence's rows come after.
    """

    pages: LayerPages
    slots: Tensor
    plan: Any
    decode: Callable[[], tuple[Tensor, Tensor]]  # with this plan
    weights: Tensor  # float64 [B, Hq, T]

    def __post_init__(self) -> None:
        counts, size = self.pages.lengths[self.slots], self.weights.shape[2]
        found = store.read_tracked(self.pages, self.slots, counts, size)
        _, self.positions, self.valid = found
        order = self.positions.masked_fill(~self.valid, 2**20).flatten(1).sort()[0]
        third = self.valid.flatten(1).sum(1) * 2 // 3
        self.queries = order.gather(1, third[:, None])[:, 0].long()
        store.add_metrics(self.pages, self.slots, START * self.valid.float(), self.valid)

    def metrics(self) -> Tensor:
        return store.read_metrics(self.pages, self.slots, self.valid)

    def want(self, power: int, exclude: int) -> Tensor:
        """float64 [B, G, T], the start's included."""
        mass = (self.weights.to(DEVICE) ** power).unflatten(1, (len(self.pages.groups), -1)).sum(2)
        counted = self.positions <= (self.queries - exclude)[:, None, None]
        return torch.where(self.valid, START + mass * counted, 0)

    def observe(self, power: int, exclude: int) -> None:
        _, lse = self.decode()
        where = self.queries, self.pages, self.slots
        observe_weights(self.plan, lse, *where, power=power, exclude=exclude)

    def check(self, power: int, exclude: int = 0) -> None:
        """Metrics are right and nothing else is written."""
        before = self.pages._replace(arena=self.pages.arena.clone())
        self.observe(power, exclude)
        found, want = self.metrics(), self.want(power, exclude)
        assert ((found - want).abs() <= 1e-2 * (want - START).abs() + 1e-6).all()
        assert torch.equal(found[want == START], want[want == START].float())
        assert (want > 9 * START).any() and (want == START).any()  # seen, and later than the query
        store.add_metrics(before, self.slots, -START * self.valid.float(), self.valid)
        store.add_metrics(self.pages, self.slots, -found, self.valid)
        assert torch.equal(self.pages.arena, before.arena)


def stored(layout: CacheLayout, lengths: list[list[int]], queries: int = 2) -> Watched:
    """Rows in score space; queries: of a KV head."""
    case = Case.of(layout, lengths, queries, torch.float16, peak=6.0)
    _, pages, slots, _ = case.args
    counts = pages.lengths[slots]
    planned = counts, queries, int(counts.sum()), SMALL
    (plan,) = triton_split.plan_layers([pages.groups], *planned)
    decode = lambda: triton_split.decode(*case.args, plan)  # noqa: E731
    return Watched(pages, slots, plan, decode, case.weights)


def latents(
    module: ModuleType, kind: str, keys: list[int], values: int, lengths: list[int], **how
) -> Watched:
    """Rows that keys are rebuilt from."""
    case = rebuild.Case(kind, keys, values, lengths, tracked=True, **how)
    pages = case.pages
    counts, layer = pages.lengths[case.slots], (case.layer, case.groups)
    (plan,) = module.plan_layers(case.q, [layer], counts, int(counts.sum()))
    decode = lambda: case.run(module.latent_decode, plan=plan)  # noqa: E731
    return Watched(pages, case.slots, plan, decode, rebuild.explicit(case)[1])


SHARED = swift([((64, 4),)] * 2, [((96, 4),)], tracked=True)
TIERS = swift([((32, 8), (16, 2)), ((16, 8),)], [((16, 8), (64, 2))], tracked=True)
A_HEAD = swift(
    [((64, 4),), ((32, 8),), ()], [((32, 8), (32, 2)), ((16, 4),), ()], 1, tracked=True
)  # fmt: skip
SIXTEEN = swift([((64, 16),), ((48, 16),)], [((80, 16),)], page=64, tracked=True)


@pytest.mark.parametrize("layout,lengths,queries,power,exclude", [
    (SHARED, [[37], [0], [16], [101]], 4, 1, 0), (SHARED, [[70], [1]], 3, 2, 40),
    (TIERS, [[37], [0], [150]], 1, 2, 0), (TIERS, [[33]], 8, 1, 5),
    (A_HEAD, [[37, 5, 0], [0, 16, 40]], 2, 1, 0), (A_HEAD, [[1, 300, 20]], 1, 2, 10),
    (SIXTEEN, [[129], [64]], 2, 2, 0),
])  # fmt: skip
def test_rows_in_score_space(
    layout: CacheLayout, lengths: list[list[int]], queries: int, power: int, exclude: int
) -> None:
    """Rows that heads share, several precisions, groups of their own; positions in no order."""
    assert ops_observe.why_not(layout.groups, GPU)
    stored(layout, lengths, queries).check(power, exclude)


@pytest.mark.parametrize("module,kind,keys,values,how", [
    (latent_triton, "lean", [16, 48], 64, {}),
    (latent_triton, "lean", [32, 16], 32, {"bits": 8, "queries": 3}),
    (latent_triton, "palu", [48, 48], 64, {"bits": 4, "zeros": True}),
    (latent_triton, "small", [0, 0], 48, {"page": 64}),
    (triton_pieces, "lean", [16, 48], 64, {"tiers": [8, 4, 2]}),
    (triton_pieces, "palu", [48, 48], 64, {"tiers": [4, 2]}),
    (triton_pieces, "small", [0, 0], 48, {"queries": 1}),
])  # fmt: skip
@pytest.mark.parametrize("power,exclude", [(1, 0), (2, 60)])
def test_keys_that_are_rebuilt(
    module: ModuleType, kind: str, keys: list[int], values: int, how: dict, power: int,
    exclude: int,
) -> None:  # fmt: skip
    latents(module, kind, keys, values, [70, 0, 17], **how).check(power, exclude)


def test_any_number_of_programs_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may take all tiles of its group, or none; the sums are the same."""
    found = []
    for programs, tile in ((1, 16), (1, 4096), (64, 64)):
        monkeypatch.setattr(weights_triton, "PROGRAMS", programs)
        monkeypatch.setattr(weights_triton, "TILE", tile)
        on = stored(A_HEAD, [[290, 1, 33]])
        on.observe(2, 0)
        found.append(on.metrics())
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


def test_layers_take_turns_in_one_room() -> None:
    """Of two layers planned together, what was decoded last is observed."""
    cases = [Case.of(x, [[40], [9]], 2, torch.float16, peak=6.0) for x in (SHARED, TIERS)]
    counts = [case.args[1].lengths[case.args[2]] for case in cases]
    layers = [case.args[1].groups for case in cases]
    plans = triton_split.plan_layers(layers, torch.cat(counts, 1), 2, 49, SMALL)
    for case, plan in zip(cases, plans, strict=True):
        _, pages, slots, _ = case.args
        decode = partial(triton_split.decode, *case.args, plan)
        Watched(pages, slots, plan, decode, case.weights).check(1)
