"""What kernels would serve a model, by its config and what it stores."""

from typing import Any

import torch

from kvfold.attention.selector import Kernels, kernels
from kvfold.models.folded import layer_shapes
from kvfold.spec import CacheSpec
from kvfold.spec.layout import cache_layout


def kernels_of(config: Any, spec: CacheSpec, dtype: torch.dtype | None = None) -> Kernels:
    """Of a model that stores what `spec` says, in the bits that are planned, or 16. dtype: of its
    weights (None: the config's)."""
    shapes = layer_shapes(config, spec)
    dtype = dtype or config.dtype or torch.float32
    tracked = [shape.window is not None for shape in shapes]
    layout = cache_layout(spec, itemsize=dtype.itemsize, tracked=tracked)
    return kernels(shapes, layout, dtype)
