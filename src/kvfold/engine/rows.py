"""Keys, values and queries as eviction policies see them.

Shapes: B sequences, T row slots, Hk KV heads, n latents of one side, r their largest rank, d head
dim.
"""

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.slabs import upload
from kvfold.engine.gathered import member_of, owner_of, rope_tables
from kvfold.engine.paged import Attention
from kvfold.models.folded import Columns, RowView
from kvfold.ops.store import StoredRows, gather


class PoolRows:
    """The stored rows of sequences `slots` int64 [B], read from the pool a layer at a time.

    size: T; computed: tokens of every sequence.
    """

    def __init__(self, attention: Attention, slots: Tensor, size: int, computed: list[int]) -> None:
        self.attention, self.setup = attention, attention.setup
        self.slots, self.size, self.computed = slots, size, computed

    def keys(self, layer: int) -> Tensor:
        """Keys in score space [B, Hk, T, d or r]."""
        module, stored = self.attention.modules[layer], self._stored(layer)
        groups = self.setup.pages[layer].groups
        tables = rope_tables(module, stored, groups, max(self.computed))
        k = module.score_keys(RowView(rows=stored.rows, tables=tables, mask=None))
        own = k if module.spec.keys == "pre" else _within_ranks(k, module.key_columns)
        return self._present(own, layer, stored)

    def values(self, layer: int) -> Tensor:
        """Values [B, Hk, T, d], or latents [B, Hk, T, r] where W_O holds their maps."""
        module, stored = self.attention.modules[layer], self._stored(layer)
        z = module.value_columns.gather(stored.rows)
        if module.spec.values == "rebuilt":
            v = torch.einsum("bsnr,ncr->bsnc", z, module.value_up)
            v = v.reshape(*v.shape[:2], -1, module.geometry.head_dim).transpose(1, 2)
        else:
            v = _within_ranks(module.value_columns.spread(z), module.value_columns)
        return self._present(v, layer, stored)

    def queries(self, layer: int) -> tuple[Tensor, Tensor]:
        """The last W queries [B, Hq, W, dk] and their positions int64 [B, W]."""
        recent = self.attention.recent
        assert recent is not None, "queries are kept for policies that need them"
        return recent.read(layer, self.slots, upload(np.array(self.computed), self.slots.device))

    def _stored(self, layer: int) -> StoredRows:
        pages, dtype = self.setup.pages[layer], self.attention.modules[layer].o_proj.weight.dtype
        return gather(pages, self.slots, pages.lengths[self.slots], dtype, self.size)

    def _present(self, x: Tensor, layer: int, stored: StoredRows) -> Tensor:
        """x [B, Hk, T, .] with zeros where there is no row."""
        heads = member_of(owner_of(self.setup.pages[layer].groups), x.device)
        return x.where(stored.valid[:, heads, :, None], 0.0)


def _within_ranks(x: Tensor, columns: Columns) -> Tensor:
    """x [B, Hk, T, r] with zeros beyond every head's own rank, where latents fill up with others'
    numbers."""
    if columns.uniform:
        return x
    ranks = upload(np.array([columns.ranks[i] for i in columns.heads]), x.device)
    inside = torch.arange(columns.widest, device=x.device) < ranks[:, None]
    return x.where(inside[:, None], 0.0)
