"""Plans few bit-width layouts for many layers.

A *bit-width layout*, in this module a layout, says which tiers a layer's latents have: how many
numbers of 8, 4 or 2 bits. All latents of one role (side and width), such as the keys of its heads,
have the same. (A page layout, `layout.pages.PageLayout`, says at which bytes of a page they are.)
Kernels are compiled, and the tables and plans of a step built, once per layout: a model with few
layouts starts faster, and a step leaves the host less to do. In the code a layout is the tuple of
its layers' numbers.

Layers that share a layout are found by merging: at the price of a bit that the plan without a limit
pays, the two layouts whose merging costs least become one, until few enough are left. Then single
layers move to another layout, for as long as that lowers the cost.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

import torch
from torch import Tensor

from kvfold.compression.planning.bit_allocation import (
    TierOptions,
    TierRule,
    options_of,
    predicted_loss,
    priced_tiers,
)
from kvfold.layout import Side, Tiers

ROUNDS = 3  # of choosing layouts at the price of the plan before
MAX_MOVES = 64  # of single layers to another layout, in a round
Role = tuple[Side, int]  # side and width of a latent
Layers = tuple[int, ...]  # layers of one layout
BATCH = 64  # layouts whose costs are computed at once


@dataclass(frozen=True, kw_only=True)
class LayerLatent:
    """A latent to plan: its layer, its role there, the tiers that it may have, and its singular
    values [w], descending."""

    layer: int
    role: Role
    rule: TierRule
    singular: Tensor


def plan_layouts(
    latents: Sequence[LayerLatent], budget: int, num_layouts: int | None = None
) -> list[Tiers]:
    """Tiers of every latent, with a low predicted loss in `budget` bits per token, scales included.

    num_layouts: most bit-width layouts of the model (None: each layer may have its own). Only
    layers of one kind (same roles and rules) can share a layout, so there is at least one for each
    kind, even if that exceeds `num_layouts`.
    """
    planner = _Planner(latents, budget)
    layouts: list[Layers] = [(layer,) for layer in planner.layers]
    best = planner.plan(layouts)
    if num_layouts is None or len(planner.distinct(best)) <= num_layouts:
        return best.tiers
    costs = planner.costs(best.price)
    layouts = planner.improved(planner.merged(num_layouts, costs), costs)
    best = planner.plan(layouts)
    for _ in range(ROUNDS - 1):
        layouts = planner.improved(layouts, planner.costs(best.price))
        candidate = planner.plan(layouts)
        if candidate.loss >= best.loss:
            break
        best = candidate
    return best.tiers


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Tiers of every latent, the price of a bit in nats, and the predicted loss."""

    tiers: list[Tiers]
    price: float
    loss: float


@dataclass(frozen=True)
class _Planner:
    latents: Sequence[LayerLatent]
    budget: int

    @cached_property
    def layers(self) -> dict[int, list[int]]:
        """Indices of the latents of each layer."""
        members: dict[int, list[int]] = defaultdict(list)
        for index, latent in enumerate(self.latents):
            members[latent.layer].append(index)
        return dict(members)

    def kind(self, layer: int) -> Hashable:
        """Roles and rules of a layer's latents: layers of one kind can share a layout."""
        return tuple((self.latents[i].role, self.latents[i].rule) for i in self.layers[layer])

    def distinct(self, plan: _Plan) -> set[Hashable]:
        """The different layouts of a plan."""
        return {
            (self.kind(layer), tuple(plan.tiers[i] for i in indices))
            for layer, indices in self.layers.items()
        }

    def plan(self, layouts: Sequence[Layers]) -> _Plan:
        """The plan in which the layers of each layout have the same tiers by role."""
        layout_of = {layer: number for number, layers in enumerate(layouts) for layer in layers}
        spectra = [x.singular for x in self.latents]
        rules = [x.rule for x in self.latents]
        sets = [(layout_of[x.layer], x.role) for x in self.latents]
        tiers, price = priced_tiers(spectra, self.budget, rules, sets)
        loss = sum(map(predicted_loss, spectra, tiers))
        return _Plan(tiers=tiers, price=price, loss=loss)

    def costs(self, price: float) -> "dict[Hashable, _Costs]":
        """What layouts of each kind of layers cost, where a bit costs `price` nats."""
        kinds: dict[Hashable, list[int]] = defaultdict(list)
        for layer in self.layers:
            kinds[self.kind(layer)].append(layer)
        return {kind: _Costs(self, layers, price) for kind, layers in kinds.items()}

    def merged(self, num_layouts: int, costs: "Mapping[Hashable, _Costs]") -> list[Layers]:
        """The layers of each layout, after the merges that cost least."""
        layouts: list[Layers] = [(layer,) for layer in self.layers]
        increases: dict[tuple[Layers, Layers], float] = {}
        for of_kind in costs.values():
            increases |= of_kind.increases([*combinations([(x,) for x in of_kind.position], 2)])
        while len(layouts) > num_layouts and increases:
            pair = min(increases, key=increases.__getitem__)
            layouts = [x for x in layouts if x not in pair]
            increases = {x: cost for x, cost in increases.items() if not {*x} & {*pair}}
            union, kind = _union(*pair), self.kind(pair[0][0])
            others = [x for x in layouts if self.kind(x[0]) == kind]
            increases |= costs[kind].increases([(other, union) for other in others])
            layouts.append(union)
        return layouts

    def improved(
        self, layouts: Sequence[Layers], costs: "Mapping[Hashable, _Costs]"
    ) -> list[Layers]:
        """The layers of each layout, after single layers moved to another layout for as long as
        that lowers the cost."""
        current = list(layouts)
        for _ in range(MAX_MOVES):
            moves: dict[tuple[Layers, Layers, int], float] = {}
            for kind, of_kind in costs.items():
                moves |= of_kind.moves([x for x in current if self.kind(x[0]) == kind])
            move = min(moves, key=moves.__getitem__, default=None)
            if move is None or moves[move] >= 0:
                break
            source, target, layer = move
            current = [x for x in current if x not in (source, target)]
            current += [_without(source, layer), _union(target, (layer,))]
        return current


