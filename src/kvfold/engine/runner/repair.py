"""Rows that stay after an eviction, fitted to queries like those that may come.

Nobody knows later queries, so those of the prompt are made once more, of hidden states that are
kept of some of its tokens, as if they stood behind all that was read. Shapes: n tokens that are
kept of a prompt, D width, Hk KV heads, m queries of each, T rows, S the most that stay of a head, R
numbers of a row, G groups of all layers.
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
from kvfold.attention.rows import gather_rows
from kvfold.cache.eviction.repair import FittedEntries, fit_to_attention
from kvfold.engine.requests.request import Batch, Request, ScheduledChunk
from kvfold.layout import CacheSpec, Geometry
from kvfold.ops.store import rewrite
from kvfold.utils.errors import SettingError

QUERIES = 512  # of a KV head that are matched, at most
AFTER = 128  # positions behind what was read that they are turned to
FITTED = 2**26  # queries times rows that stay, of layers that are fitted at once, or of one


def check_repairs(spec: CacheSpec) -> None:
    """Raises SettingError for rows of which a head cannot change its own."""
    own = all(len(x.heads) == 1 and x.side != "kv" for y in spec.layers for x in y.latents)
    if not own or any(layer.keys == "pre_rope" for layer in spec.layers):
        raise SettingError(
            "`repair=True`: this model's heads share stored numbers, or their keys are rebuilt "
            "before RoPE, so that no head can change its own rows: leave `repair` out, or take "
            "recipe 'fast', 'zack', 'zdc' or 'kvquant-z', or the model as it is"
        )


def most_kept(geometry: Geometry) -> int:
    """Tokens of a prompt whose hidden states are kept, at most."""
    return max(1, QUERIES // geometry.queries_per_kv)


def state_bytes(geometry: Geometry, tokens: int, itemsize: int) -> int:
    """Of the hidden states that are kept of a prompt of so many tokens, beside its pages."""
    kept = min(most_kept(geometry), tokens)
    return kept * geometry.num_layers * geometry.hidden_size * itemsize


@dataclass
class _Prompt:
    """Hidden states [n, D], by layer, of the tokens at `positions` of a prompt."""

    owner: Request
    positions: range
    states: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, most: int) -> "_Prompt":
        """Of at most so many tokens of a request that are no packed context's."""
        start, stop = request.own_start, request.num_prefill
        return cls(request, range(start, stop, -(-(stop - start) // most)))

    def before(self, position: int) -> int:
        """How many of the positions come before another."""
        x = self.positions
        return len(range(x.start, min(x.stop, position), x.step))

    def keep(self, layer: int, own: slice, x: Tensor) -> None:
        """x: hidden states of those `own`."""
        if layer not in self.states:
            self.states[layer] = x.new_zeros(len(self.positions), x.shape[-1])
        self.states[layer][own] = x


@dataclass(frozen=True, eq=False)
class _Layer:
    """What is fitted of one layer: q, k, v, valid, stays and most (S) of `fit_to_attention`."""

    index: int
    tensors: tuple[Tensor, ...]
    most: int

    @property
    def kind(self) -> tuple[torch.Size, ...]:
        """Layers of one kind can be fitted at once."""
        return tuple(x.shape for x in self.tensors)

    @property
    def scores(self) -> int:
        q, *_ = self.tensors
        return q.shape[0] * q.shape[1] * self.most


class Fitted(NamedTuple):
    """Rows [S, R] of a layer for the places int64 [S, Hk] of the sequence slots [S], where keep
    [S, Hk] says so."""

    layer: int
    rows: Tensor
    slots: Tensor
    places: Tensor
    keep: Tensor

    def write(self, view: PoolView) -> None:
        layer, *rows = self
        rewrite(view.pages[layer], *rows)


class Repair:
    """modules: folded attentions of all layers."""

    def __init__(self, view: PoolView, modules: Sequence[Any]) -> None:
        self.view, self.modules = view, modules
        self.most = most_kept(view.layout.spec.geometry)
        self.prompts: dict[int, _Prompt] = {}  # by slot

    def watch(self, batch: Batch, evicts: Callable[[Request], bool]) -> LayerHook:
        """Before a step: a function of each of its layers and the hidden states [1, N, D] of its
        tokens, which keeps some of a prompt's. evicts: whether rows of a request may go."""
        self.prompts = {s: x for s, x in self.prompts.items() if x.owner.slot == s}
        found, begin = [], 0
        for chunk in batch.chunks:
            if not chunk.is_decode and evicts(chunk.request):
                found += self._kept(chunk, begin)
            begin += len(chunk.tokens)
        return partial(_keep, found)

    def _kept(self, chunk: ScheduledChunk, begin: int) -> list[tuple[_Prompt, slice, slice]]:
        """What is kept of a chunk that begins at token `begin` of a step: which states of what
        prompt, and of which tokens of the step."""
        slot = chunk.request.open_slot
        if chunk.start == chunk.request.own_start:
            self.prompts[slot] = _Prompt.of(chunk.request, self.most)
        prompt = self.prompts.get(slot)
        if prompt is None:
            return []
        own = slice(prompt.before(chunk.start), prompt.before(chunk.end))
        at = prompt.positions[own]
        first = begin + at.start - chunk.start
        return [(prompt, own, slice(first, first + at.stop - at.start, at.step))] if at else []

    def fit(self, slot: int, computed: int, evicted: Tensor) -> Iterator[Fitted]:
        """Rows of a sequence of so many tokens, as they are to be in heads which lose some: evicted
        bool [G, T]. Waits for the device once a layer. Layers alike are fitted together: solving
        takes as long for many heads as for few."""
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
        stored = gather_rows(self.view, maps, slots, evicted.shape[1])
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
        found = fit_to_attention(q, k, v, valid, stays, most, softcap)
        for layer, *own in zip(layers, *(x.chunk(len(layers)) for x in found), strict=True):
            *_, valid, stays = layer.tensors
            yield self._fitted(layer.index, slot, FittedEntries(*own), (valid & ~stays).any(-1))

    def _fitted(self, index: int, slot: int, found: FittedEntries, lost: Tensor) -> Fitted:
        """lost: bool [Hk], heads of which rows go."""
        maps: LayerAttention = self.modules[index].description
        places, inside, k, v = found
        sides = (maps.key_columns, k), (maps.value_columns, v)
        rows = [x.compact(z.transpose(0, 1)[None])[0].flatten(1) for x, z in sides]
        return Fitted(
            layer=index,
            rows=torch.cat(rows, 1).to(self.view.dtype),
            slots=torch.full((places.shape[1],), slot, device=places.device),
            places=places.T,
            keep=(inside & lost[:, None]).T,
        )

    def _queries(self, layer: int, slot: int, computed: int) -> Tensor:
        """Queries fp32 [Hk, m, .] in the space of scores."""
        module, prompt = self.modules[layer], self.prompts[slot]
        x = prompt.states[layer][None, : prompt.before(computed)]
        tables = None
        if module.rotary is not None:
            at = computed + torch.arange(x.shape[1], device=x.device) % AFTER
            tables = module.rotary.tables(x, at[None], computed + AFTER)
        q: Tensor = module.queries(x, tables)[0].float()
        return q.unflatten(0, (module.geometry.num_kv_heads, -1)).flatten(1, 2)


def _keep(found: list[tuple[_Prompt, slice, slice]], layer: LayerAttention, x: Tensor) -> None:
    for prompt, own, tokens in found:
        prompt.keep(layer.index, own, x[0, tokens])
