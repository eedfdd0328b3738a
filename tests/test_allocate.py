"""Ranks: the budget rule, alignment and width classes, for every method."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.compress.allocate import MAX_CLASSES, METHODS, Candidate, allocate


def candidates(layers: int, heads: int, width: int, seed: int) -> list[Candidate]:
    generator = torch.Generator().manual_seed(seed)

    def one(layer: int, side: str, head: int) -> Candidate:
        scale = 10 ** (3 * torch.rand((), generator=generator))
        singular = scale * torch.rand(width, generator=generator).sort(descending=True).values
        return Candidate(
            layer=layer,
            side=side,
            heads=(head,),
            singular=singular.double(),
            loss=singular.double() ** 2 / 2,
            fisher=float(torch.rand((), generator=generator)),
            condition=float(layers - layer),
            numbers=width,
        )

    return [one(i, s, h) for i in range(layers) for s in "kv" for h in range(heads)]


def classes(found: list[Candidate], ranks: list[int], layer: int) -> int:
    pairs: dict[int, list[int]] = {}
    for c, rank in zip(found, ranks, strict=True):
        if c.layer == layer:
            pairs.setdefault(c.heads[0], []).append(rank)
    return len({tuple(pair) for pair in pairs.values()})


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 8]),
    width=st.sampled_from([16, 24, 20]),
    align=st.sampled_from([1, 4, 8]),
    keep=st.floats(0.3, 1.0),
    seed=st.integers(0, 1000),
)
def test_budget_rule(method, heads, width, align, keep, seed) -> None:
    found = candidates(3, heads, width, seed)
    budget = int(keep * 3 * 2 * heads * width)
    ranks = allocate(found, method, budget, align)
    assert sum(ranks) <= budget
    assert sum(ranks) > budget - align or sum(ranks) == 3 * 2 * heads * width
    for c, rank in zip(found, ranks, strict=True):
        assert 0 <= rank <= c.width
        assert rank % align == 0 or rank == c.width
    for layer in range(3):
        assert classes(found, ranks, layer) <= MAX_CLASSES


def test_greedy_keeps_the_largest_losses() -> None:
    found = candidates(2, 2, 8, seed=3)
    ranks = allocate(found, "greedy", 30, 1)
    kept = sorted(float(x) for c, r in zip(found, ranks, strict=True) for x in c.loss[:r])
    everything = sorted(float(x) for c in found for x in c.loss)
    assert kept == everything[-30:]


def test_energy_is_one_removal_rate_for_all_heads() -> None:
    """ZACK eq. 6: some r removes exactly the allocated tails."""
    found = candidates(2, 2, 16, seed=4)
    ranks = allocate(found, "energy", 60, 1)
    removed, next_removed = [], []
    for c, rank in zip(found, ranks, strict=True):
        share = c.singular / c.singular.sum()
        removed.append(float(share[rank:].sum()))
        next_removed.append(float(share[max(rank - 1, 0) :].sum()))
    assert max(removed) <= min(next_removed) + 1e-12


def test_fisher_is_proportional() -> None:
    found = candidates(2, 1, 64, seed=5)
    ranks = allocate(found, "fisher", 80, 1)
    total = sum(c.fisher for c in found)
    for c, rank in zip(found, ranks, strict=True):
        assert rank == c.width or abs(rank - 80 * c.fisher / total) < 64


def test_condition_gives_earlier_layers_more() -> None:
    """LoRC: the cumulative product is largest at the first layer, which keeps most."""
    found = candidates(4, 1, 32, seed=6)
    ranks = allocate(found, "condition", 128, 1)
    per_layer = [
        sum(r for c, r in zip(found, ranks, strict=True) if c.layer == i) for i in range(4)
    ]
    assert per_layer == sorted(per_layer, reverse=True)
    assert per_layer[0] == 64 and per_layer[3] < per_layer[0]


def test_skipped_layers_stay_whole() -> None:
    found = candidates(2, 1, 8, seed=7)
    found = [Candidate(**{**vars(c), "skip": c.layer == 0}) for c in found]
    ranks = allocate(found, "condition", 20, 1)
    assert ranks[:2] == [8, 8] and sum(ranks) == 20


def test_a_budget_below_one_step_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="raise keep"):
        allocate(candidates(3, 1, 16, seed=8), "greedy", 20, 8)
