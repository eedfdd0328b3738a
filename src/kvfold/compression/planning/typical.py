"""A plan of a recipe and size before anything is measured: what a model's plan will be like, to
compute its bytes and to predict its time."""

from collections.abc import Sequence

import torch

from kvfold.compression.bases import builder_of
from kvfold.compression.planning.bit_allocation import cost, plan_tiers
from kvfold.compression.planning.preference import KEY_LEVELS, rule_of
from kvfold.compression.planning.sizes import bits_of
from kvfold.compression.planning.target import Target
from kvfold.config import LEVELS, Recipe
from kvfold.layout import (
    CacheSpec,
    Geometry,
    KeyKind,
    Latent,
    LayerSpec,
    Side,
    Tiers,
    value_kind,
)

HeadSets = Sequence[tuple[Side, tuple[int, ...]]]
STEPS = 16  # of a layer's bits, to look for a larger plan
# Singular values fall to exp(-DECAY) of the first. With these, plans of Llama-3.1-8B's shape have
# about the tiers of plans of trained models (`bench.variants`).
DECAY: dict[Side, float] = {"k": 3.0, "v": 4.0, "kv": 5.0}


def typical_spec(recipe: Recipe, geometry: Geometry, target: Target) -> CacheSpec:
    """A plan of `target.factor`, from singular values that fall exponentially, alike in all layers.

    It takes about the bytes that the factor allows, as other plans do, and never more: some layers
    have the next larger plan. How many numbers have how many bits will be different in the plan of
    a measured model.
    """
    assert target.factor is not None
    basis, prefer = builder_of(recipe), target.preference
    sets, keys = basis.head_sets(geometry), basis.key_kind(geometry)
    spectra, rules = [], []
    for side, heads in sets:
        width = len(heads) * geometry.head_width(side)
        levels = KEY_LEVELS if (prefer, side, keys) == ("speed", "k", "post_rope") else LEVELS
        rules.append(rule_of(prefer, side, width, levels, keys))
        places = torch.arange(width, dtype=torch.float64) / width
        spectra.append(torch.exp(-DECAY[side] * places))
    names = [(side, len(heads)) for side, heads in sets]

    def layer_of(bits: int) -> tuple[int, LayerSpec]:
        """The plan of a layer within so many bits, after the bits that it takes."""
        tiers = plan_tiers(spectra, bits, rules, names)
        return sum(map(cost, tiers)), _layer(sets, tiers, geometry, keys)

    budget, num_layers = bits_of(target.factor, geometry), geometry.num_layers
    share = budget // num_layers
    taken, layer = layer_of(share)
    larger = (layer_of(share + share * more // STEPS) for more in range(1, STEPS))
    more, larger_layer = next((x for x in larger if x[0] > taken), (taken + budget, layer))
    num_larger = (budget - taken * num_layers) // (more - taken)
    return CacheSpec(
        geometry=geometry,
        layers=(larger_layer,) * num_larger + (layer,) * (num_layers - num_larger),
    )


def _layer(
    sets: HeadSets, tiers_of: Sequence[Tiers], geometry: Geometry, keys: KeyKind
) -> LayerSpec:
    latents = tuple(
        Latent(side=side, heads=heads, rank=sum(width for width, _ in tiers), tiers=tiers)
        for (side, heads), tiers in zip(sets, tiers_of, strict=True)
    )
    values = value_kind(geometry, [x for x in latents if "v" in x.side])
    return LayerSpec(keys=keys, values=values, latents=latents)
