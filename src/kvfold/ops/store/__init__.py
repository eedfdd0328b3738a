"""Rows in and out of pages: the public functions, and who serves them.

Shapes: S slots (sequences at once), G groups, R numbers of a row; N new tokens, B sequences, T rows
read, M rows moved. Arguments and results are those of `reference`, whose docstrings say more.
`lengths` are those of a call's sequences, since a call may read fewer rows than there are.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from kvfold.ops.backend import Operation
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.store import residual
from kvfold.ops.store.reference import StoredRows
from kvfold.ops.store.residual import Fill
from kvfold.spec.layout import CacheLayout

__all__ = [
    "Fill",
    "StoredRows",
    "add_metrics",
    "append",
    "gather",
    "move",
    "read_metrics",
    "read_tracked",
    "spans",
]


# Each has the functions below and `why_not(groups)`.
STORE = Operation(__name__, ("triton", "reference"))


def spans(layout: CacheLayout, device_type: str) -> Sequence[slice]:
    """Groups that are best read or moved at once: all of them by kernels, else a layer's."""
    if STORE.why_not(device_type, layout.groups):
        return layout.layer_groups
    return (slice(0, len(layout.groups)),)


def append(
    pages: LayerPages,
    rows: Tensor,
    slots: Tensor,
    index: Tensor,
    positions: Tensor | None = None,
    fill: Fill | None = None,
) -> None:
    """Write row i of rows [N, R] as row index[i, g] of every group of sequence slots[i], metric 0.
    positions [N]: where rows are tracked; fill: where sequences have tails."""
    if fill is not None:
        residual.append(pages, rows, slots, index[:, 0], fill)
    else:
        _of(pages).append(pages, rows, slots, index, positions)


def gather(
    pages: LayerPages, slots: Tensor, lengths: Tensor, dtype: torch.dtype, size: int
) -> StoredRows:
    """The first lengths[b, g] (at most `size`) rows of the sequences slots [B], in `dtype`."""
    if pages.groups[0].layout.residual:
        return residual.gather(pages, slots, lengths, dtype, size)
    found: StoredRows = _of(pages).gather(pages, slots, lengths, dtype, size)
    return found


def add_metrics(pages: LayerPages, slots: Tensor, values: Tensor, valid: Tensor) -> None:
    """Add values [B, G, T] to the metrics of valid rows of the sequences slots [B], distinct."""
    _of(pages).add_metrics(pages, slots, values, valid)


def read_metrics(pages: LayerPages, slots: Tensor, valid: Tensor) -> Tensor:
    """Metrics [B, G, T] of valid rows of the sequences slots [B], 0 elsewhere."""
    found: Tensor = _of(pages).read_metrics(pages, slots, valid)
    return found


def read_tracked(
    pages: LayerPages, slots: Tensor, lengths: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Metrics, positions and validity [B, G, T] of the sequences' first lengths[b, g] rows."""
    found: tuple[Tensor, Tensor, Tensor] = _of(pages).read_tracked(pages, slots, lengths, size)
    return found


def move(pages: LayerPages, slots: Tensor, group: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy row source[i] of (slots[i], group[i]) to row target[i] of the same, all int64 [M]."""
    _of(pages).move(pages, slots, group, source, target)


def _of(pages: LayerPages) -> ModuleType:
    return STORE.choose(pages.arena.device.type, pages.groups).module
