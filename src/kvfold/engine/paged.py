"""One step's attention over the pool: what a model is given in place of a cache.

A step packs N tokens of several sequences into one row, decoding ones first. Shapes: B sequences of
a part, T queries of each, S stored rows (of the longest group), G groups of a layer, Hk KV heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.cache.evict import attention_mass
from kvfold.cache.layout import Group
from kvfold.cache.policies import Policy
from kvfold.cache.pool import Pool
from kvfold.engine.flat import FlatDecode, flat_layers
from kvfold.models.adapter import HFAttention, PagedRows
from kvfold.models.folded import RowView
from kvfold.ops import kivi, store
from kvfold.ops.attention import Tables, attention_in_place
from kvfold.ops.backend import use_triton
from kvfold.ops.decode import decode, has_kernel, plan_layers
from kvfold.ops.pages import locate, plan_pages

if TYPE_CHECKING:
    from kvfold.ops.decode_triton import DecodePlan


@dataclass(frozen=True)
class Kernels:
    """What runs over a pool's pages, chosen once. store: `ops.store` or its kernels; decode:
    whether decoding has one; flat: the layers that `FlatDecode` does; one_table: whether pages of
    a CPU's arena are all of one size, rows of one table."""

    store: ModuleType
    decode: bool
    flat: tuple[int, ...] = ()
    one_table: bool = False

    @classmethod
    def of(cls, pool: Pool) -> "Kernels":
        layout, device = pool.layout, pool.device.type
        layers = [layout.groups[where] for where in layout.layer_groups]
        if not use_triton(device) or layout.kivi:
            sizes = {group.layout.page_units for group in layout.groups}
            return cls(store, False, flat_layers(pool), len(sizes) == 1 and device == "cpu")
        from kvfold.ops import store_triton

        return cls(store_triton, has_kernel(layers, device))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens begin..begin + B * T of the packed row: T queries each of the sequences `slots` [B].

    positions int [B, T]; sizes: of every layer, rows of the longest group; stop: an upper bound of
    positions; prompt_lengths [B] where the attention of these queries is observed, else None;
    decode: T is 1, and no row of these sequences comes after their queries.
    """

    begin: int
    slots: Tensor
    positions: Tensor
    sizes: Sequence[int]
    stop: int
    prompt_lengths: Tensor | None = None
    decode: bool = False

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
        kernels: Kernels,
        fill: kivi.Fill | None = None,
    ) -> None:
        self.pool, self.parts, self.windows, self.policy = pool, parts, windows, policy
        self.kernels, self.fill = kernels, fill
        self.plans: list[DecodePlan] = []  # of the decoding part
        self.slots, self.index, self.positions = slots, index, positions
        layers = kernels.flat
        self.flat = {x.begin: FlatDecode(pool, x, layers, policy) for x in parts if x.decode}

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
            self.kernels.store.append(*place, index, self.positions)
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
        if self.kernels.decode and self._looks_at_all(module, part):
            return self._decode(module, part, q, groups, pages, lengths)
        if part.decode and self._is_flat(module):
            if self._in_place(part, groups):
                return self._attend_in_place(module, part, q, groups, pages, lengths)
            return self.flat[part.begin].attend(module, q)
        arena, counts = self.pool.arena, lengths[part.slots]
        dtype = module.o_proj.weight.dtype
        gather = self.kernels.store.gather if self.fill is None else kivi.gather
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

    def _looks_at_all(self, module: HFAttention, part: Part) -> bool:
        """Whether one query a sequence sees all rows, as they are stored, unobserved."""
        return (
            part.decode
            and part.prompt_lengths is None
            and self.windows[module.layer_idx] is None
            and module.spec.keys != "pre"
        )

    def _decode(
        self,
        module: HFAttention,
        part: Part,
        q: Tensor,
        groups: Sequence[Group],
        pages: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """The same for q [B, Hq, 1, d], by a kernel that reads pages."""
        if not self.plans:
            layout = self.pool.layout
            layers = [layout.groups[where] for where in layout.layer_groups]
            counts = self.pool.lengths[part.slots]
            self.plans = plan_layers(layers, counts, module.num_key_value_groups)
        place = self.pool.arena, pages, lengths, groups, part.slots
        out = decode(q[:, :, 0], *place, module.scaling, self.plans[module.layer_idx])
        return module.output(out[:, :, None])

    def _is_flat(self, module: HFAttention) -> bool:
        layer = module.layer_idx
        return layer in self.kernels.flat and self.windows[layer] is None

    def _in_place(self, part: Part, groups: Sequence[Group]) -> bool:
        """Whether rows can be read where they lie."""
        plan = plan_pages(tuple(groups), self.pool.device)
        return self.kernels.one_table and part.prompt_lengths is None and plan.in_place

    def _attend_in_place(
        self,
        module: HFAttention,
        part: Part,
        q: Tensor,
        groups: Sequence[Group],
        pages: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """The same for q [B, Hq, 1, d]: a decoding query sees all rows of its sequence."""
        size, page = part.sizes[module.layer_idx], self.pool.layout.page
        place = self.pool.arena, pages, groups, part.slots, lengths[part.slots], size
        table, index, valid = locate(*place)
        q = q.unflatten(1, (len(groups), -1))[..., 0, :]
        out = attention_in_place(q, table, index, valid, page, module.scaling)
        return module.output(out.flatten(1, 2)[:, :, None])

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
        self.kernels.store.add_metrics(self.pool.arena, pages, groups, part.slots, mass, valid)


@lru_cache
def _group_of_head(groups: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Group number of every KV head [Hk]; [1] where there is one group."""
    owner = {head: number for number, heads in enumerate(groups) for head in heads}
    numbers = [owner[head] for head in sorted(owner)]
    return torch.tensor(numbers[:1] if len(groups) == 1 else numbers, device=device)


def _per_query_head(mask: Tensor, group: int) -> Tensor:
    """[B, 1 or Hk, T, S] -> [B, 1 or Hq, T, S]."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(group, dim=1)
