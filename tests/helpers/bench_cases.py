"""A tiny paged cache of random numbers, for tests of benchmarks."""

import torch

from kvfold.bench import variants
from kvfold.bench.workload import DTYPE, Workload
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.store.reference import gather

CPU = torch.device("cpu")
TINY = variants.SHAPES["tiny"]


def stored_rows(work: Workload, number: int) -> torch.Tensor:
    """What a layer stores, [B, T, R]."""
    tables, lengths, groups = work.layer(number)
    pages = LayerPages(work.arena, tables, lengths, groups)
    return gather(pages, work.slots, lengths, DTYPE).rows


def owned_pages(work: Workload) -> list[tuple[int, int]]:
    """First and last unit of every page that the block tables name, in ascending order."""
    counts = -(-work.lengths.long() // work.layout.page)
    pages = []
    for g, group in enumerate(work.layout.groups):
        for b, count in enumerate(counts[:, g].tolist()):
            size = group.layout.page_units
            pages += [(at, at + size) for at in work.tables[b, g, :count].tolist()]
    return sorted(pages)
