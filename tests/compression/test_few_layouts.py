"""Layers share few layouts, at little cost."""

from collections.abc import Iterator

import pytest
import torch

from kvfold.compression.planning.bit_allocation import any_tiers, cost, plan_tiers, predicted_loss
from kvfold.compression.planning.few_layouts import LayerLatent, plan_layouts
from kvfold.compression.planning.preference import one_pass_tiers
from kvfold.compression.planning.target import Target
from kvfold.layout import Tiers
from kvfold.utils.errors import SettingError

LAYERS, BITS = 6, 6 * 128 * 16 // 5


def latents_of(seed: int, layers: int = LAYERS) -> list[LayerLatent]:
    """Two heads' keys and one latent of values a layer, of unlike sizes."""
    random, latents = torch.Generator().manual_seed(seed), []
    for layer in range(layers):
        scales = (1.5 * torch.rand(2, generator=random)).exp()
        for scale, side, width, count in zip(scales, "kv", (64, 128), (2, 1), strict=True):
            for _ in range(count):
                decay = 0.02 + 0.1 * float(torch.rand(1, generator=random))
                singular = scale * torch.exp(-decay * torch.arange(width))
                rule = one_pass_tiers(side, width)
                latents.append(
                    LayerLatent(layer=layer, role=(side, width), rule=rule, singular=singular)
                )
    return latents


def loss_of(latents: list[LayerLatent], tiers: list[Tiers]) -> float:
    return sum(predicted_loss(x.singular, y) for x, y in zip(latents, tiers, strict=True))


def layouts_of(latents: list[LayerLatent], tiers: list[Tiers]) -> set[tuple[Tiers, ...]]:
    return {
        tuple(y for x, y in zip(latents, tiers, strict=True) if x.layer == layer)
        for layer in {x.layer for x in latents}
    }


def partitions(layers: list[int], most: int) -> Iterator[list[list[int]]]:
    """All ways to divide layers into at most so many sets."""
    if not layers:
        yield []
        return
    first, *rest = layers
    for sets in partitions(rest, most):
        for i in range(len(sets)):
            yield [*sets[:i], [first, *sets[i]], *sets[i + 1 :]]
        if len(sets) < most:
            yield [[first], *sets]


def best_loss(latents: list[LayerLatent], most: int) -> float:
    """The least loss of all divisions of the layers."""
    losses = []
    for sets in partitions(sorted({x.layer for x in latents}), most):
        number = {layer: i for i, x in enumerate(sets) for layer in x}
        names = [(number[x.layer], x.role) for x in latents]
        spectra, rules = [x.singular for x in latents], [x.rule for x in latents]
        losses.append(loss_of(latents, plan_tiers(spectra, BITS, rules, names)))
    return min(losses)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_layouts_lose_little_more_than_the_best_two(seed: int) -> None:
    latents = latents_of(seed)
    tiers = plan_layouts(latents, BITS, 2)
    assert len(layouts_of(latents, tiers)) <= 2
    assert sum(map(cost, tiers)) <= BITS
    assert loss_of(latents, tiers) <= 1.05 * best_loss(latents, 2)


def test_more_layouts_lose_less_and_heads_of_a_layer_are_alike() -> None:
    latents, losses = latents_of(3, layers=9), []
    for most in (1, 2, 4, None):
        tiers = plan_layouts(latents, 9 * 128 * 16 // 5, most)
        assert len(layouts_of(latents, tiers)) <= (most or 9)
        assert all(tiers[i] == tiers[i + 1] for i in range(0, len(tiers), 3))
        losses.append(loss_of(latents, tiers))
    assert losses == sorted(losses, reverse=True) and losses[0] > 1.02 * losses[-1]


def test_layers_of_unlike_latents_share_none() -> None:
    wide = [
        LayerLatent(
            layer=9, role=("k", 32), rule=any_tiers(32, (8, 4)), singular=torch.linspace(2, 0.1, 32)
        )
    ]
    latents = latents_of(0, layers=3) + wide
    tiers = plan_layouts(latents, 3 * 128 * 4, 1)
    assert len(layouts_of(latents[:-1], tiers[:-1])) == 1 and tiers[-1] != tiers[0]


def test_layouts_are_of_planned_bits() -> None:
    assert Target(factor=4, layouts=2).layouts == 2
    with pytest.raises(SettingError, match="layouts=2 is of planned bits"):
        Target(keep=0.5, layouts=2)
    with pytest.raises(SettingError, match="layouts"):
        Target(factor=4, layouts=0)
