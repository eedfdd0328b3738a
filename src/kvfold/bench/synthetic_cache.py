"""Fills the pages of a synthetic cache: block tables in random order, random numbers.

Shapes: B sequences, G groups a layer, N layers, n pages of the longest sequence, M pages of a kind.
"""

import torch
from torch import Tensor

from kvfold.bench.variants import DTYPE, Variant
from kvfold.layout.formats.integers import GAUSSIAN_STEP
from kvfold.layout.pages import UNIT, CacheLayout
from kvfold.ops.common.pages import PageClass, plan_pages


def equal_lengths(variant: Variant, batch: int, tokens: int, layout: CacheLayout) -> Tensor:
    """Token entries int64 [B, N G], on the host: of every sequence and group as many."""
    rows = max(1, round(tokens / variant.evict))
    return torch.full((batch, len(layout.groups)), rows, dtype=torch.int64)


def build_pages(
    layout: CacheLayout, rows: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """An arena filled with random numbers, and block tables that use its pages in random order.

    rows [B, N G]: token entries of every sequence and group, on the host. Returns the arena (uint8)
    and the tables (int32 [B, N G, n], in units of UNIT bytes).
    """
    device = generator.device
    owned_pages = -(-rows // layout.page)
    units = torch.tensor([group.layout.page_units for group in layout.groups])
    total = int((owned_pages * units).sum())
    assert total < 2**31, f"{total} units exceed int32 offsets"
    arena = torch.empty(total * UNIT, dtype=torch.uint8, device=device)
    number = torch.arange(int(owned_pages.max()), device=device)
    owned = number < owned_pages.to(device)[..., None]
    tables = torch.zeros(owned.shape, dtype=torch.int32, device=device)
    start = 0
    for where in layout.layer_groups:
        for kind in plan_pages(layout.groups[where], device).kinds:
            groups = kind.numbers + where.start
            mine = owned[:, groups]
            order = torch.randperm(int(mine.sum()), generator=generator, device=device)
            size = kind.layout.page_units
            offsets = torch.zeros_like(mine, dtype=torch.int32)
            offsets[mine] = (start + order * size).int()
            tables[:, groups] = offsets
            pages = arena[start * UNIT : (start + len(order) * size) * UNIT]
            index = torch.empty_like(order)
            index[order] = number.expand_as(mine)[mine]
            _fill(pages.view(-1, size * UNIT), kind, index, generator)
            start += len(order) * size
    assert start == total, f"{start} units filled != {total} allocated"
    return arena, tables


def _fill(pages: Tensor, kind: PageClass, index: Tensor, generator: torch.Generator) -> None:
    """Write random numbers into uint8 pages [M, page_bytes]. index int64 [M]: each page's position
    among the pages of its sequence."""
    steps, blocks = [], kind.layout.blocks
    for segment, codes in zip(kind.layout.segments, blocks.codes, strict=True):
        if segment.quantized:
            kind.block(pages, codes, torch.uint8).random_(generator=generator)
            # Scales stored in fp8 are larger by this factor (see `integers.scale_of`).
            factor = 2**segment.bits if kind.layout.scale == 1 else 1
            steps.append(GAUSSIAN_STEP[segment.bits] * factor)
        else:
            kind.block(pages, codes, DTYPE).normal_(generator=generator)
    if steps:
        scales = kind.block(pages, blocks.scales, kind.layout.metadata)
        spread = torch.rand(scales.shape, generator=generator, device=pages.device) + 0.5
        scales.copy_(spread * torch.tensor(steps, device=pages.device))
    if kind.layout.tracked:
        kind.block(pages, blocks.metrics, torch.float32).zero_()
        page = kind.layout.page
        row = torch.arange(page, device=pages.device)[:, None]
        kind.block(pages, blocks.positions, torch.int32).copy_(index[:, None, None] * page + row)
