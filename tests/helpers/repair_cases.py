"""Repair of heads that all keep their entries among as many, in one call."""

from typing import NamedTuple

from torch import Tensor

from kvfold.cache.eviction.repair import attend, fit


class FittedEntries(NamedTuple):
    """The remaining entries of each head, in order: places int64 [H, S], their indices among the T
    entries; inside bool [H, S], False after a head's last one; keys fp32 [H, S, dk], values fp32
    [H, S, dv]."""

    places: Tensor
    inside: Tensor
    keys: Tensor
    values: Tensor


def fit_to_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    stays: Tensor,
    most: int,
    softcap: float | None = None,
) -> FittedEntries:
    """Fit the remaining entries so that these queries attend to them as they did to all entries.

    q [H, m, dk], scaled; k [H, T, dk], v [H, T, dv]: valid bool [H, T] marks entries that exist,
    `stays` bool [H, T] those that remain; most: S.
    """
    q = q.to(k.dtype)
    target, lse = attend(q, k, v, valid, softcap)
    places = (~stays).byte().argsort(dim=-1, stable=True)[:, :most]
    inside = stays.gather(1, places)
    k, v = (x.take_along_dim(places[..., None], 1) for x in (k, v))
    return FittedEntries(places, inside, *fit(q, k, v, inside, target, lse, softcap))
