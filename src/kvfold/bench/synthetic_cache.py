"""Pages of a cache that has been in service: lengths, tables in random order, random numbers.

Shapes: B sequences, G groups a layer, N layers, n pages of the longest sequence, M pages of a kind.
"""

import torch
from torch import Tensor

from kvfold.bench.variants import DTYPE, Variant
from kvfold.layout.formats.integers import GAUSSIAN_STEP
from kvfold.layout.pages import UNIT, CacheLayout
from kvfold.ops.common.pages import PageClass, plan_pages

TAIL, SPREAD, MOST = 1.5, 0.5, 8.0  # Pareto's exponent; log-normal's sigma; cut, in smallest/usual


def draw_lengths(
    variant: Variant, batch: int, tokens: int, layout: CacheLayout, seed: int
) -> Tensor:
    """Rows int64 [B, N G], on the host: `tokens` / `evict` on average."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, len(layout.groups))
    if variant.lengths == "pareto":
        uniform = torch.rand(batch, 1, generator=generator, dtype=torch.float64)
        weights = (1 - uniform).pow(-1 / TAIL).clamp(max=MOST).expand(shape)
    elif variant.lengths == "evicted":
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights = (SPREAD * normal).exp().clamp(max=MOST)
    else:
        weights = torch.ones(shape, dtype=torch.float64)
    most = tokens if variant.evict > 1 else None
    rows = weights / weights.mean() * (tokens / variant.evict)
    return rows.round().long().clamp(1, most)


def build_pages(
    layout: CacheLayout, rows: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The arena, filled, and tables that take its pages in random order."""
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
            found = torch.zeros_like(mine, dtype=torch.int32)
            found[mine] = (start + order * size).int()
            tables[:, groups] = found
            pages = arena[start * UNIT : (start + len(order) * size) * UNIT]
            index = torch.empty_like(order)
            index[order] = number.expand_as(mine)[mine]
            _fill(pages.view(-1, size * UNIT), kind, index, generator)
            start += len(order) * size
    assert start == total, f"{start} units filled != {total} allocated"
    return arena, tables


def _fill(pages: Tensor, kind: PageClass, index: Tensor, generator: torch.Generator) -> None:
    """Write uint8 pages [M, page_bytes]; index int64 [M]: a page's place in its sequence."""
    steps, blocks = [], kind.layout.blocks
    for segment, codes in zip(kind.layout.segments, blocks.codes, strict=True):
        if segment.quantized:
            kind.block(pages, codes, torch.uint8).random_(generator=generator)
            # An fp8 scale stands for so much less (see `integers.scale_of`).
            held = 2**segment.bits if kind.layout.scale == 1 else 1
            steps.append(GAUSSIAN_STEP[segment.bits] * held)
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
