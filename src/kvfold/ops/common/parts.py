"""Tables of integers that describe a layer's pages to the CPU kernels.

Shapes: G groups of the layer, H query heads that read a group, the most of all. A *part* is the
keys or the values of one latent in its group, with its segments as in `spec.layout`. Token entries
are decoded to *columns* of fp32, where every segment begins at a multiple of 16.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvfold.layout import SIDES, Latent, LayerSpec
from kvfold.layout.formats.integers import PLANES
from kvfold.layout.pages import Group, PageLayout

LANES = 16  # numbers that are decoded at once
HALF, BFLOAT, SINGLE = 16, 17, 32  # kinds of numbers, beside bits of codes
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Parts:
    """Offsets are bytes from a page's start.

    segments [., 7]: offset of the codes, bytes of a row, numbers, bits or kind, bytes from a row to
    its high plane, which of a row's scales are its scale and its zero (-1: none).
    parts [., 6]: first and last segment, first and number of the group's heads that read it,
    columns, whether it is fp32 alone, which is read where it lies.
    groups [G, 8]: first part, first part of values, last part, heads, scales of a row, offsets of
    scales, of positions and of metrics.
    heads [G, H]: which query heads they are. factors: what every segment's scale is multiplied by;
    small: whether scales are fp8, not fp16.
    page: rows; scales: the most of a row; columns: the widest part's; values: the widest value.
    """

    segments: Ints
    parts: Ints
    groups: Ints
    heads: Ints
    factors: Floats
    small: bool
    page: int
    scales: int
    columns: int
    values: int


def unsupported_reason(spec: LayerSpec, groups: Sequence[Group]) -> str | None:
    """Why no CPU kernel reads these pages, or None. The kernels read floats and integers of any
    supported bit width with one scale per token, and groups of any KV heads."""
    formats = {x.format for group in groups for x in group.layout.segments}
    if unknown := {x.name for x in formats if "decode" not in x.kernels}:
        return f"no kernel reads format {', '.join(sorted(unknown))}"
    if len({x.metadata for x in formats if x.num_metadata}) > 1:
        return "scales of several types: the kernels read one"
    for group in groups:
        for latent in _latents(spec, group):
            indices = [group.heads.index(head) for head in latent.heads]
            if indices != list(range(indices[0], indices[0] + len(indices))):
                return "a latent of heads that are not adjacent"
    return None


def plan_parts(spec: LayerSpec, groups: Sequence[Group], queries: int, dtype: torch.dtype) -> Parts:
    """Make the tables of a layer's groups. queries: query heads per KV head; dtype: of unquantised
    numbers."""
    floats = {2: BFLOAT if dtype is torch.bfloat16 else HALF, 4: SINGLE}
    segments: list[list[int]] = []
    parts: list[list[int]] = []
    table: list[list[int]] = []
    factors: list[float] = []
    for group in groups:
        layout, first, ends = group.layout, len(parts), []
        for side in SIDES:
            for latent, indices in _by_latent(spec, group):
                if side not in latent.side or not indices:
                    continue
                rows = [_segment(layout, i, floats) for i in indices]
                begin, heads = len(segments), group.heads.index(latent.heads[0]) * queries
                plain = len(rows) == 1 and rows[0][3] == SINGLE
                width = sum(-(-x[2] // LANES) * LANES for x in rows)
                end = begin + len(rows)
                parts.append([begin, end, heads, len(latent.heads) * queries, width, plain])
                bits = [x[3] if layout.scale == 1 else 0 for x in rows]
                factors += [2.0**-number for number in bits]
                segments += rows
            ends.append(len(parts))
        blocks = layout.blocks
        offsets = [x.offset for x in (blocks.scales, blocks.positions, blocks.metrics)]
        heads = len(group.heads) * queries
        table.append([first, *ends, heads, layout.scales_per_row, *offsets])
    heads_of = [[h * queries + i for h in group.heads for i in range(queries)] for group in groups]
    most = max(map(len, heads_of))
    return Parts(
        segments=np.array(segments, dtype=np.int64).reshape(-1, 7),
        parts=np.array(parts, dtype=np.int64).reshape(-1, 6),
        groups=np.array(table, dtype=np.int64),
        heads=np.array([x + [0] * (most - len(x)) for x in heads_of], dtype=np.int64),
        factors=np.array(factors, dtype=np.float32),
        small=any(x.layout.scale == 1 for x in groups),
        page=groups[0].layout.page,
        scales=max(x.layout.scales_per_row for x in groups),
        columns=max((part[4] for part in parts), default=LANES),
        values=max((latent.rank for latent in spec.value_latents), default=0),
    )


def _latents(spec: LayerSpec, group: Group) -> list[Latent]:
    return [latent for latent in spec.latents if set(latent.heads) <= set(group.heads)]


def _by_latent(spec: LayerSpec, group: Group) -> Iterator[tuple[Latent, list[int]]]:
    """Yield the latents of a group, each with the indices of its segments."""
    for latent in _latents(spec, group):
        columns = spec.columns(latent)
        segments = enumerate(group.layout.segments)
        yield latent, [i for i, x in segments if columns.start <= x.start < columns.stop]


def _segment(layout: PageLayout, index: int, floats: dict[int, int]) -> list[int]:
    segment, blocks = layout.segments[index], layout.blocks
    scale, zero, *_ = *layout.metadata_indices[index], -1, -1
    kind, high = floats.get(layout.itemsize, 0), 0
    if segment.quantized:
        kind, high = segment.bits, -(-segment.width * PLANES[segment.bits][0] // 8)
    offset = blocks.codes[index].offset
    return [offset, segment.row_bytes, segment.width, kind, high, scale, zero]


def scale_table(size: int) -> Floats:
    """All 256 float8_e4m3fn numbers, indexed by their bits, for scales of 1 byte; empty for 2
    bytes."""
    codes = torch.arange(256 if size == 1 else 0, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).float().numpy()
