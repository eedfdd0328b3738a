"""Attention over rows gathered from pages: prefill chunks, and whatever no other way takes.

Shapes: B sequences of a part, T queries of each, S stored rows (of the longest group), R numbers of
a row, G groups of a layer, Hk KV heads, d head dim.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kvfold.cache.eviction.attention import attention_mass, observed
from kvfold.engine.backends import AttentionContext, AttentionMetadata
from kvfold.models.adapter import HFAttention
from kvfold.models.folded import Columns, RowView
from kvfold.ops.common.attention import Tables
from kvfold.ops.observe import observe
from kvfold.ops.observe import why_not as why_not_observed
from kvfold.ops.prefill import KVView, Seen, prefill
from kvfold.ops.prefill import why_not as why_not_prefilled
from kvfold.ops.store import StoredRows, add_metrics, gather
from kvfold.spec.layout import Group


class Gathered:
    """Prefill by kernels, where there is one for these rows, and for the metrics of observed
    queries; else PyTorch, under a mask, with explicit weights where they are observed."""

    def __init__(self, setup: AttentionContext) -> None:
        self.setup = setup

    def takes(self, module: HFAttention, part: AttentionMetadata) -> bool:
        return True

    def attend(self, module: HFAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """q [B, Hq, T, .] -> [B, T, D]."""
        layer = module.layer_idx
        pages, dtype = self.setup.pages[layer], module.o_proj.weight.dtype
        counts, size, groups = pages.lengths[part.slots], part.sizes[layer], pages.groups
        stored = gather(pages, part.slots, counts, dtype, size)
        rope = rope_tables(module, stored, groups, part.stop)
        if self._may_use_kernels(module, part):
            early = module.rebuilds_values_first(q.shape[2], size)
            sides = _keys(module, stored.rows, rope), _values(module, stored.rows, early)
            if not why_not_prefilled(q, *sides):
                seen = Seen(
                    counts=counts,
                    owner=owner_of(groups),
                    positions=stored.positions if groups[0].layout.tracked else None,
                    queries=part.positions,
                    window=self.setup.windows[layer],
                )
                out, lse = prefill(q, *sides, seen, module.scaling)
                self._observe(module, part, q, lse)
                return module.output(out, early)
        return self._by_torch(module, part, q, stored, rope)

    def _may_use_kernels(self, module: HFAttention, part: AttentionMetadata) -> bool:
        """One query a sequence is not worth a tile; metrics have a kernel, or need weights."""
        groups = self.setup.pages[module.layer_idx].groups
        observed = part.prompt_lengths is not None
        if part.decode or (observed and module.spec.keys == "pre"):
            return False
        return not observed or not why_not_observed(groups, self.setup.pool.device.type)

    def _observe(
        self, module: HFAttention, part: AttentionMetadata, q: Tensor, lse: Tensor
    ) -> None:
        """Add what q [B, Hq, T, .] attended to, to the metrics: lse fp32 [B, Hq, T]."""
        policy = self.setup.attention_policy
        if policy is None or part.prompt_lengths is None:
            return
        counted = observed(part.positions, part.prompt_lengths, policy)
        positions = part.positions.masked_fill(~counted, -1)
        place = self.setup.pages[module.layer_idx], part.slots, module.scaling
        observe(q, lse, positions, *place, power=policy.power, exclude=policy.exclude)

    def _by_torch(
        self,
        module: HFAttention,
        part: AttentionMetadata,
        q: Tensor,
        stored: StoredRows,
        rope: Tables | None,
    ) -> Tensor:
        """q [B, Hq, T, .] -> [B, T, D]."""
        layer = module.layer_idx
        pages = self.setup.pages[layer]
        groups = pages.groups
        member = member_of(owner_of(groups), q.device)
        positions = stored.positions[:, member]  # [B, 1 or Hk, S]
        queries = part.positions[:, None, :, None]
        mask = stored.valid[:, member, None] & (positions[:, :, None] <= queries)
        if (window := self.setup.windows[layer]) is not None:
            mask &= positions[:, :, None] > queries - window
        mask = _per_query_head(mask, module.num_key_value_groups)
        view = RowView(rows=stored.rows, tables=rope, mask=mask)
        out, weights = module.attend(q, view, need_weights=part.prompt_lengths is not None)
        if (policy := self.setup.attention_policy) is not None and part.prompt_lengths is not None:
            assert weights is not None
            heads = [group.heads for group in groups]
            each = positions.expand(-1, sum(map(len, heads)), -1)
            about = part.positions, part.prompt_lengths
            mass = attention_mass(weights, each, *about, policy, heads)
            add_metrics(pages, part.slots, mass, stored.valid)
        return out


def _keys(module: HFAttention, rows: Tensor, rope: Tables | None) -> KVView:
    """Rows [B, S, R] as they are, or the keys rebuilt from them."""
    if module.spec.keys != "pre":
        return _columns(module.key_columns, rows)
    k = module.score_keys(RowView(rows=rows, tables=rope, mask=None))
    return _heads(k.transpose(1, 2))


def _values(module: HFAttention, rows: Tensor, early: bool) -> KVView:
    """Rows [B, S, R] as they are, or mapped: then `output` is not to map again."""
    if not early:
        return _columns(module.value_columns, rows)
    z = module.value_columns.gather(rows)
    v = torch.einsum("bsnr,ncr->bsnc", z, module.value_up)
    return _heads(v.reshape(*v.shape[:2], module.geometry.num_kv_heads, -1))


def _columns(columns: Columns, rows: Tensor) -> KVView:
    starts, ranks = columns.starts, columns.ranks
    return KVView(
        rows, tuple(starts[i] for i in columns.heads), tuple(ranks[i] for i in columns.heads)
    )


def _heads(x: Tensor) -> KVView:
    """x [B, S, Hk, d], the last with stride 1."""
    assert x.stride(-1) == 1, "a row's numbers follow one another"
    heads = range(x.shape[2])
    return KVView(x, tuple(h * x.stride(2) for h in heads), (x.shape[3],) * len(heads))


def rope_tables(
    module: HFAttention, stored: StoredRows, groups: tuple[Group, ...], stop: int
) -> Tables | None:
    """Of the rows' positions, where keys are rebuilt."""
    if module.spec.keys != "pre" or module.rotary is None:
        return None
    positions = stored.positions[:, member_of(owner_of(groups), stored.positions.device)]
    return module.rotary(module.o_proj.weight, positions.long(), stop)


@lru_cache
def owner_of(groups: tuple[Group, ...]) -> tuple[int, ...]:
    """Group number of every KV head."""
    owner = {head: number for number, group in enumerate(groups) for head in group.heads}
    return tuple(owner[head] for head in sorted(owner))


@lru_cache
def member_of(owner: tuple[int, ...], device: torch.device) -> Tensor:
    """The same as a tensor [Hk]; [1] where there is one group."""
    return torch.tensor(owner if any(owner) else owner[:1], device=device)


def _per_query_head(mask: Tensor, group: int) -> Tensor:
    """[B, 1 or Hk, T, S] -> [B, 1 or Hq, T, S]."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(group, dim=1)
