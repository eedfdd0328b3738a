"""One step's attention over the pool: what a model is given in place of a cache.

A step packs N tokens of several sequences into one row, decoding ones first.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvfold.attention.base import AttentionBackend, AttentionContext, LayerMaps, QueryKeeper
from kvfold.attention.metadata import AttentionMetadata, PoolView
from kvfold.attention.selector import Selected
from kvfold.ops.store import residual as kivi


class PagedAttention:
    """Attention of a model's layers over a pool: what all steps share. observer: keeps observed
    decoding queries of `selected.keeping()`."""

    def __init__(
        self,
        layers: Sequence[LayerMaps],
        view: PoolView,
        selected: Selected,
        observer: QueryKeeper | None = None,
    ) -> None:
        self.view, self.selected, self.observer = view, selected, observer
        self.makers: dict[type[AttentionBackend], Callable[[], AttentionBackend]] = {}
        for backend in {*selected.decode, *selected.prefill, *selected.observed}:
            decoded = [x for x in layers if selected.decode[x.index] is backend]
            self.makers[backend] = backend.prepare(view, decoded, observer)

    @property
    def captures(self) -> bool:
        """Whether a decode step needs nothing from the host, so that a graph can hold it."""
        on_cuda = self.view.pool.device.type == "cuda"
        return on_cuda and all(backend.captures for backend in self.selected.decode)


class PagedContext(AttentionContext):
    """All layers' attention in one step.

    slots, index [N]: each token's sequence, and its row counted from the end of the groups' rows
    (negative); positions int32 [N]; fill: which pages the tokens fill, with KIVI.
    """

    def __init__(
        self,
        attention: PagedAttention,
        parts: Sequence[AttentionMetadata],
        slots: Tensor,
        index: Tensor,
        positions: Tensor,
        fill: kivi.Fill | None = None,
    ) -> None:
        self.view, self.parts, self.fill = attention.view, parts, fill
        self.slots, self.positions = slots, positions
        self.index = self.view.pool.lengths[slots] + index[:, None]  # int64 [N, all groups]
        self.chosen = [attention.selected.of_part(part) for part in parts]
        self.backends: Mapping[type[AttentionBackend], AttentionBackend] = {
            backend: make() for backend, make in attention.makers.items()
        }

    def attend(self, layer: LayerMaps, q: Tensor, rows: Tensor) -> Tensor:
        """q [1, Hq, N, .] and rows [1, N, R] of the step's tokens: [1, N, W]."""
        self._store(layer.index, rows[0])
        outputs = [
            self.backends[chosen[layer.index]].attend(layer, part, part.of(q)).flatten(0, 1)
            for part, chosen in zip(self.parts, self.chosen, strict=True)
        ]
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None]

    def _store(self, layer: int, rows: Tensor) -> None:
        """rows [N, R] of the step's tokens into their pages."""
        arena, tables, _, groups = self.view.pages[layer]
        index = self.index[:, self.view.pool.layout.layer_groups[layer]]
        place = arena, tables, groups, rows, self.slots
        if self.fill is not None:
            kivi.append(*place, index[:, 0], self.fill)
        else:
            self.view.store.append(*place, index, self.positions)