def _union(first: Layers, second: Layers) -> Layers:
    return tuple(sorted(first + second))


def _without(layers: Layers, layer: int) -> Layers:
    return tuple(x for x in layers if x != layer)


class _Costs:
    """What layouts of layers of one kind cost in nats, where a bit costs `price`."""

    def __init__(self, planner: _Planner, layers: Sequence[int], price: float) -> None:
        self.price, self.position = price, {layer: i for i, layer in enumerate(layers)}
        latents, self.options = planner.latents, list[TierOptions]()
        rules = {latents[i].role: latents[i].rule for i in planner.layers[layers[0]]}
        for role, rule in rules.items():
            sets = [
                [latents[i].singular.double() for i in planner.layers[x] if latents[i].role == role]
                for x in layers
            ]
            self.options.append(options_of(sets, [*range(len(layers))], rule))
        self.least: dict[Layers, float] = {}

    def increases(
        self, pairs: Sequence[tuple[Layers, Layers]]
    ) -> dict[tuple[Layers, Layers], float]:
        """By how much merging each pair of layouts increases the cost."""
        unions = [_union(*pair) for pair in pairs]
        self._add([*(x for pair in pairs for x in pair), *unions])
        return {
            pair: self.least[union] - self.least[pair[0]] - self.least[pair[1]]
            for pair, union in zip(pairs, unions, strict=True)
        }

    def moves(self, layouts: Sequence[Layers]) -> dict[tuple[Layers, Layers, int], float]:
        """How much the cost rises if one layer moves to another of these layouts. A layout's only
        layer does not move."""
        moves = [
            (source, target, layer)
            for source, target in permutations(layouts, 2)
            for layer in source
            if len(source) > 1
        ]
        after = {move: (_without(move[0], move[2]), _union(move[1], (move[2],))) for move in moves}
        self._add([*layouts, *(x for pair in after.values() for x in pair)])
        return {
            (source, target, layer): sum(self.least[x] for x in after[source, target, layer])
            - self.least[source]
            - self.least[target]
            for source, target, layer in moves
        }

    def _add(self, layouts: Sequence[Layers]) -> None:
        """Compute the costs of layouts that are not known."""
        new = [x for x in dict.fromkeys(layouts) if x not in self.least]
        self.least |= dict(zip(new, self._of(new), strict=True))

    def _of(self, layouts: Sequence[Layers]) -> list[float]:
        """The least cost of each layout, some at a time, as the tables are large."""
        least: list[float] = []
        for start in range(0, len(layouts), BATCH):
            members = [[self.position[x] for x in y] for y in layouts[start : start + BATCH]]
            costs = [x.combined(members).least_costs(self.price) for x in self.options]
            least += torch.stack(costs).sum(0).tolist()
        return least
