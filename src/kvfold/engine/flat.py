"""Decoding on CPUs: attention over the pool's pages as they are, observed or not.

Shapes: B sequences, L layers, Hq query heads, Hk KV heads, G = Hq / Hk; n pages, P rows a page.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.cache.evict import attention_mass
from kvfold.cache.policies import Policy
from kvfold.cache.pool import Pool
from kvfold.models.adapter import HFAttention
from kvfold.ops.flat import PageList, add_metrics, attend_pages, list_pages, positions_of
from kvfold.ops.pages import plan_pages

if TYPE_CHECKING:
    from kvfold.engine.paged import Part


def flat_layers(pool: Pool) -> tuple[int, ...]:
    """Layers whose pages are read so: on CPUs, where heads have numbers of their own, in score
    space, with scales by row."""
    layout, num_heads = pool.layout, pool.layout.spec.geometry.num_kv_heads
    if layout.kivi or pool.device.type != "cpu":
        return ()
    layers = enumerate(zip(layout.spec.layers, layout.layer_groups, strict=True))
    return tuple(i for i, (x, at) in layers if x.keys != "pre" and at.stop - at.start == num_heads)


class FlatDecode:
    """One step of the decoding sequences, in `layers`. Pages are listed for all of these at once,
    when the first asks: they have the step's rows by then, and do not change in it."""

    def __init__(
        self, pool: Pool, part: "Part", layers: tuple[int, ...], policy: Policy | None
    ) -> None:
        self.pool, self.part, self.layers, self.policy = pool, part, layers, policy

    @cached_property
    def page_lists(self) -> dict[int, list[PageList]]:
        """Of every layer, kind by kind."""
        pool, slots = self.pool, self.part.slots
        places = [pool.layout.layer_groups[i] for i in self.layers]
        plans = [(at, plan_pages(pool.layout.groups[at], pool.device)) for at in places]
        found = list_pages(plans, pool.tables, slots, pool.lengths[slots])
        return dict(zip(self.layers, found, strict=True))

    def attend(self, module: HFAttention, q: Tensor) -> Tensor:
        """q [B, Hq, 1, .] -> [B, 1, D]."""
        q_BHGd = q.unflatten(1, (module.geometry.num_kv_heads, -1))[..., 0, :]
        out = torch.zeros(*q_BHGd.shape[:3], module.value_width)  # fp32
        for pages in self.page_lists[module.layer_idx]:
            data = pages.read(self.pool.arena)
            found, weights = attend_pages(q_BHGd, data, pages, module.scaling)
            out[:, pages.kind.numbers, :, : found.shape[-1]] = found
            if self.part.prompt_lengths is not None:
                self._observe(weights, data, pages)
        return module.output(out.flatten(1, 2)[:, :, None].to(q.dtype))

    def _observe(self, weights: Tensor, data: Tensor, pages: PageList) -> None:
        """Add weights [n, G, P] to the metrics, as if a page were a sequence of one KV head."""
        part = self.part
        assert self.policy is not None and part.prompt_lengths is not None
        sequence = pages.item % len(part.slots)
        queries = part.positions[sequence], part.prompt_lengths[sequence]
        positions = positions_of(data, pages)[:, None]
        mass = attention_mass(weights[:, :, None], positions, *queries, self.policy, [(0,)])
        add_metrics(self.pool.arena, data, pages, mass[:, 0])
