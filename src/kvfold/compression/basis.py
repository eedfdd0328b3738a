"""Bases: ordered directions of keys and values, as pure functions of fp64 tensors.

A basis turns the n numbers c of a latent's heads (keys, values, or both) into z = down^T (c - mean)
and back, c_hat = mean + up z, with down^T up = I. Shapes: w <= n directions.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHRINK = 1e-4  # is added to eigenvalues, times their mean: so null directions stay invertible


@dataclass(frozen=True, kw_only=True)
class Basis:
    """Directions, best first: down, up [n, w], mean [n], and singular [w], descending.

    In loss-weighted bases singular^2 / 2 is the predicted increase in cross-entropy (nats/token) of
    dropping a direction. In published ones singular are the method's singular values, of another
    unit. variance [w]: of z; None where it was not measured.
    """

    down: Tensor
    up: Tensor
    mean: Tensor
    singular: Tensor
    variance: Tensor | None = None

    @property
    def width(self) -> int:
        return len(self.singular)

    @property
    def loss(self) -> Tensor:
        """Predicted loss of dropping each direction [w]."""
        return self.singular.square() / 2

    def measured(self, covariance: Tensor) -> "Basis":
        """The basis with the variance of every stored number, from Cov(c) [n, n]."""
        variance = torch.einsum("nw,nm,mw->w", self.down, covariance, self.down)
        return replace(self, variance=variance.clamp(min=0))

    def truncated(self, rank: int) -> tuple[Tensor, Tensor]:
        """(down, up) [n, rank], scaled so that the stored numbers have an rms of 1 together."""
        down, up = self.down[:, :rank], self.up[:, :rank]
        if self.variance is None or rank == 0:
            return down, up
        rms = self.variance[:rank].mean().sqrt()
        return (down / rms, up * rms) if rms > 0 else (down, up)

    def lifted(self, axes: Tensor, origin: Tensor) -> "Basis":
        """The basis for the numbers origin [n'] + axes [n', n] c."""
        down, up, mean = axes @ self.down, axes @ self.up, origin + axes @ self.mean
        return replace(self, down=down, up=up, mean=mean)


def orthonormal(second: Tensor, mean: Tensor) -> Basis:
    """Principal directions of vectors with second moments `second` [n, n] (sums or means).

    ZACK §4.3 and ZDC §4.3 with the sum over the stacked vectors [Q; K] or [V; W_O]: their right
    singular vectors are the eigenvectors of these second moments.
    """
    values, vectors = torch.linalg.eigh(_symmetric(second))
    values, vectors = values.flip(0), vectors.flip(1)
    return Basis(down=vectors, up=vectors, mean=mean, singular=values.clamp(min=0).sqrt())


def weight_svd(weight: Tensor, bias: Tensor) -> Basis:
    """LoRC §4.1: truncated SVD of W [n, D] as a projection of its outputs."""
    u, s, _ = torch.linalg.svd(weight, full_matrices=False)
    return Basis(down=u, up=u, mean=bias, singular=s)


def whitened_svd(raw: Tensor, mean: Tensor, bias: Tensor, width: int) -> Basis:
    """Palu eq. 1 and 7 with SVD-LLM's whitening: W L = U S V^T, where L L^T = E[x x^T].

    raw [n, n] E[c c^T], mean [n] E[c], bias [n]; width = min(n, D) directions.

    The cache stores A x with A = sqrt(S) V^T L^-1, and B A x with B = U sqrt(S) reconstructs. As
    V^T L^-1 = S^-1 U^T W, this is down = U / sqrt(S) and up = U sqrt(S). Stored number i has the
    rms sqrt(S_i), not S_i, so numbers that share a quantiser's scale are more alike. The left
    singular vectors of W L are the eigenvectors of W E[x x^T] W^T, the second moment of the outputs
    without their bias; so neither the moments of x nor a Cholesky factor is needed.
    """
    centred = raw - torch.outer(mean, bias) - torch.outer(bias, mean) + torch.outer(bias, bias)
    full = orthonormal(centred, bias)
    axes, singular = full.down[:, :width], full.singular[:width]
    root = _balance(singular)
    return Basis(down=axes / root, up=axes * root, mean=bias, singular=singular)


def _balance(singular: Tensor) -> Tensor:
    """sqrt(S) [w], with S at least 1e-6 of the largest, so that empty directions are invertible."""
    largest = singular.max() if len(singular) else singular.sum()
    if largest == 0:
        return torch.ones_like(singular)
    return singular.clamp(min=1e-6 * largest).sqrt()


def weighted(
    covariance: Tensor,
    gradient: Tensor,
    mean: Tensor,
    first: Tensor | None = None,
    *,
    fixed: bool = False,
) -> Basis:
    """The basis that loses least, to second order, when directions are dropped.

    covariance [n, n]: of the cached numbers. gradient [n, n]: E[g g^T] of the summed loss. The loss
    of an error e is e^T gradient e / 2, so the best rank-r map is the SVD of L_g^T L_c. Its
    singular values are split evenly between down and up, which also suits few bits best.

    first [n]: the numbers of a sequence's first token, an attention sink. Its keys and values lie
    far from all others, and have gradients so large that moments with it describe nothing else. So
    the moments leave it out, and the first direction is reserved for it: at rank 1 it is exact
    already. Where other tokens spread further along that direction than the first token is from
    their mean, the mean of the basis becomes the first token; this is so in heads whose keys form a
    few distant clusters, the largest around it. fixed: the mean is never replaced.
    """
    if first is None or not (delta := first - mean).any():
        return _balanced_pair(covariance, gradient, mean)
    # `share` reads how much of delta is in c, at the least cost; `rest` reads all other directions.
    metric = _root(gradient)
    weighted_delta = metric.mT @ delta
    share = metric @ weighted_delta / (weighted_delta @ weighted_delta)
    rest = torch.linalg.qr(share[:, None], mode="complete").Q[:, 1:]
    dual = torch.linalg.inv(torch.cat((delta[:, None], rest), 1)).mT[:, 1:]
    others = _balanced_pair(dual.mT @ covariance @ dual, rest.mT @ gradient @ rest, mean)
    spread = (share @ _root(covariance)).norm()
    if spread > 1 and not fixed:
        mean, spread = first, (spread.square() + 1).sqrt()
    # The loss of other tokens without this direction; at least that of the next direction.
    largest = torch.cat(((spread * weighted_delta.norm())[None], others.singular)).max()
    scale = largest.sqrt() / spread
    return Basis(
        down=torch.cat(((share * scale)[:, None], dual @ others.down), 1),
        up=torch.cat(((delta / scale)[:, None], rest @ others.up), 1),
        mean=mean,
        singular=torch.cat((largest[None], others.singular)),
    )


def _balanced_pair(covariance: Tensor, gradient: Tensor, mean: Tensor) -> Basis:
    left, right = _root(gradient), _root(covariance)
    u, s, vt = torch.linalg.svd(left.mT @ right)
    scale = s.rsqrt()
    return Basis(down=left @ u * scale, up=right @ vt.mT * scale, mean=mean, singular=s)


def _root(second: Tensor) -> Tensor:
    """L with L L^T = second, shrunk towards a multiple of the identity."""
    values, vectors = torch.linalg.eigh(_symmetric(second))
    floor = values.clamp(min=0).mean().clamp(min=torch.finfo(values.dtype).tiny ** 0.5)
    return vectors * (values.clamp(min=0) + SHRINK * floor).sqrt()


def _symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2
