"""Fit the entries that remain after an eviction, so that attention gives similar outputs to queries
that are likely to come.

Later queries are unknown. So hidden states of some prompt tokens are kept, and their queries are
computed again as if the tokens followed the prompt.

Shapes: n prompt tokens with kept hidden states, D model width, Hk KV heads, m queries per KV head,
T entries, N remaining entries of all heads, S most remaining entries of a head, R numbers of an
entry, G groups (of one KV head) of all layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.attention.base import LayerAttention
from kvfold.attention.metadata import PoolView
from kvfold.attention.paged import LayerHook
from kvfold.attention.rows import gather_entries
from kvfold.cache.eviction.repair import attend, fit
from kvfold.engine.requests.request import Batch, Request, ScheduledChunk
from kvfold.layout import CacheSpec, Geometry
from kvfold.layout.pages import Ints
from kvfold.ops.common.launch import upload
from kvfold.ops.store import rewrite
from kvfold.utils.errors import SettingError

QUERIES = 512  # most queries per KV head that the fit uses
AFTER = 128  # these queries get the positions 0 .. AFTER - 1 after the prompt
FITTED = 2**26  # most scores (queries times remaining entries) of heads that are fitted at once


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


class _Goal(NamedTuple):
    """What heads [H] are fitted to: queries [H, m, dk], outputs fp32 [H, m, dv] of their attention
    to all entries, and log-sum-exps fp32 [H, m, 1]."""

    q: Tensor
    outputs: Tensor
    lse: Tensor


@dataclass(frozen=True)
class _Remaining:
    """The remaining entries of a sequence, group after group.

    size: T.
    group: int64 [N], the group of each.
    place: int64 [N + 1], index of each among the stored entries of its group.
    keys, values: [N + 1, .], with columns for the widest layer. The last entry is padding.
    begin, count: int64 [G], first entry of each group and number of entries.
    fitted: bool [G], groups that lose some entries and keep others.
    """

    size: int
    group: Tensor
    place: Tensor
    keys: Tensor
    values: Tensor
    begin: Ints
    count: Ints
    fitted: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls, valid: Tensor, evicted: Tensor, widths: tuple[int, int], dtype: torch.dtype
    ) -> "_Remaining":
        """With keys and values of so many columns, which are 0. valid, evicted: bool [G, T]. Waits
        for the device."""
        stays = valid & ~evicted
        group, place = stays.nonzero(as_tuple=True)
        count, lost = torch.stack((stays.sum(1), (valid & evicted).sum(1))).cpu().numpy()
        place = F.pad(place, (0, 1))
        keys, values = (
            torch.zeros(len(place), n, dtype=dtype, device=place.device) for n in widths
        )
        return cls(
            size=valid.shape[1],
            group=group,
            place=place,
            keys=keys,
            values=values,
            begin=np.cumsum(count) - count,
            count=count,
            fitted=(count > 0) & (lost > 0),
        )

    def copy(self, where: slice, k: Tensor, v: Tensor) -> None:
        """Copy those of the groups `where` from all their entries k, v [g, T, .]."""
        first, last = self.begin[where][0], self.begin[where][-1] + self.count[where][-1]
        entries = slice(first, last)
        at = self.group[entries] - where.start, self.place[entries]
        self.keys[entries, : k.shape[-1]] = k[at]
        self.values[entries, : v.shape[-1]] = v[at]

    def index(self, groups: Ints) -> tuple[Tensor, Tensor]:
        """Entries of groups [n]: int64 [n, S], filled up with padding, and bool [n, S], False for
        padding. Groups that are not fitted have padding alone."""
        begin, count = self.begin[groups], self.count[groups] * self.fitted[groups]
        bounds = upload(np.stack((begin, begin + count)), self.place.device)
        first, stop = bounds[..., None]
        index = first + torch.arange(int(count.max()), device=self.place.device)
        inside = index < stop
        return index.where(inside, len(self.group)), inside


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
        computed tokens; evicted: bool [G, T]. Waits for the device twice. All is fitted when this
        returns; the iterator arranges the entries of one layer after another.

        Heads of all layers are fitted together with those that keep similar numbers of entries:
        solving for many heads takes as long as for few.
        """
        pool, size = self.view.pool, evicted.shape[1]
        valid = torch.arange(size, device=evicted.device) < pool.lengths[slot][:, None]
        maps = [x.description for x in self.modules]
        widths = (
            max(x.key_columns.widest for x in maps),
            max(x.value_columns.widest for x in maps),
        )
        remaining = _Remaining.of(valid, evicted, widths, self.view.dtype)
        layers = self.view.layout.layer_groups
        some = [i for i, where in enumerate(layers) if remaining.fitted[where].any()]
        if some:
            full = pool.host_lengths[slot] == size
            goals = [
                self._read(remaining, i, slot, computed, None if full[x].all() else valid[x])
                for i, x in ((i, layers[i]) for i in some)
            ]
            groups = np.concatenate([np.arange(layers[i].start, layers[i].stop) for i in some])
            self._fit(remaining, groups, _Goal(*map(torch.cat, zip(*goals, strict=True))))
        return (self._fitted(remaining, i, slot) for i in some)

    def _read(
        self, remaining: _Remaining, index: int, slot: int, computed: int, valid: Tensor | None
    ) -> _Goal:
        """Copy what remains of a layer; returns what to fit it to. valid: bool [Hk, T], entries
        that exist (None: all)."""
        maps: LayerAttention = self.modules[index].description
        geometry = self.view.layout.spec.geometry
        slots = torch.tensor([slot], device=self.view.device)
        slots = upload(np.array([slot]), self.view.device)
        stored = gather_entries(self.view, maps, slots, remaining.size)
        k = maps.score_keys(stored.rows, None)[0]
        v = maps.value_columns.spread(maps.value_columns.gather(stored.rows))[0]
        remaining.copy(self.view.layout.layer_groups[index], k, v)
        q = (self._queries(index, slot, computed) * maps.scale).to(k.dtype)
        outputs, lse = attend(q, k, v, valid, geometry.softcap)
        return _Goal(_widened(q, remaining.keys), _widened(outputs, remaining.values), lse)

    def _fit(self, remaining: _Remaining, groups: Ints, goal: _Goal) -> None:
        """Fit groups [H] to a goal each, in place."""
        softcap = self.view.layout.spec.geometry.softcap
        for chunk in _chunks(remaining.count[groups] * remaining.fitted[groups], goal.q.shape[1]):
            index, inside = remaining.index(groups[chunk])
            at = upload(chunk, index.device)
            q, outputs, lse = (x[at] for x in goal)
            k, v = remaining.keys[index], remaining.values[index]
            k, v = fit(q, k, v, inside, outputs, lse, softcap)
            remaining.keys[index] = k.to(self.view.dtype)
            remaining.values[index] = v.to(self.view.dtype)

    def _fitted(self, remaining: _Remaining, index: int, slot: int) -> Fitted:
        """Fitted entries as the layer stores them."""
        maps: LayerAttention = self.modules[index].description
        where = self.view.layout.layer_groups[index]
        entries, inside = remaining.index(np.arange(where.start, where.stop))
        sides = (maps.key_columns, remaining.keys), (maps.value_columns, remaining.values)
        rows = [
            columns.compact(x[entries, : columns.widest].transpose(0, 1)[None])[0].flatten(1)
            for columns, x in sides
        ]
        return Fitted(
            layer=index,
            entries=torch.cat(rows, 1),
            slots=torch.full((entries.shape[1],), slot, device=entries.device),
            places=remaining.place[entries.T],
            keep=inside.T,
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


def _chunks(counts: Ints, queries: int) -> Iterator[Ints]:
    """Indices of heads with so many entries (0: none to fit), in chunks of at most FITTED scores,
    padding included, or of one head."""
    order = counts.argsort(kind="stable")[::-1]
    order = order[counts[order] > 0]
    while len(order):
        heads = max(1, FITTED // int(counts[order[0]] * queries))
        yield order[:heads]
        order = order[heads:]


def _widened(x: Tensor, like: Tensor) -> Tensor:
    """x with as many columns as `like`, 0 beyond its own."""
    missing = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
