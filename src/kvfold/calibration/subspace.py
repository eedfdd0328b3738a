"""The subspace that a layer's keys and values lie in.

Shapes: K = Hk * d numbers of keys (or values) of a token in a layer, D model width, N tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.layout import Geometry
from kvfold.models.adapter import Family


@dataclass(frozen=True)
class Subspace:
    """The affine subspace of a layer's (keys before RoPE, values): origin [2K] + span(axes [2K,
    D])."""

    axes: Tensor
    origin: Tensor

    def coordinates(self, x: Tensor) -> Tensor:
        """Coordinates [N, D] of vectors [N, 2K], fp64."""
        return (x.double() - self.origin) @ self.axes


def subspace(family: type[Family], attention: Any, geometry: Geometry) -> Subspace | None:
    """The subspace that W_K and W_V can produce, of at most D dimensions.

    None where it is all of 2K dimensions: for 2K <= D, or where a norm acts on the keys.
    """
    if 2 * geometry.kv_width <= geometry.hidden_size or geometry.key_norm:
        return None
    w = family.projections(attention, geometry)
    axes = torch.linalg.svd(torch.cat((w.k, w.v)), full_matrices=False).U
    return Subspace(axes, torch.cat((w.k_bias, w.v_bias)))
