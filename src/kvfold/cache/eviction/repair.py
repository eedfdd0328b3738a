"""Adjust the keys and values of the remaining rows so that attention over them matches attention
over all rows, after Attention Matching (adamzweiger/compaction).

Pure functions that never wait for the device. Shapes: H KV heads, m queries per head, T rows, S at
least the number of remaining rows of any head, dk and dv dimensions of a key and of a value.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.ops.common.attention import capped

WEIGHTS, KEYS, VALUES = 0.1, 0.01, 1.0  # ridges, as shares of the mean of the Gram diagonal
MOST = 3.0  # log w is clipped to -MOST .. MOST
SCORES = 2**26  # most attention scores computed at once (at least one head's)


class Repaired(NamedTuple):
    """The remaining rows of each head, in order: places int64 [H, S], their indices among the T
    rows; inside bool [H, S], False after a head's last one; keys fp32 [H, S, dk], values fp32
    [H, S, dv]."""

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
    """Fit the remaining rows so that these queries attend to them as they attended to all rows.

    q [H, m, dk], scaled; k [H, T, dk], v [H, T, dv]: valid bool [H, T] marks rows that exist,
    `stays` bool [H, T] those that remain; most: S.

    Let M [m, S] be the attention weights of the remaining rows in the softmax over all rows. w =
    argmin |M w - 1|^2 makes up for the evicted weight. A key becomes k + log(w) u, where u has
    products closest to 1 with the queries. Then v = argmin |A v - y|^2, where A is the attention
    over the remaining rows and y the output over all rows. A ridge keeps w near 1 and v near the
    stored values.
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
    """Ridge regression: x [.., n, c] that minimises |a x - b|^2 + penalty |x|^2, for a [.., m, n]
    and b [.., m, c].

    penalty: `ridge` times the mean of the diagonal of a^T a over columns that are not 0. The matrix
        to factor then has a condition number of at most 1 + n / ridge, for which fp32 is enough.
    """
    squares = a.square().sum(-2)
    count = (squares > 0).sum(-1).clamp(min=1)
    penalty = (ridge * squares.sum(-1) / count).clamp(min=torch.finfo(a.dtype).tiny)
    wide = a.shape[-1] > a.shape[-2]
    short = a if wide else a.mT
    gram = short @ short.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(penalty[..., None])
    factor, _ = torch.linalg.cholesky_ex(gram)  # unlike `cholesky`, does not wait for the device
    solution = torch.linalg.solve_triangular(factor, b if wide else a.mT @ b, upper=False)
    solution = torch.linalg.solve_triangular(factor.mT, solution, upper=True)
    return a.mT @ solution if wide else solution


def _attended(
    softcap: float | None, q: Tensor, k: Tensor, v: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention outputs [H, m, dv], and the log-sum-exps [H, m, 1] of the scores."""
    scores, mass = _scores(q, k, rows, softcap)
    return (scores - mass).exp() @ v, mass


def _scores(q: Tensor, k: Tensor, rows: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Scores [H, m, T], -inf where there is no row, and their log-sum-exps [H, m, 1], 0 for a head
    without rows."""
    scores = capped(q @ k.mT, softcap).masked_fill(~rows[:, None], -torch.inf)
    mass = scores.logsumexp(-1, keepdim=True)
    return scores, mass.masked_fill(mass == -torch.inf, 0.0)
