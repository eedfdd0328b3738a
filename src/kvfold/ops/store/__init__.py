"""Write token entries into pages, and read, move and rewrite them there.

A row is the entry of one token in one group: a group's columns of `rows`, or its place in the
    pages.

Shapes: S slots (sequences in the cache), G groups, R numbers of a token in all groups, P rows of a
page; N new tokens, B sequences of a call, T rows read, M rows moved. Offsets in `tables` are int32,
in units of 64 bytes. `lengths` belongs to the sequences of the call, which may read fewer rows than
are stored.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from kvfold.layout.pages import CacheLayout
from kvfold.ops.backend import Operation, use_triton
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.store import reference, residual
from kvfold.ops.store.reference import StoredRows
from kvfold.ops.store.residual import Fill
from kvfold.ops.store.segments import unserved

__all__ = [
    "Fill",
    "StoredRows",
    "add_metrics",
    "append",
    "gather",
    "move",
    "read_tracked",
    "rewrite",
    "set_metrics",
    "spans",
]

# Each module has the functions below, except `spans`, `set_metrics` and `rewrite`.
STORE = Operation(__name__, {"triton": unserved, "numba": unserved})


def spans(layout: CacheLayout, device_type: str) -> Sequence[slice]:
    """Return the groups to read or move in one call: those of a layer on a CPU, all groups if
    kernels run."""
    plain = device_type == "cpu" and not use_triton("cpu")
    if plain or STORE.why_not(device_type, layout.groups):
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
    """Write the entry of token i in group g as row index[i, g] of sequence slots[i], with metric 0.

    rows: float [N, R]; unquantised numbers are stored in its dtype.
    slots: int64 [N]. index: int64 [N, G].
    positions: int32 [N], required if the layout is tracked.
    fill: the tails that this call fills, if sequences have tails (see `residual`).

    What is stored for a token does not depend on the other tokens of the call.
    """
    if fill is not None:
        residual.append(pages, rows, slots, index[:, 0], fill)
    else:
        _of(pages).append(pages, rows, slots, index, positions)


def gather(
    pages: LayerPages, slots: Tensor, lengths: Tensor, dtype: torch.dtype, size: int
) -> StoredRows:
    """Read the first lengths[b, g] rows of every group of the sequences `slots`.

    slots: int64 [B]. lengths: int [B, G].
    dtype: of the result, and of the unquantised numbers at `append`.
    size: T, at least the longest length.

    Unquantised numbers come back bit for bit, others as their format decodes them. Never waits for
    the device.
    """
    if pages.groups[0].layout.residual:
        return residual.gather(pages, slots, lengths, dtype, size)
    return _of(pages).gather(pages, slots, lengths, dtype, size)


def add_metrics(pages: LayerPages, slots: Tensor, values: Tensor, valid: Tensor) -> None:
    """Add values [B, G, T] to the metrics of the rows of `slots` [B] that are valid (bool
    [B, G, T]).

    `slots` are distinct. Other rows keep their metrics, whatever `values` holds for them.
    """
    _of(pages).add_metrics(pages, slots, values, valid)


def set_metrics(pages: LayerPages, slots: Tensor, index: Tensor, values: Tensor) -> None:
    """Set the metric of row index[i, g] of (slots[i], group g) to values[i, g]: slots int64 [N],
    index int64 [N, G], values fp32 [N, G]. PyTorch on every device; never waits for it."""
    reference.set_metrics(pages, slots, index, values)


def rewrite(
    pages: LayerPages, sides: Mapping[str, Tensor], slots: Tensor, group: Tensor, index: Tensor
) -> None:
    """Overwrite M stored token entries; their positions and metrics stay. Entry i is row index[i]
    of (slots[i], group[i]), all int64 [M].

    sides: by side, the numbers [M, .] of the entry's latents of this side, one after another;
        columns beyond the group's own are ignored.

    Not for per-channel formats. PyTorch on every device; if the groups have several layouts, it
    waits for the device once per layout.
    """
    reference.rewrite(pages, sides, slots, group, index)


def read_tracked(
    pages: LayerPages, slots: Tensor, lengths: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Read (metrics fp32, positions int32, valid bool), each [B, G, T], of tracked token entries.

    slots int64 [B]; lengths int [B, G]; size: T. 0 beyond a group's length.
    """
    return _of(pages).read_tracked(pages, slots, lengths, size)


def move(pages: LayerPages, slots: Tensor, group: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy row source[i] of (slots[i], group[i]) to row target[i] of the same group: codes, scales,
    position and metric. All int64 [M]; no row may be the target of two copies, or both source and
    target."""
    _of(pages).move(pages, slots, group, source, target)


def _of(pages: LayerPages) -> ModuleType:
    return STORE.choose(pages.arena.device.type, pages.groups).module
