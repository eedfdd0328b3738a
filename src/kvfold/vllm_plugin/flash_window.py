"""Attend to prompts with an exact window by the FlashAttention 3 that vLLM includes, on Hopper.

It is called twice: with a window for the tokens that a chunk's queries see exactly, and for the
compressed entries before them, of which the last query sees the most and each query before it one
less.

Shapes: N tokens of a window, T queries of one request, S entries of its window's pages, R numbers
of an exact entry; others as in `attention.window`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvfold.attention.backend import Weighed
from kvfold.attention.base import LayerAttention
from kvfold.attention.metadata import CacheView
from kvfold.attention.window import Chunk, exact_views
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.recording import compute
from kvfold.ops.prefill import KVView, Seen
from kvfold.vllm_plugin import flash
from kvfold.vllm_plugin.flash import shared_width


class FlashChunk(Chunk):
    """Serves chunks of one request each whose queries are its newest tokens.

    order: int64 [1, N - 1 + T], where the exact tokens are in the pages and the chunk's entries
        behind them, in the order of positions.
    exact: int32 [1], how many of them there are.
    sees_none: bool [T], queries before which there are no compressed entries.
    """

    @classmethod
    def serves(cls, layers: Sequence[LayerAttention], view: CacheView) -> bool:
        """Whether it serves the layers' exact tokens. view: of exact tokens."""
        return (
            flash.excluded(view.device.type) is None
            and view.dtype.itemsize == 2
            and all(_exact_width(x, torch.empty(1, 1, x.spec.row_width)) for x in layers)
            and flash.why_not() is None
        )

    def _arrange(
        self, queries: Tensor, first: Tensor, place: Callable[[Tensor], Tensor], heads: int
    ) -> None:
        tokens, size = self.tokens, self.size
        start, last = queries[:, :1], queries[:, -1:]
        positions = first + torch.arange(tokens - 1 + queries.shape[1], device=queries.device)
        behind = size + positions.minimum(last) - start
        self.order = torch.where(positions < start, place(positions), behind)
        self.exact = (last[:, 0] + 1 - first[:, 0]).int()
        self.sees_none = queries[0] < tokens

    def entries(
        self, pages: LayerPages, slots: Tensor, packed: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Exact entries [1, N - 1 + T, R] in the order of positions."""
        entries = self.stored_and_own(pages, slots, packed, dtype)
        order = self.order[..., None].expand(-1, -1, entries.shape[-1])
        return compute(torch.gather, entries, 1, order)

    def weigh(self, plain: LayerAttention, q: Tensor, entries: Tensor) -> Weighed:
        width = _exact_width(plain, entries)
        assert width is not None, "all layers are served"
        keys, values = exact_views(plain, entries)
        return flash.weigh(q, keys, values, width, self.exact, plain.scale, self.tokens)

    def attend_older(
        self, q: Tensor, keys: KVView, values: KVView, visible: Seen, scale: float
    ) -> Weighed:
        width = shared_width(keys, values)
        if width is None:
            return super().attend_older(q, keys, values, visible, scale)
        lengths = visible.counts[:, 0].contiguous()
        return flash.weigh(q, keys, values, width, lengths, scale, sees_none=self.sees_none)


def _exact_width(plain: LayerAttention, entries: Tensor) -> int | None:
    return shared_width(*exact_views(plain, entries))
