"""Decoding on CPUs: attention over the pool's pages as they are, observed or not.

Shapes: B sequences, L layers, Hq query heads, Hk KV heads, G = Hq / Hk; n pages, P rows a page.
"""

import torch
from torch import Tensor

from kvfold.cache.eviction.attention import attention_mass
from kvfold.engine.backends import AttentionContext, AttentionMetadata
from kvfold.models.adapter import HFAttention
from kvfold.ops.backend import use_triton
from kvfold.ops.common.attention import attention_in_place
from kvfold.ops.common.pages import locate, plan_pages
from kvfold.ops.decode.cpu import PageList, add_metrics, attend_pages, list_pages, positions_of
from kvfold.ops.decode.cpu import supports as can_decode


def flat_layers(setup: AttentionContext) -> tuple[int, ...]:
    """Layers whose pages are read so: on CPUs without kernels, where heads have numbers of their
    own, in score space, with scales by row, and no window."""
    layout, num_heads = setup.pool.layout, setup.pool.layout.spec.geometry.num_kv_heads
    if layout.residual or setup.pool.device.type != "cpu" or use_triton("cpu"):
        return ()
    layers = enumerate(zip(layout.spec.layers, setup.pages, setup.windows, strict=True))
    return tuple(
        i
        for i, (spec, pages, window) in layers
        if spec.keys != "pre"
        and len(pages.groups) == num_heads
        and window is None
        and can_decode(pages.groups)
    )


class FlatDecode:
    """Decoding in `layers`. Pages are listed for all of these at once, when the first asks: they
    have the step's rows by then, and do not change in it. A step has one decoding part."""

    def __init__(self, setup: AttentionContext, layers: tuple[int, ...]) -> None:
        self.setup, self.layers = setup, layers
        self.lists: dict[int, list[PageList]] = {}  # of every layer, kind by kind
        sizes = {group.layout.page_units for group in setup.pool.layout.groups}
        self.one_table = len(sizes) == 1  # all pages of the arena are rows of one table

    def takes(self, module: HFAttention, part: AttentionMetadata) -> bool:
        return part.decode and module.layer_idx in self.layers

    def attend(self, module: HFAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """q [B, Hq, 1, .] -> [B, 1, D]."""
        q_BHGd = q.unflatten(1, (module.geometry.num_kv_heads, -1))[..., 0, :]
        plan = plan_pages(self.setup.pages[module.layer_idx].groups, self.setup.pool.device)
        if self.one_table and part.prompt_lengths is None and plan.in_place:
            out = self._in_place(module, part, q_BHGd)
        else:
            out = self._page_by_page(module, part, q_BHGd)
        return module.output(out.flatten(1, 2)[:, :, None].to(q.dtype))

    def _in_place(self, module: HFAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """q [B, Hk, G, d]: rows can be read where they lie."""
        pages, page = self.setup.pages[module.layer_idx], self.setup.pool.layout.page
        counts, size = pages.lengths[part.slots], part.sizes[module.layer_idx]
        place = locate(pages, part.slots, counts, size)
        return attention_in_place(q, *place, page, module.scaling)

    def _list_pages(self, part: AttentionMetadata) -> None:
        pool, slots = self.setup.pool, part.slots
        places = [pool.layout.layer_groups[i] for i in self.layers]
        plans = [(at, plan_pages(pool.layout.groups[at], pool.device)) for at in places]
        found = list_pages(plans, pool.tables, slots, pool.lengths[slots])
        self.lists = dict(zip(self.layers, found, strict=True))

    def _page_by_page(self, module: HFAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        if not self.lists:
            self._list_pages(part)
        out = torch.zeros(*q.shape[:3], module.value_width)  # fp32
        for pages in self.lists[module.layer_idx]:
            data = pages.read(self.setup.pool.arena)
            found, weights = attend_pages(q, data, pages, module.scaling)
            out[:, pages.kind.numbers, :, : found.shape[-1]] = found
            if part.prompt_lengths is not None:
                self._observe(part, weights, data, pages)
        return out

    def _observe(
        self, part: AttentionMetadata, weights: Tensor, data: Tensor, pages: PageList
    ) -> None:
        """Add weights [n, G, P] to the metrics, as if a page were a sequence of one KV head."""
        policy = self.setup.attention_policy
        assert policy is not None and part.prompt_lengths is not None
        sequence = pages.item % len(part.slots)
        queries = part.positions[sequence], part.prompt_lengths[sequence]
        positions = positions_of(data, pages)[:, None]
        mass = attention_mass(weights[:, :, None], positions, *queries, policy, [(0,)])
        add_metrics(self.setup.pool.arena, data, pages, mass[:, 0])
