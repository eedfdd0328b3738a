"""Makes a plan, a `CacheSpec`: how many dimensions every latent keeps, and in how many bits."""

from collections.abc import Sequence
from itertools import groupby

from kvfold.compression.basis import Basis
from kvfold.compression.planning import bit_allocation
from kvfold.compression.planning.bit_allocation import TierRule, any_tiers, plan_tiers
from kvfold.compression.planning.few_layouts import LayerLatent, plan_layouts
from kvfold.compression.planning.preference import (
    KEY_LEVELS,
    MAX_EXTRA_LOSS,
    default_layouts,
    one_pass_tiers,
)
from kvfold.compression.ranks import Candidates, LatentCandidate
from kvfold.config import Prefer
from kvfold.layout import (
    CacheSpec,
    Geometry,
    KeyKind,
    Latent,
    LayerSpec,
    Tiers,
    plain_layer,
    value_kind,
)
from kvfold.utils.errors import SettingError

LatentSize = tuple[int, Tiers | None]  # a latent's rank, and its tiers where bits are planned


def by_layer(candidates: Candidates) -> list[list[LatentCandidate]]:
    """Groups candidates by layer. They come in the order of their layers."""
    return [list(layer) for _, layer in groupby(candidates, key=lambda c: c.layer)]


def plan_bits(
    candidates: Candidates,
    bits: int,
    levels: Sequence[int],
    prefer: Prefer = "balanced",
    loads: int = 0,
    layouts: int | None = None,
) -> list[LatentSize]:
    """Ranks and tiers with the least predicted loss in `bits` per token, scales included.

    levels: the bits that tiers may have. prefer, loads: see `preference`. layouts: most
    bit-width layouts of the model, see `few_layouts` (None: `default_layouts`). Raises SettingError
    where skipped layers alone take more bits, or a layer would store nothing.
    """
    free = [c for c in candidates if not c.skip]
    skipped_bits = 16 * sum(c.numbers for c in candidates if c.skip)
    if skipped_bits > bits:
        raise SettingError(
            f"skipped layers, at 16 bits a number, take {skipped_bits} bits a token of the {bits}"
            " that this factor allows; ask for a smaller `factor`, or skip fewer layers"
        )
    budget = bits - skipped_bits
    layouts = default_layouts(prefer) if layouts is None else layouts
    if prefer == "speed":
        tiers_of = _for_speed(free, budget, levels, loads, layouts)
    elif layouts is not None:
        rules = [any_tiers(c.width, levels) for c in free]
        tiers_of = plan_layouts(_latents(free, rules), budget, layouts)
    else:
        tiers_of = _one_by_one(free, budget, levels)
    planned = dict(zip(free, tiers_of, strict=True))
    if empty := {c.layer for c in free} - {c.layer for c, tiers in planned.items() if tiers}:
        raise SettingError(
            f"{bits} bits a token leave layers {sorted(empty)} with nothing; ask for a smaller "
            "`factor`"
        )
    return [
        (c.numbers, None) if c.skip else (sum(width for width, _ in planned[c]), planned[c])
        for c in candidates
    ]


def _one_by_one(free: Candidates, budget: int, levels: Sequence[int]) -> list[Tiers]:
    """Tiers of every candidate by itself, in `budget` bits per token together."""
    rules = [any_tiers(c.width, levels) for c in free]
    return plan_tiers([c.singular for c in free], budget, rules)


def _latents(free: Candidates, rules: Sequence[TierRule]) -> list[LayerLatent]:
    """The candidates as latents to plan, with these rules."""
    return [
        LayerLatent(layer=c.layer, role=(c.side, c.width), rule=rule, singular=c.singular)
        for c, rule in zip(free, rules, strict=True)
    ]


def _for_speed(
    free: Candidates, budget: int, levels: Sequence[int], loads: int, layouts: int | None
) -> list[Tiers]:
    """Tiers that the heads of a layer share.

    Keys that are scored as they are stored take KEY_LEVELS, unless that loses MAX_EXTRA_LOSS more.
    """
    spectra = [c.singular for c in free]
    plans = []
    for key_levels in (levels,) if loads else (KEY_LEVELS, levels):
        rules = [
            one_pass_tiers(c.side, c.width, key_levels if c.side == "k" else levels, loads)
            for c in free
        ]
        tiers = plan_layouts(_latents(free, rules), budget, layouts)
        plans.append((sum(map(bit_allocation.predicted_loss, spectra, tiers)), tiers))
    (fast_loss, fast), (least_loss, least) = plans[0], plans[-1]
    return fast if fast_loss <= (1 + MAX_EXTRA_LOSS) * least_loss else least


def predicted_loss(basis: Basis, latent: Latent) -> float:
    """Predicted increase in cross-entropy (nats/token) of storing a latent, for a basis that
    predicts losses."""
    if latent.tiers is None:
        return float(basis.loss[latent.rank :].sum())
    return bit_allocation.predicted_loss(basis.singular, latent.tiers)


def planned_spec(
    candidates: Candidates, sizes: Sequence[LatentSize], geometry: Geometry, keys: KeyKind
) -> CacheSpec:
    """The plan of these latent sizes. A layer of skipped latents stays uncompressed."""
    size_of = dict(zip(candidates, sizes, strict=True))
    specs = []
    for layer in by_layer(candidates):
        if all(c.skip for c in layer):
            specs.append(plain_layer(geometry))
            continue
        latents = tuple(
            Latent(side=c.side, heads=c.heads, rank=rank, tiers=tiers)
            for c in layer
            for rank, tiers in (size_of[c],)
        )
        values = value_kind(geometry, [x for x in latents if "v" in x.side])
        specs.append(LayerSpec(keys=keys, values=values, latents=latents))
    return CacheSpec(geometry=geometry, layers=tuple(specs))
