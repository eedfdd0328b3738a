"""`Moment`: weighted fp64 sums over samples, with their means, second moments and covariances.

Shapes: N samples of n numbers each; leading dimensions are separate moments.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moment:
    """Weighted sums over samples: second [.., n, n], first [.., n], weight []."""

    second: Tensor
    first: Tensor
    weight: Tensor

    @classmethod
    def of(cls, samples: Tensor, weight: Tensor | None = None) -> "Moment":
        """The moment of samples [.., N, n] with weights [.., N], default 1."""
        x = samples.detach().double()
        if weight is None:
            count = torch.full(x.shape[:-2], x.shape[-2], dtype=x.dtype, device=x.device)
            return cls(second=x.mT @ x, first=x.sum(-2), weight=count)
        w = weight.detach().double()
        xw = x * w[..., None]
        return cls(second=xw.mT @ x, first=xw.sum(-2), weight=w.sum(-1))

    @classmethod
    def once(cls, second: Tensor, first: Tensor) -> "Moment":
        """A moment whose sums count as one sample."""
        return cls(second, first, torch.ones((), dtype=first.dtype, device=first.device))

    def __iadd__(self, other: "Moment") -> "Moment":
        self.second += other.second
        self.first += other.first
        self.weight += other.weight
        return self

    def mean(self) -> Tensor:
        """E[c]."""
        return self.first / self._weight(1)

    def raw(self) -> Tensor:
        """E[c c^T]."""
        return self.second / self._weight(2)

    def covariance(self) -> Tensor:
        """E[c c^T] - E[c] E[c]^T."""
        mean = self.mean()
        return self.raw() - mean[..., :, None] * mean[..., None, :]

    def _weight(self, trailing: int) -> Tensor:
        return self.weight.reshape(self.weight.shape + (1,) * trailing)
