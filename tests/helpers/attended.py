"""A layer of any shape over a pool, driven without a model, and attention to what it stored written
out in float64.

Shapes: B sequences, T queries of each, S stored rows, R numbers of a row; Hq / Hk query / KV heads,
d head dim; r, s ranks of keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.base import Columns, LayerAttention
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.paged import PagedAttention, PagedContext
from kvfold.cache.pool import Pool
from kvfold.layout import CacheSpec, Geometry, Latent, LayerSpec
from kvfold.layout.pages import cache_layout
from kvfold.ops.common.attention import capped
from kvfold.ops.store import gather
from store_cases import DEVICE

PAGE = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer's shape. ranks: of every head's keys and of its values (of the values of all heads,
    where they are joint); None: d; tiers: of both, as of `Latent`; sinks: whether it has some."""

    head_dim: int = 16
    kv_heads: int = 2
    group: int = 2
    ranks: tuple[int, int] | None = None
    joint: bool = False
    tiers: tuple[Any, Any] = (None, None)
    bits: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> CacheSpec:
        heads, d = range(self.kv_heads), self.head_dim
        key, value = self.ranks or (d, d * (self.kv_heads if self.joint else 1))
        latents = [Latent(side="k", heads=(h,), rank=key, tiers=self.tiers[0]) for h in heads]
        shares = [tuple(heads)] if self.joint else [(h,) for h in heads]
        latents += [Latent(side="v", heads=x, rank=value, tiers=self.tiers[1]) for x in shares]
        geometry = Geometry(
            hidden_size=8,
            num_query_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_dim=d,
            num_layers=1,
            rope=True,
            key_norm=True,
            scaling=d**-0.5,
            softcap=self.softcap,
        )
        layer = LayerSpec(keys="post_rope", values="rebuilt", latents=tuple(latents))
        return CacheSpec(geometry=geometry, layers=(layer,))

    def layer(self) -> LayerAttention:
        """The layer with random value maps and sinks."""
        spec = self.spec
        own, values = spec.layers[0], spec.layers[0].value_latents
        shape = len(values), self.kv_heads * self.head_dim // len(values), values[0].rank
        up = torch.randn(shape, device=DEVICE) * values[0].rank ** -0.5
        sinks = torch.randn(spec.geometry.num_query_heads, device=DEVICE) + 1
        return LayerAttention(
            index=0,
            spec=own,
            geometry=spec.geometry,
            window=self.window,
            fixed_rope=True,
            has_sinks=self.sinks,
            key_columns=Columns(own, own.key_latents),
            value_columns=Columns(own, own.value_latents),
            key_up=None,
            key_mean=None,
            value_up=up.to(self.dtype),
            output=up.new_empty(0),
            rope=None,
            sinks=sinks if self.sinks else None,
        )


class Attended:
    """A layer whose sequences get random tokens: what it gives, and what it should give."""

    def __init__(self, shape: Shape, slots: int = 3, most: int = 96) -> None:
        torch.manual_seed(0)
        self.shape, self.layer = shape, shape.layer()
        tracked = [shape.window is not None]
        itemsize = shape.dtype.itemsize
        layout = cache_layout(
            shape.spec, page=PAGE, itemsize=itemsize, bits=shape.bits, tracked=tracked
        )
        size = layout.bytes_for(slots, most)
        windows = [shape.window]
        how: dict[str, Any] = {"num_slots": slots, "max_tokens": most, "sliding_windows": windows}
        self.pool = Pool(layout, size, **how, device=DEVICE)
        self.pool.arena.fill_(255)  # NaN, where nothing is stored
        self.slots = [self.pool.allocate_slot() for _ in range(slots)]
        self.attention = PagedAttention([self.layer], self.pool, None, shape.dtype)
        self.done = dict.fromkeys(self.slots, 0)

    def backend(self, decode: bool) -> str:
        chosen = self.attention.selected
        return (chosen.decode if decode else chosen.prefill)[0].__name__

    def step(self, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Give the first sequences so many tokens, one each where they decode: what attention gives
        [N, W], and the formula's."""
        slots, decode = self.slots[: len(counts)], max(counts) == 1
        self.pool.extend(slots, list(counts))
        parts: list[AttentionMetadata] = []
        where: list[int] = []
        index: list[int] = []
        begin = 0
        positions = [
            torch.arange(self.done[s], self.done[s] + n) for s, n in zip(slots, counts, strict=True)
        ]
        joined = torch.cat(positions).int().to(DEVICE)
        together = [slots] if decode else [[slot] for slot in slots]
        for own in together:
            tokens = sum(n for s, n in zip(slots, counts, strict=True) if s in own)
            part = AttentionMetadata.for_step(
                self.attention.view,
                own,
                joined[begin : begin + tokens],
                first_token=begin,
                stop=96,
                prompt_lengths=None,
                decode=decode,
            )
            parts, begin = [*parts, part], begin + tokens
        for slot, count in zip(slots, counts, strict=True):
            where += [slot] * count
            index += range(-count, 0)
            self.done[slot] += count
        at, back = (torch.tensor(x, device=DEVICE) for x in (where, index))
        context = PagedContext(self.attention, parts, at, back, joined)
        g, n = self.shape.spec.geometry, len(where)
        width, rows = self.layer.key_width, self.layer.spec.row_width
        q = torch.randn(1, g.num_query_heads, n, width, device=DEVICE).to(self.shape.dtype)
        stored = torch.randn(1, n, rows, device=DEVICE).to(self.shape.dtype)
        out = context.attend(self.layer, q, stored)[0]
        wanted = [
            self._formula(s, q[0][:, at == s], p) for s, p in zip(slots, positions, strict=True)
        ]
        return out, torch.cat(wanted)

    def _formula(self, slot: int, q: Tensor, positions: Tensor) -> Tensor:
        """float64 [T, Hq d] of queries [Hq, T, r] at positions [T], over what comes back of the
        slot's rows."""
        layer, g = self.layer, self.shape.spec.geometry
        pages = self.attention.view.pages[0]
        slots = torch.tensor([slot], device=DEVICE)
        found = gather(pages, slots, pages.lengths[slots], self.shape.dtype, self.done[slot])
        rows, seen = found.rows.double(), found.positions[0, :1] <= positions[:, None].to(DEVICE)
        if self.shape.window is not None:
            after = positions[:, None].to(DEVICE) - self.shape.window
            seen = seen & (found.positions[0, :1] > after)
        assert found.valid.all()
        k = layer.score_keys(rows, None)[0].repeat_interleave(g.queries_per_kv, 0)
        assert layer.value_up is not None
        exact = replace(layer, value_up=layer.value_up.double())
        v = exact.full_values(rows)[0].transpose(0, 1).repeat_interleave(g.queries_per_kv, 0)
        scores = capped(q.double() @ k.mT * g.scaling, self.shape.softcap)
        weights = scores.masked_fill(~seen, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if layer.sinks is not None:
            total = total + layer.sinks.double().exp()[:, None, None]
        return (weights / total @ v).transpose(0, 1).flatten(1)


def apart(found: Tensor, wanted: Tensor) -> float:
    """Largest error of a token's outputs, over their norm."""
    return float(((found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
