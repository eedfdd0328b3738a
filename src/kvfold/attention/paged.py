"""Attention of one step over the page pool: the object that a model gets in place of its cache.

A step concatenates the N tokens of all its sequences, decoding ones first. A *part* of it is the
set of tokens of one attention call (`AttentionMetadata`).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvfold.attention.backend import AttentionBackend
from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.attention.learned import LearnedScores
from kvfold.attention.local import LocalAttention
from kvfold.attention.metadata import AttentionMetadata, CacheView, PoolView
from kvfold.attention.observer import Observer
from kvfold.attention.queries import RecentQueries
from kvfold.attention.rows import PoolEntries
from kvfold.attention.selector import SelectedBackends
from kvfold.attention.window import ExactTokens, WindowAttention
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.compactor import Local
from kvfold.cache.pool import Pool
from kvfold.ops import store

LayerHook = Callable[[LayerAttention, Tensor], None]


class PagedAttention:
    """Attention of a model's layers over a pool: what all steps share. dtype: of queries and token
    entries.

    observer: buffers decode queries until their attention is added to metrics.
    recent: buffers the last queries for the policy.
    local: adds local attention to metrics as prompts are stored.
    learned: writes predicted scores as metrics.

    Each is None if the policy does not need it.
    """

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        pool: Pool,
        policy: Policy | None,
        dtype: torch.dtype,
    ) -> None:
        self.layers, self.view = layers, PoolView(pool, policy, dtype)
        self.window = None
        if pool.window is not None:
            self.window = WindowAttention(layers, self.view, pool.window)
        self.selected = chosen = SelectedBackends.select_all(layers, self.view)
        self.observer, self.recent = None, None
        observing = self.view.observing if self.view.observes_decodes else None
        device_type, groups = pool.device.type, pool.layout.groups_of_layer
        pairs = zip(layers, chosen.decode, strict=True)
        observed = {
            x.index: x
            for x, backend in pairs
            if backend.needs_observer(groups(x.index), device_type)
        }
        if observing is not None and observed:
            self.observer = Observer(self.view, observing.scorer, observed)
        if policy is not None and "queries" in policy.scorer.needs:
            assert policy.window is not None
            self.recent = RecentQueries(policy.window, self.view, dict(enumerate(layers)))
        scorer = None if policy is None else policy.scorer
        self.local = LocalAttention(self.view, scorer) if isinstance(scorer, Local) else None
        reads_map = scorer is not None and "learned" in scorer.needs
        self.learned = LearnedScores(self.view) if reads_map else None
        self.backend_factories: dict[
            type[AttentionBackend], Callable[[CacheView], AttentionBackend]
        ] = {}
        decoders = tuple(filter(None, (chosen.decode, chosen.coarse)))
        for backend in {*chosen.decode, *chosen.prefill, *chosen.observed, *chosen.coarse}:
            decoded = [x for x in layers if any(y[x.index] is backend for y in decoders)]
            self.backend_factories[backend] = backend.prepare(self.view, decoded, self.observer)

    def entries(
        self, slots: Tensor, size: int, computed: list[int], first: list[int]
    ) -> PoolEntries:
        """The stored token entries of sequences for eviction policies, as in `PoolEntries`."""
        return PoolEntries(self.view, self.layers, self.recent, slots, size, computed, first)

    @property
    def supports_graphs(self) -> bool:
        """Whether a decode step needs no host data, so that a CUDA graph can capture it."""
        on_cuda = self.view.pool.device.type == "cuda"
        if self.window is not None:
            return on_cuda and self.window.supports_graphs
        return on_cuda and all(backend.supports_graphs for backend in self.selected.decode)


class PagedContext(AttentionContext):
    """Attention of all layers in one step.

    slots, index [N]: the pool slot of each token, and which of its sequence's newest entries it
        is (-1: the last). `self.index` numbers the entries of each group, [N, groups].
    positions: int32 [N].
    fill: which residual blocks the tokens fill, if there are any.
    layer_hook: called for each layer with the hidden states [1, N, D] that enter its attention.
    """

    def __init__(
        self,
        attention: PagedAttention,
        parts: Sequence[AttentionMetadata],
        slots: Tensor,
        index: Tensor,
        positions: Tensor,
        fill: store.Fill | None = None,
        layer_hook: LayerHook | None = None,
    ) -> None:
        self.view, self.parts, self.fill, self.layer_hook = attention.view, parts, fill, layer_hook
        self.slots, self.positions = slots, positions
        self.index = self.view.pool.lengths[slots] + index[:, None]  # int64 [N, all groups]
        self.recent, self.local = attention.recent, attention.local
        self.learned, self.worth = attention.learned, torch.empty(0)
        self.recent_indices = self.recent.begin(parts) if self.recent is not None else ()
        self.window = None
        if attention.window is not None:
            self.window = attention.window.begin(parts, slots, positions)
        self.order = _order(parts, len(positions))
        self.chosen = [attention.selected.for_part(part) for part in parts]
        self.backends: Mapping[type[AttentionBackend], AttentionBackend] = {
            backend: make(self.view) for backend, make in attention.backend_factories.items()
        }

    def before_attention(self, layer: LayerAttention, x: Tensor) -> None:
        if self.learned is not None:
            self.worth = self.learned.of(layer, x)
        if self.layer_hook is not None:
            self.layer_hook(layer, x)

    def keep_exact(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.window is not None:
            self.window.keep(layer, ExactTokens(q[0], k[0], v[0]))

    def attend(self, layer: LayerAttention, q: Tensor, entries: Tensor) -> Tensor:
        """Store entries [1, N, R] of the step's tokens and attend with q [1, Hq, N, .]:
        [1, N, W]."""
        index = self.index[:, self.view.pool.layout.layer_groups[layer.index]]
        destination = self.slots, index, self.positions, self.fill
        store.append(self.view.pages[layer.index], entries[0], *destination)
        if self.learned is not None:
            self.learned.write(layer, self.slots, index, self.worth)
        if self.recent is not None:
            self.recent.keep(layer.index, self.recent_indices, q)
        if self.local is not None:
            for part in self.parts:
                if not part.decode:
                    self.local.add(layer, part, q, entries, index)
        outputs = [
            self._attend(layer, part, chosen, part.slice_of(q)).flatten(0, 1)
            for part, chosen in zip(self.parts, self.chosen, strict=True)
        ]
        if self.order is not None:
            return torch.cat(outputs)[self.order][None]
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None]

    def _attend(
        self,
        layer: LayerAttention,
        part: AttentionMetadata,
        chosen: Sequence[type[AttentionBackend]],
        q: Tensor,
    ) -> Tensor:
        """Attention of a part's queries q [B, Hq, T, .]: [B, T, W]."""
        if self.window is not None:
            return self.window.attend(layer, part, q)
        return self.backends[chosen[layer.index]].attend(layer, part, q)


def _order(parts: Sequence[AttentionMetadata], num_tokens: int) -> Tensor | None:
    """Index of each of N tokens in the concatenated outputs of parts, int64 [N]; None if they are
    in order. Of a repeated token it is the last: those before it are padding, whose outputs may be
    wrong (an exact window's)."""
    begins = [part.first_token for part in parts]
    if all(part.tokens is None for part in parts) and begins == sorted(begins):
        return None
    packed = torch.cat([part.packed for part in parts])
    order = torch.zeros(num_tokens, dtype=torch.int64, device=packed.device)
    rows = torch.arange(len(packed), device=packed.device)
    return order.scatter_reduce_(0, packed, rows, "amax")  # which a GPU repeats, unlike copies
