"""Bases: which directions of keys and values to keep. Tensor in, tensor out, fp64.

Shapes: n numbers that one latent stands for (its heads' keys, values, or both), w <= n useful
directions. A basis gives z = down^T (c - mean) and c_hat = mean + up z; down^T up = I.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHRINK = 1e-4  # of the mean eigenvalue: keeps null directions usable and keep = 1.0 exact


@dataclass(frozen=True, kw_only=True)
class Basis:
    """down, up [n, w]; mean [n]; singular [w], descending, in the basis's own currency.

    For loss-weighted bases singular^2 / 2 is the predicted loss (nats per token) of dropping a
    direction; for the published ones it is their own singular value. variance [w]: of z, where
    measured.
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
        """Predicted cost of dropping each direction [w]."""
        return self.singular.square() / 2

    def measured(self, covariance: Tensor) -> "Basis":
        """With the variance [w] of every stored number, from Cov(c) [n, n]."""
        variance = torch.einsum("nw,nm,mw->w", self.down, covariance, self.down)
        return replace(self, variance=variance.clamp(min=0))

    def truncated(self, rank: int) -> tuple[Tensor, Tensor]:
        """(down, up) [n, rank] with z scaled to unit rms over the kept directions."""
        down, up = self.down[:, :rank], self.up[:, :rank]
        if self.variance is None or rank == 0:
            return down, up
        rms = self.variance[:rank].mean().sqrt()
        return (down / rms, up * rms) if rms > 0 else (down, up)

    def lifted(self, axes: Tensor, origin: Tensor) -> "Basis":
        """The same basis for numbers origin [n'] + axes [n', n] c."""
        down, up, mean = axes @ self.down, axes @ self.up, origin + axes @ self.mean
        return replace(self, down=down, up=up, mean=mean)


def orthonormal(second: Tensor, mean: Tensor) -> Basis:
    """Principal directions of rows with second moments `second` [n, n] (sums or means).

    ZACK §4.3 / ZDC §4.3 with second = sum over rows [Q; K] or [V; W_O]: the right singular vectors
    of the stacked rows are the eigenvectors of their second moments, in any rank.
    """
    values, vectors = torch.linalg.eigh(_symmetric(second))
    values, vectors = values.flip(0), vectors.flip(1)
    return Basis(down=vectors, up=vectors, mean=mean, singular=values.clamp(min=0).sqrt())


def weight_svd(weight: Tensor, bias: Tensor) -> Basis:
    """LoRC §4.1: truncated SVD of W [n, D] as a projection of its outputs."""
    u, s, _ = torch.linalg.svd(weight, full_matrices=False)
    return Basis(down=u, up=u, mean=bias, singular=s)


def whitened_svd(raw: Tensor, mean: Tensor, bias: Tensor, width: int) -> Basis:
    """Palu eq. 1 and 7 with SVD-LLM's whitening: W L = U S V^T, L L^T = E[x x^T].

    What is cached is A x with A = sqrt(S) V^T L^-1 and what is rebuilt B A x with B = U sqrt(S). As
    V^T L^-1 = S^-1 U^T W, that is down = U / sqrt(S), up = U sqrt(S), and stored number i has the
    rms sqrt(S_i), not S_i: numbers that share a quantiser's scale are more alike. W L's left
    singular vectors are the eigenvectors of W E[x x^T] W^T, the second moment of the outputs
    without their bias, so neither x's moments nor a Cholesky factor is needed. raw [n, n] E[c c^T],
    mean [n] E[c], bias [n]; width = min(n, D) useful directions.
    """
    centred = raw - torch.outer(mean, bias) - torch.outer(bias, mean) + torch.outer(bias, bias)
    full = orthonormal(centred, bias)
    axes, singular = full.down[:, :width], full.singular[:width]
    root = _balance(singular)
    return Basis(down=axes / root, up=axes * root, mean=bias, singular=singular)


def _balance(singular: Tensor) -> Tensor:
    """sqrt(S) [w], S at least 1e-6 of the largest: directions that hold nothing stay invertible."""
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
    """Ours: the pair of maps that loses least, to second order, when directions are dropped.

    covariance [n, n] of what is cached, gradient [n, n] = E[g g^T] of the summed loss. The loss of
    an error e is e^T gradient e / 2, so the best rank-r map is the SVD of L_g^T L_c; its singular
    values are split evenly between both maps, which is also the best layout for few bits.

    first [n]: what a sequence's first token stores. Attention sinks there: its keys and values lie
    far from all others and the loss feels them so much that moments with it are about nothing else.
    So moments leave it out, and the first direction is its own: at rank 1 it is exact already.
    Where the others spread further along it than it lies from their mean, numbers count from the
    first token: heads whose keys fall into a few far clusters have it in the largest. fixed: never.
    """
    if first is None or not (delta := first - mean).any():
        return _balanced_pair(covariance, gradient, mean)
    # The share of delta in c that costs least, and coordinates of all that is left.
    metric = _root(gradient)
    felt = metric.mT @ delta
    share = metric @ felt / (felt @ felt)
    rest = torch.linalg.qr(share[:, None], mode="complete").Q[:, 1:]
    dual = torch.linalg.inv(torch.cat((delta[:, None], rest), 1)).mT[:, 1:]
    others = _balanced_pair(dual.mT @ covariance @ dual, rest.mT @ gradient @ rest, mean)
    spread = (share @ _root(covariance)).norm()
    if spread > 1 and not fixed:
        mean, spread = first, (spread.square() + 1).sqrt()
    # What others lose without it; where they do not vary along it, as large as the next one's.
    most = torch.cat(((spread * felt.norm())[None], others.singular)).max()
    scale = most.sqrt() / spread
    return Basis(
        down=torch.cat(((share * scale)[:, None], dual @ others.down), 1),
        up=torch.cat(((delta / scale)[:, None], rest @ others.up), 1),
        mean=mean,
        singular=torch.cat((most[None], others.singular)),
    )


def _balanced_pair(covariance: Tensor, gradient: Tensor, mean: Tensor) -> Basis:
    left, right = _root(gradient), _root(covariance)
    u, s, vt = torch.linalg.svd(left.mT @ right)
    scale = s.rsqrt()
    return Basis(down=left @ u * scale, up=right @ vt.mT * scale, mean=mean, singular=s)


def _root(second: Tensor) -> Tensor:
    """L with L L^T = second, shrunk towards a multiple of the identity; no inverse is taken."""
    values, vectors = torch.linalg.eigh(_symmetric(second))
    floor = values.clamp(min=0).mean().clamp(min=torch.finfo(values.dtype).tiny ** 0.5)
    return vectors * (values.clamp(min=0) + SHRINK * floor).sqrt()


def _symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2
