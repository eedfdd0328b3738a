"""Fit the entries that remain after an eviction, so that attention gives similar outputs to queries
that are likely to come.

Later queries are unknown. So hidden states of some prompt tokens are kept, and their queries are
computed again as if the tokens followed the prompt.

Shapes: n prompt tokens with kept hidden states, D model width, Hk KV heads, m queries per KV head,
T entries, N remaining entries of all heads, S most remaining entries of a head, G groups (of one KV
head each) of all layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
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
WRITTEN = 2**17  # most entries that are written at once


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
    """What heads [H] are fitted to: queries [H, m, dk], outputs [H, m, dv] of their attention to
    all entries, and log-sum-exps [H, m, 1]."""

    q: Tensor
    outputs: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Remaining:
    """The remaining entries of a sequence in groups that lose some, group after group.

    slot: of the sequence.
    size: T.
    group: int64 [N], the group of each.
    place: int64 [N + 1], index of each among the stored entries of its group.
    keys, values: [N + 1, .], with columns for the widest layer. The last entry is padding.
    begin: int64 [G + 1], first entry of each group, and N.
    """

    slot: int
    size: int
    group: Tensor
    place: Tensor
    keys: Tensor
    values: Tensor
    begin: Ints

    @classmethod
    def of(
        cls,
        slot: int,
        valid: Tensor,
        evicted: Tensor,
        widths: tuple[int, int],
        dtype: torch.dtype,
    ) -> "Remaining":
        """With keys and values of so many columns, which are 0. valid: bool [G, T], which of the T
        entries exist; evicted: bool [G, T]. Waits for the device."""
        stays = valid & ~evicted & (valid & evicted).any(1, keepdim=True)
        group, place = stays.nonzero(as_tuple=True)
        place = F.pad(place, (0, 1))
        keys, values = (
            torch.zeros(len(place), n, dtype=dtype, device=place.device) for n in widths
        )
        begin = F.pad(stays.sum(1).cumsum(0), (1, 0)).cpu().numpy()
        return cls(slot, valid.shape[1], group, place, keys, values, begin)

    def count(self, groups: Ints) -> Ints:
        """Numbers of entries of groups [n]; 0: a group that loses all or nothing."""
        return self.begin[groups + 1] - self.begin[groups]

    def entries(self, groups: slice) -> slice:
        """The entries of consecutive groups."""
        return slice(self.begin[groups.start], self.begin[groups.stop])

    def copy(self, groups: slice, k: Tensor, v: Tensor) -> None:
        """Copy entries of some groups from all that they store: k, v [g, T, .]."""
        entries = self.entries(groups)
        at = self.group[entries] - groups.start, self.place[entries]
        self.keys[entries, : k.shape[-1]] = k[at]
        self.values[entries, : v.shape[-1]] = v[at]

    def index(self, groups: Ints) -> tuple[Tensor, Tensor]:
        """Entries of groups [n]: int64 [n, S], filled up with padding, and bool [n, S], False for
        padding."""
        bounds = upload(np.stack((self.begin[groups], self.begin[groups + 1])), self.place.device)
        first, stop = bounds[..., None]
        most = int(self.count(groups).max())
        index = first + torch.arange(most, device=self.place.device)
        inside = index < stop
        return index.where(inside, len(self.group)), inside

    def write(self, view: PoolView) -> None:
        """Overwrite the stored entries."""
        for where in view.spans:
            entries = self.entries(where)
            for first in range(entries.start, entries.stop, WRITTEN):
                part = slice(first, min(first + WRITTEN, entries.stop))
                group = self.group[part] - where.start
                rewrite(
                    view.pool.pages(where),
                    {"k": self.keys[part], "v": self.values[part]},
                    torch.full_like(group, self.slot),
                    group,
                    self.place[part],
                )


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

    def fit(self, slot: int, computed: int, evicted: Tensor) -> Remaining:
        """Fit the remaining entries of a sequence, in heads that lose some; nothing is written yet.
        computed: number of computed tokens; evicted: bool [G, T]. Waits for the device twice.

        Heads of all layers that keep similar numbers of entries are fitted together: they need
        little padding, and solving for many takes as long as for few.
        """
        pool, size = self.view.pool, evicted.shape[1]
        valid = torch.arange(size, device=evicted.device) < pool.lengths[slot][:, None]
        maps = [x.description for x in self.modules]
        widths = (
            max(x.key_columns.widest for x in maps),
            max(x.value_columns.widest for x in maps),
        )
        remaining = Remaining.of(slot, valid, evicted, widths, self.view.dtype)
        is_full = pool.host_lengths[slot] == size
        groups, goals = list[Ints](), list[_Goal]()
        for index, where in enumerate(self.view.layout.layer_groups):
            of_layer = np.arange(where.start, where.stop)
            if remaining.count(of_layer).any():
                exist = None if is_full[where].all() else valid[where]
                groups.append(of_layer)
                goals.append(self._read(remaining, index, computed, exist))
        if goals:
            all_goals = _Goal(*map(torch.cat, zip(*goals, strict=True)))
            self._fit(remaining, np.concatenate(groups), all_goals)
        return remaining

    def _read(self, remaining: Remaining, index: int, computed: int, valid: Tensor | None) -> _Goal:
        """Copy what remains of a layer; returns what to fit it to. valid: bool [Hk, T], entries
        that exist (None: all)."""
        maps: LayerAttention = self.modules[index].description
        slots = upload(np.array([remaining.slot]), self.view.device)
        stored = gather_entries(self.view, maps, slots, remaining.size)
        k = maps.score_keys(stored.rows, None)[0]
        v = maps.value_columns.spread(maps.value_columns.gather(stored.rows))[0]
        remaining.copy(self.view.layout.layer_groups[index], k, v)
        q = self._queries(index, remaining.slot, computed) * maps.scale
        outputs, lse = attend(q, k, v, valid, self.view.layout.spec.geometry.softcap)
        return _Goal(_widened(q, remaining.keys), _widened(outputs, remaining.values), lse)

    def _fit(self, remaining: Remaining, groups: Ints, goal: _Goal) -> None:
        """Fit groups [H] to a goal each, in place."""
        softcap = self.view.layout.spec.geometry.softcap
        for chunk in _chunks(remaining.count(groups), goal.q.shape[1]):
            index, inside = remaining.index(groups[chunk])
            at = upload(chunk, index.device)
            q, outputs, lse = (x[at] for x in goal)
            k, v = remaining.keys[index], remaining.values[index]
            k, v = fit(q, k, v, inside, outputs, lse, softcap)
            remaining.keys[index] = k.to(self.view.dtype)
            remaining.values[index] = v.to(self.view.dtype)

    def _queries(self, layer: int, slot: int, computed: int) -> Tensor:
        """Likely later queries [Hk, m, .] of a layer."""
        module, prompt = self.modules[layer], self.prompts[slot]
        x = prompt.states[layer][None, : prompt.before(computed)]
        tables = None
        if module.rotary is not None:
            at = computed + torch.arange(x.shape[1], device=x.device) % AFTER
            tables = module.rotary.tables(x, at[None], computed + AFTER)
        q: Tensor = module.queries(x, tables)[0]
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
