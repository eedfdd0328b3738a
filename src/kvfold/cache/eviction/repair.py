"""Rows that stay, changed so that they attend as all rows did, after Attention Matching
(adamzweiger/compaction).

Pure functions, that never wait for the device. Shapes: H KV heads, m queries of each, T rows, S at
least the most that stay of a head, dk and dv numbers of a key and of a value.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.ops.common.attention import capped

WEIGHTS, KEYS, VALUES = 0.1, 0.01, 1.0  # ridges, as shares of the mean of a matrix's diagonal
MOST = 3.0  # log w, up or down
SCORES = 2**26  # of queries and all rows, of heads that are attended at once, or of one


class Repaired(NamedTuple):
    """Rows that stay, of every head in their order: places int64 [H, S] among its T; inside bool
    [H, S], False behind a head's last one; keys fp32 [H, S, dk], values fp32 [H, S, dv]."""

    places: Tensor
    inside: Tensor
    keys: Tensor
    values: Tensor


def repaired(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    stays: Tensor,
    most: int,
    softcap: float | None = None,
) -> Repaired:
    """Fit rows that stay to what attention to all rows gives queries like these.

    q [H, m, dk], scaled; k [H, T, dk], v [H, T, dv]: rows where valid bool [H, T] says so, of which
    `stays` bool [H, T] stay; most: S. M [m, S] are weights of these as shares of all rows', and w =
    argmin |M w - 1|^2 makes good for the weight that goes. A key becomes k + log(w) u, u having
    products closest to 1 with the queries. Then v = argmin |A v - y|^2, A attention to rows that
    stay and y what attention to all gave. Both are held to what is there by a ridge.
    """
    q, k, v = q.float(), k.float(), v.float()
    heads = max(1, SCORES // (q.shape[1] * k.shape[1]))
    parts = (x.split(heads) for x in (q, k, v, valid))
    target, mass = map(torch.cat, zip(*map(partial(_attended, softcap), *parts), strict=True))
    places = (~stays).byte().argsort(dim=-1, stable=True)[:, :most]
    inside = stays.gather(1, places)
    k, v = (x.take_along_dim(places[..., None], 1) for x in (k, v))
    shares = (_scores(q, k, inside, softcap)[0] - mass).exp()
    w = 1 + nearest(shares, 1 - shares.sum(-1, keepdim=True), WEIGHTS)
    u = nearest(q, torch.ones_like(shares[..., :1]), KEYS)
    k = k + w.log().nan_to_num(-MOST).clamp(-MOST, MOST) * u.mT
    scores, mass = _scores(q, k, inside, softcap)
    weights = (scores - mass).exp()
    return Repaired(places, inside, k, v + nearest(weights, target - weights @ v, VALUES))


def nearest(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    """The x [.., n, c] least in |a x - b|^2 + held |x|^2, of a [.., m, n] and b [.., m, c]; held:
    `ridge` times the mean of a^T a's diagonal, over columns that are not 0, so that the matrix to
    factor has a condition of at most 1 + n / ridge, and fp32 is enough."""
    squares = a.square().sum(-2)
    count = (squares > 0).sum(-1).clamp(min=1)
    held = (ridge * squares.sum(-1) / count).clamp(min=torch.finfo(a.dtype).tiny)
    wide = a.shape[-1] > a.shape[-2]
    few = a if wide else a.mT
    gram = few @ few.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(held[..., None])
    factor, _ = torch.linalg.cholesky_ex(gram)  # which waits for no device, as `cholesky` does
    found = torch.linalg.solve_triangular(factor, b if wide else a.mT @ b, upper=False)
    found = torch.linalg.solve_triangular(factor.mT, found, upper=True)
    return a.mT @ found if wide else found


def _attended(
    softcap: float | None, q: Tensor, k: Tensor, v: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [H, m, dv], and log-sum-exps [H, m, 1] of scores."""
    scores, mass = _scores(q, k, rows, softcap)
    return (scores - mass).exp() @ v, mass


def _scores(q: Tensor, k: Tensor, rows: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Scores [H, m, T], -inf where there is no row, and their log-sum-exp [H, m, 1], 0 where there
    is none at all."""
    scores = capped(q @ k.mT, softcap).masked_fill(~rows[:, None], -torch.inf)
    mass = scores.logsumexp(-1, keepdim=True)
    return scores, mass.masked_fill(mass == -torch.inf, 0.0)
