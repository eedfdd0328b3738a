"""What tests of flat share with others."""

import torch

from store_cases import FLOATS, Store, numbers, sizes


def filled(layout, seed: int):
    """A store of 3 slots, its dtype, lengths [3, G] of 1 to 70, beyond which rows are NaN, and what
    rows [3, T, R] are summed from."""
    store = Store.of(layout, 3, 70, seed)
    dtype = FLOATS[layout.groups[0].layout.itemsize][0]
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 71, (3, len(layout.groups)), generator=chance, dtype=torch.int32)
    rows = numbers(seed, dtype, 3, 70, store.width)
    beyond = torch.arange(70) >= lengths[..., None]  # [3, G, T]
    for g, group in enumerate(layout.groups):
        for x in group.layout.segments:
            rows[..., x.start : x.start + x.width].masked_fill_(beyond[:, g, :, None], torch.nan)
    store.fill(rows, torch.arange(210, dtype=torch.int32).view(3, 70))
    store.arena, store.tables = store.arena.cpu(), store.tables.cpu()
    store.forget(lengths)
    each = sum(sizes(rows.float(), group) for group in store.groups)
    return store, dtype, lengths, each
