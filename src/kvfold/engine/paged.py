"""One step's attention over the pool: what a model is given in place of a cache.

A step packs N tokens of several sequences into one row, decoding ones first. Shapes: B sequences of
a part, T queries of each, S stored rows (of the longest group), G groups of a layer, Hk KV heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.cache.evict import attention_mass
from kvfold.cache.layout import Group
from kvfold.cache.policies import Policy
from kvfold.cache.pool import Pool
from kvfold.models.adapter import HFAttention, PagedRows
from kvfold.models.folded import RowView
from kvfold.ops import kivi, store
from kvfold.ops.attention import Tables


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens begin..begin + B * T of the packed row: T queries each of the sequences `slots` [B].

    positions int [B, T]; sizes: of every layer, rows of the longest group; stop: an upper bound of
    positions; prompt_lengths [B] where the attention of these queries is observed, else None.
    """

    begin: int
    slots: Tensor
    positions: Tensor
    sizes: Sequence[int]
    stop: int
    prompt_lengths: Tensor | None = None

    def of(self, packed: Tensor) -> Tensor:
        """This part of packed [1, H, N, n] as [B, H, T, n]."""
        rows = packed[0, :, self.begin : self.begin + self.positions.numel()]
        return rows.unflatten(1, self.positions.shape).transpose(0, 1)


class PagedStep(PagedRows):
    """All layers' attention in one step.

    slots, index [N]: each token's sequence, and its row counted from the end of the groups' rows
    (negative); positions int32 [N]; windows: sliding window of every layer, or None; fill: which
    pages the tokens fill, with KIVI.
    """

    is_compileable = False

    def __init__(
        self,
        pool: Pool,
        parts: Sequence[Part],
        slots: Tensor,
        index: Tensor,
        positions: Tensor,
        windows: Sequence[int | None],
        policy: Policy | None,
        fill: kivi.Fill | None = None,
    ) -> None:
        self.pool, self.parts, self.windows, self.policy = pool, parts, windows, policy
        self.fill = fill
        self.slots, self.index, self.positions = slots, index, positions

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask before they make positions and masks, which come from the runner here."""
        return 0

    def attend(self, module: HFAttention, x: Tensor, tables: Tables | None) -> Tensor:
        q, rows = module.project(x, tables)
        where = self.pool.layout.layer_groups[module.layer_idx]
        groups = self.pool.layout.groups[where]
        lengths = self.pool.lengths[:, where]
        index = lengths[self.slots].long() + self.index[:, None]
        pages = self.pool.tables[:, where]
        place = self.pool.arena, pages, groups, rows[0], self.slots
        if self.fill is not None:
            kivi.append(*place, index[:, 0], self.fill)
        else:
            store.append(*place, index, self.positions)
        outputs = [
            self._attend(module, part, part.of(q), groups, pages, lengths) for part in self.parts
        ]
        return torch.cat([out.flatten(0, 1) for out in outputs])[None]

    def _attend(
        self,
        module: HFAttention,
        part: Part,
        q: Tensor,
        groups: Sequence[Group],
        pages: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """q [B, Hq, T, .] -> [B, T, D]."""
        arena, counts = self.pool.arena, lengths[part.slots]
        dtype = module.o_proj.weight.dtype
        gather = store.gather if self.fill is None else kivi.gather
        size = part.sizes[module.layer_idx]
        stored = gather(arena, pages, groups, part.slots, counts, dtype, size)
        member = _group_of_head(tuple(group.heads for group in groups), q.device)
        positions = stored.positions[:, member]  # [B, 1 or Hk, S]
        queries = part.positions[:, None, :, None]
        mask = stored.valid[:, member, None] & (positions[:, :, None] <= queries)
        if (window := self.windows[module.layer_idx]) is not None:
            mask &= positions[:, :, None] > queries - window
        view = RowView(
            rows=stored.rows,
            tables=self._tables(module, positions, part.stop),
            mask=_per_query_head(mask, module.num_key_value_groups),
        )
        observed = part.prompt_lengths is not None
        out, weights = module.attend(q, view, need_weights=observed)
        if observed:
            self._observe(part, weights, positions, groups, pages, stored.valid)
        return out

    def _tables(self, module: HFAttention, positions: Tensor, stop: int) -> Tables | None:
        if module.spec.keys != "pre" or module.rotary is None:
            return None
        return module.rotary(module.o_proj.weight, positions.long(), stop)

    def _observe(
        self,
        part: Part,
        weights: Tensor | None,
        positions: Tensor,
        groups: Sequence[Group],
        pages: Tensor,
        valid: Tensor,
    ) -> None:
        """Add what these queries attended to, to the metrics of the rows."""
        assert weights is not None and self.policy is not None and part.prompt_lengths is not None
        heads = [group.heads for group in groups]
        num_heads = sum(map(len, heads))
        mass = attention_mass(
            weights,
            positions.expand(-1, num_heads, -1),
            part.positions,
            part.prompt_lengths,
            self.policy,
            heads,
        )
        store.add_metrics(self.pool.arena, pages, groups, part.slots, mass, valid)


@lru_cache
def _group_of_head(groups: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Group number of every KV head [Hk]; [1] where there is one group."""
    owner = {head: number for number, heads in enumerate(groups) for head in heads}
    numbers = [owner[head] for head in sorted(owner)]
    return torch.tensor(numbers[:1] if len(groups) == 1 else numbers, device=device)


def _per_query_head(mask: Tensor, group: int) -> Tensor:
    """[B, 1 or Hk, T, S] -> [B, 1 or Hq, T, S]."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(group, dim=1)
