"""Fit the entries that remain after an eviction, so that attention gives similar outputs to queries
that are likely to come.

Later queries are unknown. So hidden states of some prompt tokens are kept, and their queries are
computed again as if the tokens followed the prompt.

Shapes: n prompt tokens with kept hidden states, D model width, Hk KV heads, m queries per KV head,
T entries, S most remaining entries of a head, R numbers of an entry, G groups of all layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.attention.base import LayerAttention
from kvfold.attention.metadata import PoolView
from kvfold.attention.paged import LayerHook
from kvfold.attention.rows import gather_entries
from kvfold.cache.eviction.repair import FittedEntries, fit_to_attention
from kvfold.engine.requests.request import Batch, Request, ScheduledChunk
from kvfold.layout import CacheSpec, Geometry
from kvfold.ops.store import rewrite
from kvfold.utils.errors import SettingError

QUERIES = 512  # most queries per KV head that the fit uses
AFTER = 128  # these queries get the positions 0 .. AFTER - 1 after the prompt
FITTED = 2**26  # most scores (queries times remaining entries) of layers that are fitted at once


def check_repairs(spec: CacheSpec) -> None:
    """Raises SettingError if a head cannot change its entries without changing those of other
    heads."""
    is_separate = all(len(x.heads) == 1 and x.side != "kv" for y in spec.layers for x in y.latents)
    if not is_separate or any(layer.keys == "pre_rope" for layer in spec.layers):
        raise SettingError(
            "`repair=True`: this model's heads share stored numbers, or their keys are "
            "reconstructed before RoPE, so that a head cannot change its entries alone: leave "
            "`repair` out, or use recipe 'fast', 'zack', 'zdc' or 'kvquant-z', or the "
            "uncompressed model"
        )


def most_selection(geometry: Geometry) -> int:
    """Most tokens of a prompt whose hidden states are kept."""
    return max(1, QUERIES // geometry.queries_per_kv)


def state_bytes(geometry: Geometry, tokens: int, itemsize: int) -> int:
    """Bytes of the hidden states kept of a prompt of `tokens` tokens, in addition to its pages."""
    num_kept = min(most_selection(geometry), tokens)
    return num_kept * geometry.num_layers * geometry.hidden_size * itemsize


@dataclass
class _Prompt:
    """Hidden states [n, D] of each layer for the tokens at `positions` of a prompt."""

    owner: Request
    positions: range
    states: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, most: int) -> "_Prompt":
        """An empty one for at most `most` tokens of a request, without those of a packed
        context."""
        start, stop = request.context_length, request.num_prefill
        return cls(request, range(start, stop, -(-(stop - start) // most)))

    def before(self, position: int) -> int:
        """How many of the positions are before `position`."""
        x = self.positions
        return len(range(x.start, min(x.stop, position), x.step))

    def keep(self, layer: int, where: slice, x: Tensor) -> None:
        """Store hidden states x [k, D] of the positions number `where`."""
        if layer not in self.states:
            self.states[layer] = x.new_zeros(len(self.positions), x.shape[-1])
        self.states[layer][where] = x


@dataclass(frozen=True, eq=False)
class _Layer:
    """The inputs of `fit_to_attention` for one layer: q, k, v, valid, stays, and most (S)."""

    index: int
    tensors: tuple[Tensor, ...]
    most: int

    @property
    def kind(self) -> tuple[torch.Size, ...]:
        """Layers of the same kind can be fitted together."""
        return tuple(x.shape for x in self.tensors)

    @property
    def scores(self) -> int:
        q, *_ = self.tensors
        return q.shape[0] * q.shape[1] * self.most


class Fitted(NamedTuple):
    """New entries [S, R] of a layer, to be written to entry indices places [S, Hk] of sequence
    slots [S], if keep [S, Hk] is set."""

    layer: int
    entries: Tensor
    slots: Tensor
    places: Tensor
    keep: Tensor

    def write(self, view: PoolView) -> None:
        layer, *entries = self
        rewrite(view.pages[layer], *entries)


class Repair:
    """Keeps hidden states of prompts, and fits remaining entries. modules: folded attention modules
    of all layers."""

    def __init__(self, view: PoolView, modules: Sequence[Any]) -> None:
        self.view, self.modules = view, modules
        self.most = most_selection(view.layout.spec.geometry)
        self.prompts: dict[int, _Prompt] = {}  # by slot

    def watch(self, batch: Batch, evicts: Callable[[Request], bool]) -> LayerHook:
        """Prepare to keep hidden states in a step. Returns a function to call with each layer and
        its hidden states [1, N, D]. evicts: whether entries of a request may be evicted."""
        self.prompts = {s: x for s, x in self.prompts.items() if x.owner.slot == s}
        targets, begin = [], 0
        for chunk in batch.chunks:
            if not chunk.is_decode and evicts(chunk.request):
                targets += self._selection(chunk, begin)
            begin += len(chunk.tokens)
        return partial(_keep, targets)

    def _selection(self, chunk: ScheduledChunk, begin: int) -> list[tuple[_Prompt, slice, slice]]:
        """What to keep of a chunk that starts at token `begin` of a step: the prompt, the indices
        of its states, and of the step's tokens."""
        slot = chunk.request.open_slot
        if chunk.start == chunk.request.context_length:
            self.prompts[slot] = _Prompt.of(chunk.request, self.most)
        prompt = self.prompts.get(slot)
        if prompt is None:
            return []
        where = slice(prompt.before(chunk.start), prompt.before(chunk.end))
        positions = prompt.positions[where]
        first = begin + positions.start - chunk.start
        return (
            [
                (
                    prompt,
                    where,
                    slice(first, first + positions.stop - positions.start, positions.step),
                )
            ]
            if positions
            else []
        )

    def fit(self, slot: int, computed: int, evicted: Tensor) -> Iterator[Fitted]:
        """Fit the remaining entries of a sequence, in heads that lose some. computed: number of
        computed tokens; evicted: bool [G, T]. Waits for the device once per layer. Layers of one
        kind are fitted together, since solving for many heads takes as long as for few."""
        lost, waiting = evicted.any(1).tolist(), list[_Layer]()
        for index, where in enumerate(self.view.layout.layer_groups):
            if not any(lost[where]):
                continue
            layer = self._layer(index, slot, computed, evicted[where])
            full = sum(x.scores for x in (*waiting, layer)) > FITTED
            if waiting and (full or layer.kind != waiting[0].kind):
                yield from self._fit(waiting, slot)
                waiting = []
            waiting.append(layer)
        yield from self._fit(waiting, slot)

    def _layer(self, index: int, slot: int, computed: int, evicted: Tensor) -> _Layer:
        maps: LayerAttention = self.modules[index].description
        slots = torch.tensor([slot], device=evicted.device)
        stored = gather_entries(self.view, maps, slots, evicted.shape[1])
        q = self._queries(index, slot, computed) * maps.scale
        k = maps.score_keys(stored.rows, None)[0]
        v = maps.value_columns.spread(maps.value_columns.gather(stored.rows))[0]
        stays = stored.valid[0] & ~evicted
        return _Layer(index, (q, k, v, stored.valid[0], stays), int(stays.sum(-1).max()))

    def _fit(self, layers: list[_Layer], slot: int) -> Iterator[Fitted]:
        if not layers:
            return
        softcap = self.view.layout.spec.geometry.softcap
        q, k, v, valid, stays = map(torch.cat, zip(*(x.tensors for x in layers), strict=True))
        most = max(x.most for x in layers)
        fitted = fit_to_attention(q, k, v, valid, stays, most, softcap)
        for layer, *layer_fit in zip(layers, *(x.chunk(len(layers)) for x in fitted), strict=True):
            *_, valid, stays = layer.tensors
            yield self._fitted(
                layer.index, slot, FittedEntries(*layer_fit), (valid & ~stays).any(-1)
            )

    def _fitted(self, index: int, slot: int, fit: FittedEntries, lost: Tensor) -> Fitted:
        """Fitted entries as the layer stores them. lost: bool [Hk], heads that lose entries."""
        maps: LayerAttention = self.modules[index].description
        indices, is_kept, k, v = fit
        sides = (maps.key_columns, k), (maps.value_columns, v)
        entries = [x.compact(z.transpose(0, 1)[None])[0].flatten(1) for x, z in sides]
        return Fitted(
            layer=index,
            entries=torch.cat(entries, 1).to(self.view.dtype),
            slots=torch.full((indices.shape[1],), slot, device=indices.device),
            places=indices.T,
            keep=(is_kept & lost[:, None]).T,
        )

    def _queries(self, layer: int, slot: int, computed: int) -> Tensor:
        """Likely later queries fp32 [Hk, m, .] of a layer."""
        module, prompt = self.modules[layer], self.prompts[slot]
        x = prompt.states[layer][None, : prompt.before(computed)]
        tables = None
        if module.rotary is not None:
            at = computed + torch.arange(x.shape[1], device=x.device) % AFTER
            tables = module.rotary.tables(x, at[None], computed + AFTER)
        q: Tensor = module.queries(x, tables)[0].float()
        return q.unflatten(0, (module.geometry.num_kv_heads, -1)).flatten(1, 2)


def _keep(targets: list[tuple[_Prompt, slice, slice]], layer: LayerAttention, x: Tensor) -> None:
    for prompt, where, tokens in targets:
        prompt.keep(layer.index, where, x[0, tokens])
