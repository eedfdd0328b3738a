"""A plan: how many dimensions every latent keeps, and with how many bits, as a CacheSpec."""

from collections.abc import Sequence
from itertools import groupby

from kvfold.compression.basis import Basis
from kvfold.compression.planning import bit_allocation
from kvfold.compression.planning.bit_allocation import any_tiers, plan_tiers
from kvfold.compression.planning.preference import KEY_LEVELS, LITTLE, one_pass_tiers
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

Size = tuple[int, Tiers | None]  # a latent's rank, and its tiers where bits are planned


def by_layer(candidates: Candidates) -> list[list[LatentCandidate]]:
    """Candidates, which come in the order of their layers, layer by layer."""
    return [list(own) for _, own in groupby(candidates, key=lambda c: c.layer)]


def plan_bits(
    candidates: Candidates,
    bits: int,
    levels: Sequence[int],
    prefer: Prefer = "balanced",
    loads: int = 0,
) -> list[Size]:
    """Ranks and tiers of `levels` that spend `bits` a token, scales included, for the least
    predicted loss; prefer, loads: see `preference`.

    Raises ValueError where skipped layers do not fit, or a layer would store nothing.
    """
    free = [c for c in candidates if not c.skip]
    whole = 16 * sum(c.numbers for c in candidates if c.skip)
    if whole > bits:
        raise SettingError(
            f"skipped layers, at 16 bits a number, take {whole} bits a token of the {bits} that"
            " this factor allows; ask for a smaller `factor`, or skip fewer layers"
        )
    room = bits - whole
    if prefer == "speed":
        tiers_of = _for_speed(free, room, levels, loads)
    else:
        tiers_of = _planned(free, room, levels)
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


def _planned(free: Candidates, room: int, levels: Sequence[int]) -> list[Tiers]:
    """Tiers of every candidate by itself, in so many bits a token."""
    rules = [any_tiers(c.width, levels) for c in free]
    return plan_tiers([c.singular for c in free], room, rules)


def _for_speed(free: Candidates, room: int, levels: Sequence[int], loads: int) -> list[Tiers]:
    """Tiers that the heads of a layer share; keys that are not rebuilt in KEY_LEVELS, where that
    loses LITTLE more."""
    spectra, sets = [c.singular for c in free], [(c.layer, c.side, c.width) for c in free]
    found = []
    for keys in (levels,) if loads else (KEY_LEVELS, levels):
        each = ((c, keys if c.side == "k" else levels) for c in free)
        rules = [one_pass_tiers(c.side, c.width, own, loads) for c, own in each]
        tiers = plan_tiers(spectra, room, rules, sets)
        found.append((sum(map(bit_allocation.predicted_loss, spectra, tiers)), tiers))
    (few, without), (least, every) = found[0], found[-1]
    return without if few <= (1 + LITTLE) * least else every


def predicted_loss(basis: Basis, latent: Latent) -> float:
    """Nats a token that storing a latent is predicted to lose, by a basis that predicts losses."""
    if latent.tiers is None:
        return float(basis.loss[latent.rank :].sum())
    return bit_allocation.predicted_loss(basis.singular, latent.tiers)


def planned_spec(
    candidates: Candidates, sizes: Sequence[Size], geometry: Geometry, keys: KeyKind
) -> CacheSpec:
    """Sizes of all latents as a spec; a layer of skipped ones is plain."""
    size_of = dict(zip(candidates, sizes, strict=True))
    specs = []
    for own in by_layer(candidates):
        if all(c.skip for c in own):
            specs.append(plain_layer(geometry))
            continue
        latents = tuple(
            Latent(side=c.side, heads=c.heads, rank=rank, tiers=tiers)
            for c in own
            for rank, tiers in (size_of[c],)
        )
        values = value_kind(geometry, [x for x in latents if "v" in x.side])
        specs.append(LayerSpec(keys=keys, values=values, latents=latents))
    return CacheSpec(geometry=geometry, layers=tuple(specs))
