"""Ranks: the budget rule, alignment and width classes, for every method."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.compression import ranks as methods
from kvfold.compression.basis import Basis
from kvfold.compression.ranks import METHODS, LatentCandidate
from kvfold.compression.ranks.allocate import MAX_CLASSES
from kvfold.config import Recipe


def allocate(found: list[LatentCandidate], name: str, budget: int, align: int) -> list[int]:
    if name == "condition":  # a layer's own, which falls with depth
        found = [replace(c, score=float(-c.layer)) for c in found]
    method = METHODS[name](Recipe(name="mine", basis="lorc", ranks=name))
    return methods.allocate(found, method, budget, align)


def basis(singular: torch.Tensor) -> Basis:
    """A basis of this spectrum; its maps are not looked at."""
    eye = torch.eye(len(singular)).double()
    return Basis(down=eye, up=eye, mean=eye[0], singular=singular)


def candidates(layers: int, heads: int, width: int, seed: int) -> list[LatentCandidate]:
    generator = torch.Generator().manual_seed(seed)

    def one(layer: int, side: str, head: int) -> LatentCandidate:
        scale = 10 ** (3 * torch.rand((), generator=generator))
        singular = scale * torch.rand(width, generator=generator).sort(descending=True).values
        return LatentCandidate(
            layer=layer,
            side=side,
            heads=(head,),
            basis=basis(singular.double()),
            score=float(torch.rand((), generator=generator)),
        )

    return [one(i, s, h) for i in range(layers) for s in "kv" for h in range(heads)]


def classes(found: list[LatentCandidate], ranks: list[int], layer: int) -> int:
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


def test_energy_keeps_a_first_direction_that_holds_nearly_all() -> None:
    """Eq. 6 by blocks: one goes when the tail from where it begins is small enough."""
    spectra = [torch.tensor([100.0] + [0.1] * 15), torch.linspace(2, 1, 16)] * 2
    found = [
        LatentCandidate(layer=i // 2, side=side, heads=(0,), basis=basis(spectra[i].double()))
        for i, side in enumerate("kvkv")
    ]
    assert allocate(found, "energy", 32, 8) == [8, 8, 8, 8]


def latents(fishers: list[float], width: int, **extra) -> list[LatentCandidate]:
    """One key latent a layer with the given Fisher scores."""
    falling = torch.linspace(2, 1, width).double()
    return [
        LatentCandidate(
            layer=i,
            side="k",
            heads=(0,),
            basis=basis(falling),
            score=f,
            **extra,
        )
        for i, f in enumerate(fishers)
    ]


def test_fisher_is_proportional() -> None:
    """Palu's release: budget f / sum f, to the nearest multiple."""
    assert allocate(latents([4, 3, 2, 1], 512), "fisher", 1000, 1) == [400, 300, 200, 100]
    assert allocate(latents([4, 3, 2, 1], 512), "fisher", 1000, 32) == [416, 288, 192, 96]


def test_fisher_gives_what_a_full_width_leaves_over_in_equal_parts() -> None:
    """The release caps at the width, then adds one to everything not full until all is spent."""
    assert allocate(latents([6, 2, 1, 1], 400), "fisher", 1000, 1) == [400, 266, 167, 167]


@pytest.mark.parametrize(("width", "least"), [(512, 32), (64, 16)])
def test_fisher_leaves_a_floor(width: int, least: int) -> None:
    ranks = allocate(latents([1, 1, 1, 1e-6], width), "fisher", 2 * width, 1)
    assert ranks[3] == least and sum(ranks) == 2 * width


def test_a_floor_is_no_more_than_an_even_share() -> None:
    assert allocate(latents([1, 1, 1, 1e-6], 64), "fisher", 16, 1) == [4, 4, 4, 4]


def test_equal_scores_of_a_matrix_get_equal_ranks() -> None:
    """All groups of a matrix share a rank; only the last steps of the budget may part them."""
    found = candidates(3, 4, 64, seed=1)
    scores = {(c.layer, c.side): c.score for c in found}
    found = [replace(c, score=scores[c.layer, c.side]) for c in found]
    ranks = allocate(found, "fisher", 800, 8)
    spread = [
        {r for c, r in zip(found, ranks, strict=True) if (c.layer, c.side) == place}
        for place in scores
    ]
    assert sum(len(own) > 1 for own in spread) <= 1
    assert all(max(own) - min(own) <= 8 for own in spread)


def test_condition_gives_earlier_layers_more() -> None:
    """LoRC: the cumulative product is largest at the first layer, which keeps most."""
    found = candidates(4, 1, 32, seed=6)
    ranks = allocate(found, "condition", 136, 1)
    per_layer = [
        sum(r for c, r in zip(found, ranks, strict=True) if c.layer == i) for i in range(4)
    ]
    assert per_layer == sorted(per_layer, reverse=True)
    assert per_layer[0] == 64 and per_layer[3] < per_layer[0]


@pytest.mark.parametrize(
    ("budget", "ranks"),
    [
        (24, [8, 8, 8]),
        (18, [8, 6, 4]),  # d_min = 4 of 8: 8 (1 - u / 2)
        (14, [8, 5, 1]),  # d_min = 1: 8, 4.5 and 1, rounded up
        (8, [4, 3, 1]),  # d_max = 4: 4, 2.25 and 0.5, rounded up
        (4, [2, 1, 1]),
    ],
)
def test_ranks_by_condition_numbers_are_those_of_eq_13(budget: int, ranks: list[int]) -> None:
    """LoRC: u is 0, 1/2 and 1 in the three layers; no layer is left with nothing."""
    found = candidates(3, 1, 8, seed=0)[::2]
    assert allocate(found, "condition", budget, 1) == ranks


def test_skipped_layers_stay_whole() -> None:
    found = candidates(2, 1, 8, seed=7)
    found = [replace(c, skip=c.layer == 0) for c in found]
    ranks = allocate(found, "condition", 20, 1)
    assert ranks[:2] == [8, 8] and sum(ranks) == 20


@pytest.mark.parametrize("method", METHODS)
def test_what_is_skipped_is_paid_for_first(method: str) -> None:
    found = [replace(c, skip=c.layer == 1) for c in candidates(3, 2, 16, seed=9)]
    ranks = allocate(found, method, 110, 4)
    assert sum(ranks) == 108
    assert [r for c, r in zip(found, ranks, strict=True) if c.layer == 1] == [16] * 4


def test_a_budget_below_one_step_a_layer_is_refused() -> None:
    found = candidates(3, 1, 16, seed=8)
    with pytest.raises(ValueError, match=r"takes 24 numbers.* is 20: raise keep to at least 0\.25"):
        allocate(found, "greedy", 20, 8)
    assert sum(allocate(found, "greedy", 24, 8)) == 24


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_below_the_whole_layers_is_refused(method: str) -> None:
    """30 numbers have room for one latent of the whole layer, and for the other layers."""
    found = [replace(c, skip=c.layer == 0) for c in candidates(3, 1, 16, seed=8)]
    for budget in (30, 39):
        message = rf"takes 40 .* \(32 in .*is {budget}: raise keep to at least 0\.417,.* skip fewer"
        with pytest.raises(ValueError, match=message):
            allocate(found, method, budget, 4)
    assert sum(allocate(found, method, 40, 4)) == 40
