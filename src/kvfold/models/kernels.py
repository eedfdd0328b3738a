"""Which kernels serve a model, judged by its config and what it stores."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kvfold.attention.selector import Kernels, kernels
from kvfold.layout import CacheSpec
from kvfold.layout.pages import CacheLayout, cache_layout
from kvfold.models.folded import attention_windows, layer_shapes
from kvfold.ops.decode import one_pass_page, two_passes


def kernels_of(config: Any, spec: CacheSpec, dtype: torch.dtype | None = None) -> Kernels:
    """Kernels for a model with this spec, in the planned bits, or 16. dtype: of its weights (None:
    the config's)."""
    shapes = layer_shapes(config, spec)
    dtype = dtype or config.dtype or torch.float32
    tracked = [shape.window is not None for shape in shapes]
    layout = cache_layout(spec, itemsize=dtype.itemsize, tracked=tracked)
    return kernels(shapes, layout, dtype)


def fastest_layout(
    config: Any,
    spec: CacheSpec,
    bits: int | None = None,
    windows: Sequence[int | None] | None = None,
) -> CacheLayout | None:
    """The page layout with which a Hopper GPU decodes all layers in one pass, as an engine chooses
    it; None if no page size allows that.

    bits: of every number, instead of the planned ones.
    windows: sliding window per layer (None: from the config).
    """
    tracked = _tracked(config, windows)
    layout_of = partial(_layout, spec, bits, tracked)
    page = one_pass_page(layout_of, spec.geometry.queries_per_kv)
    return None if page is None else layout_of(page)


def one_pass_summary(
    config: Any, spec: CacheSpec, windows: Sequence[int | None] | None = None
) -> str:
    """Whether a Hopper GPU decodes all layers in one pass, as a phrase for users. windows: as in
    `fastest_layout`."""
    if (layout := fastest_layout(config, spec, windows=windows)) is not None:
        return f"yes, pages of {layout.page} rows"
    tracked = _tracked(config, windows)
    return f"no: {two_passes(_layout(spec, None, tracked, 32), spec.geometry.queries_per_kv)}"


def _tracked(config: Any, windows: Sequence[int | None] | None) -> list[bool]:
    """Whether entries of each layer carry positions, which sliding windows need."""
    windows = attention_windows(config) if windows is None else windows
    return [window is not None for window in windows]


def _layout(spec: CacheSpec, bits: int | None, tracked: list[bool], page: int) -> CacheLayout:
    return cache_layout(spec, page=page, bits=bits, tracked=tracked)
