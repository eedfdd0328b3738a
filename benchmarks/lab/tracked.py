"""Engines whose pages hold eviction scores, filled as if prompts had been prefilled.

Shapes: as in `kvfold.bench.synthetic_engine`, and P token entries a page.
"""

import torch

from kvfold.bench import synthetic_engine
from kvfold.cache.pool import Pool
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import CacheParams
from kvfold.ops.common.pages import plan_pages


def fill(engine: Engine, batch: int, tokens: int, new: int, cache: CacheParams) -> None:
    """As `synthetic_engine.fill`; entries have their positions if the pool tracks them."""
    synthetic_engine.fill(engine, batch, tokens, new, cache)
    pool = engine.scheduler.pool
    if pool.layout.tracked:
        _number_rows(pool)


def _number_rows(pool: Pool) -> None:
    """Give the token entries of every sequence consecutive positions."""
    words = pool.arena.view(torch.int32)
    for where in pool.layout.layer_groups:
        for kind in plan_pages(pool.layout.groups[where], pool.device).kinds:
            starts = pool.block_tables[:, where][:, kind.numbers].long() * 16
            row = torch.arange(kind.layout.page, device=pool.device)
            page = torch.arange(starts.shape[-1], device=pool.device)[:, None]
            owned = page * len(row) < pool.lengths[:, where][:, kind.numbers, None, None]
            place = starts[..., None] + kind.layout.blocks.positions.offset // 4 + row
            positions = (page * len(row) + row).int().expand_as(place)
            inside = owned.expand_as(place)
            words[place[inside]] = positions[inside]
