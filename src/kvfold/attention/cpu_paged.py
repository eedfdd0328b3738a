"""Decode attention on CPUs in PyTorch, directly on the pool's pages.

Shapes: B sequences of one attention call (a part of the step), Hq query heads, Hk KV heads,
G = Hq / Hk; n pages, P token entries a page; W input width of W_O.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvfold.attention.backend import AttentionBackend, Task, why_not_uniform
from kvfold.attention.base import LayerAttention, LayerShape
from kvfold.attention.buckets import attend_in_buckets
from kvfold.attention.metadata import AttentionMetadata, CacheView, PoolView
from kvfold.attention.observer import Observer
from kvfold.cache.eviction.scorers.attention import attention_scores
from kvfold.layout.pages import Group
from kvfold.ops.backend import use_triton
from kvfold.ops.common.attention import attention_in_place
from kvfold.ops.common.pages import locate, plan_pages
from kvfold.ops.decode import cpu


class CpuPaged(AttentionBackend):
    """Decode attention on a CPU for heads that share no latents, with keys in the space of scores,
    scales per token entry, and full attention.

    The pages of all its layers are listed together by the first layer of a step: tables include the
    step's entries by then, and do not change during it. A step has one decoding part.
    """

    view: PoolView

    def __init__(self, view: CacheView, layers: Sequence[LayerAttention]) -> None:
        assert isinstance(view, PoolView), "pages of all layers lie in one arena"
        super().__init__(view)
        self.layers = [layer.index for layer in layers]
        self.lists: dict[int, list[cpu.PageList]] = {}  # by layer; one list per page class
        sizes = {group.layout.page_units for group in view.pool.layout.groups}
        self.one_table = len(sizes) == 1  # all pages of the arena are rows of one table

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        if task.device_type != "cpu" or use_triton("cpu"):
            return "it is for CPUs without kernels"
        if layer.reconstructs_keys:
            return "keys are stored before RoPE"
        if layer.has_sinks:
            return "a sink stands beside the scores"
        if len(groups) != layer.geometry.num_kv_heads:
            return "heads share latents"
        if not cpu.supports(groups):
            return "numbers of another format, or with scales by channel"
        return why_not_uniform(layer, groups)

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerAttention], observer: Observer | None
    ) -> Callable[[CacheView], AttentionBackend]:
        return partial(cls, layers=layers)

    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """q [B, Hq, 1, .] -> [B, 1, W]."""
        q_BHGd = q.unflatten(1, (layer.geometry.num_kv_heads, -1))[..., 0, :]
        plan = plan_pages(self.view.pages[layer.index].groups, self.view.pool.device)
        if self.one_table and part.prompt_lengths is None and plan.in_place:
            out = attend_in_buckets(partial(self._in_place, layer), part, layer.index, q_BHGd)
        else:
            out = self._page_by_page(layer, part, q_BHGd)
        return layer.merge_heads(out.flatten(1, 2)[:, :, None].to(q.dtype))

    def _in_place(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """Attention over one table of all pages, sequences padded to the longest: q [B, Hk, G, d]
        -> fp32 [B, Hk, G, r]."""
        pages = self.view.pages[layer.index]
        place = locate(pages, part.slots, pages.lengths[part.slots], part.size(layer.index))
        return attention_in_place(q, *place, self.view.pool.layout.page, layer.scale)

    def _page_by_page(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """Attention over the listed pages: q [B, Hk, G, d] -> fp32 [B, Hk, G, r]."""
        if not self.lists:
            pool, slots = self.view.pool, part.slots
            places = [pool.layout.layer_groups[i] for i in self.layers]
            plans = [(at, plan_pages(pool.layout.groups[at], pool.device)) for at in places]
            listed = cpu.list_pages(plans, pool.block_tables, slots, pool.lengths[slots])
            self.lists = dict(zip(self.layers, listed, strict=True))
        out = torch.zeros(*q.shape[:3], layer.value_columns.widest)  # fp32
        for pages in self.lists[layer.index]:
            data = pages.read(self.view.pool.arena)
            page_out, weights = cpu.attend_pages(q, data, pages, layer.scale)
            out[:, pages.kind.numbers, :, : page_out.shape[-1]] = page_out
            if part.prompt_lengths is not None:
                self._observe(part, weights, data, pages)
        return out

    def _observe(
        self, part: AttentionMetadata, weights: Tensor, data: Tensor, pages: cpu.PageList
    ) -> None:
        """Add weights [n, G, P] to the metrics; each page counts as a sequence with one KV head."""
        observation = self.view.observing
        assert observation is not None and part.prompt_lengths is not None
        sequence = pages.item % len(part.slots)
        queries = part.positions[sequence], part.prompt_lengths[sequence]
        positions = cpu.positions_of(data, pages)[:, None]
        added = attention_scores(weights[:, :, None], positions, *queries, observation, [(0,)])
        cpu.add_metrics(self.view.pool.arena, data, pages, added[:, 0])
