"""Adjust the keys and values of the remaining entries so that attention over them matches attention
over all entries, after Attention Matching (adamzweiger/compaction).

Pure functions that never wait for the device. Shapes: H KV heads, m queries per head, T entries, S
at least the number of remaining entries of any head, dk and dv dimensions of a key and of a value.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.ops.common.attention import capped

WEIGHTS, KEYS, VALUES = 0.1, 0.01, 1.0  # ridges, as shares of the mean of the Gram diagonal
MOST = 3.0  # log w is clipped to -MOST .. MOST
SCORES = 2**26  # most attention scores computed at once (at least one head's)


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

    Let M [m, S] be the attention weights of the remaining entries in the softmax over all entries.
    w = argmin |M w - 1|^2 makes up for the evicted weight. A key becomes k + log(w) u, where u has
    products closest to 1 with the queries. Then v = argmin |A v - y|^2, where A is the attention
    over the remaining entries and y the output over all entries. A ridge keeps w near 1
    and v near the stored values.
    """
    q, k, v = q.float(), k.float(), v.float()
    heads = max(1, SCORES // (q.shape[1] * k.shape[1]))
    chunks = (x.split(heads) for x in (q, k, v, valid))
    target, lse = map(torch.cat, zip(*map(partial(_attended, softcap), *chunks), strict=True))
    places = (~stays).byte().argsort(dim=-1, stable=True)[:, :most]
    inside = stays.gather(1, places)
    k, v = (x.take_along_dim(places[..., None], 1) for x in (k, v))
    shares = (_scores(q, k, inside, softcap)[0] - lse).exp()
    w = 1 + ridge_solve(shares, 1 - shares.sum(-1, keepdim=True), WEIGHTS)
    u = ridge_solve(q, torch.ones_like(shares[..., :1]), KEYS)
    k = k + w.log().nan_to_num(-MOST).clamp(-MOST, MOST) * u.mT
    scores, lse = _scores(q, k, inside, softcap)
    weights = (scores - lse).exp()
    return FittedEntries(places, inside, k, v + ridge_solve(weights, target - weights @ v, VALUES))


def ridge_solve(a: Tensor, b: Tensor, ridge: float) -> Tensor:
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
    softcap: float | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention outputs [H, m, dv], and the log-sum-exps [H, m, 1] of the scores."""
    scores, lse = _scores(q, k, mask, softcap)
    return (scores - lse).exp() @ v, lse


def _scores(q: Tensor, k: Tensor, mask: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Scores [H, m, T], -inf where there is no entry, and their log-sum-exps [H, m, 1], 0 for a
    head without entries."""
    scores = capped(q @ k.mT, softcap).masked_fill(~mask[:, None], -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores, lse.masked_fill(lse == -torch.inf, 0.0)
