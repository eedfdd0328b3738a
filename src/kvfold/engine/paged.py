"""One step's attention over the pool: what a model is given in place of a cache.

A step packs N tokens of several sequences into one row, decoding ones first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Policy
from kvfold.cache.pool import Pool
from kvfold.engine.backends import AttentionBackend, AttentionContext, AttentionMetadata
from kvfold.engine.device import DirectDecode, RebuiltDecode, bunches, direct_layers, rebuilder_of
from kvfold.engine.flat import FlatDecode, flat_layers
from kvfold.engine.gathered import Gathered
from kvfold.engine.observer import Observer
from kvfold.engine.queries import RecentQueries
from kvfold.models.adapter import HFAttention, PagedRows
from kvfold.models.families import attention_windows, family_of
from kvfold.ops import store
from kvfold.ops.common.attention import Tables
from kvfold.ops.observe import why_not as why_not_observed


class Attention:
    """How the layers of a model attend over a pool, chosen once. policy: what is observed.

    ways: makers of the ways to attend, in the order in which a step asks them. observer: keeps
    decoding queries until their attention is added to metrics; recent: keeps the last queries for
    the policy; None where nothing is kept.
    captures: whether a decode step needs nothing from the host, so that a graph can hold it.
    """

    def __init__(self, model: Any, pool: Pool, policy: Policy | None) -> None:
        modules: list[Any] = list(family_of(model.config).attentions(model))
        spans = store.spans(pool.layout, pool.device.type)
        setup = AttentionContext(pool, policy, attention_windows(model.config), spans)
        direct, rebuilder = direct_layers(setup), rebuilder_of(setup, modules)
        decoded = {*direct, *(rebuilder.maps if rebuilder else ())}
        self.setup, self.modules, self.observer, self.recent = setup, modules, None, None
        if (watching := setup.attention_policy) is not None and watching.continual:
            groups, device = [x.groups for x in setup.pages], pool.device.type
            decoded = {i for i in direct if not why_not_observed(groups[i], device)}
            seen = {i: modules[i] for i in decoded}
            self.observer = Observer(setup, watching, seen) if seen else None
        if policy is not None and "queries" in policy.needs:
            assert policy.window is not None
            self.recent = RecentQueries(policy.window, pool, dict(enumerate(modules)))
        self.captures = pool.device.type == "cuda" and len(decoded) == len(modules)
        self.ways: list[Callable[[], AttentionBackend]] = [
            partial(DirectDecode, setup, bunches(setup, direct), self.observer),
            *([partial(RebuiltDecode, setup, rebuilder)] if rebuilder else []),
            partial(FlatDecode, setup, flat_layers(setup)),
            partial(Gathered, setup),
        ]


class PagedStep(PagedRows):
    """All layers' attention in one step.

    slots, index [N]: each token's sequence, and its row counted from the end of the groups' rows
    (negative); positions int32 [N]; fill: which tails the tokens fill, where there are any.
    """

    is_compileable = False

    def __init__(
        self,
        attention: Attention,
        parts: Sequence[AttentionMetadata],
        slots: Tensor,
        index: Tensor,
        positions: Tensor,
        fill: store.Fill | None = None,
    ) -> None:
        self.setup, self.parts, self.fill = attention.setup, parts, fill
        self.slots, self.positions = slots, positions
        self.index = self.setup.pool.lengths[slots] + index[:, None]  # int64 [N, all groups]
        self.ways = [make() for make in attention.ways]
        self.recent = attention.recent
        self.kept = self.recent.begin(parts) if self.recent is not None else ()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask before they make positions and masks, which come from the runner here."""
        return 0

    def attend(self, module: HFAttention, x: Tensor, tables: Tables | None) -> Tensor:
        q, rows = module.project(x, tables)
        self._store(module.layer_idx, rows[0])
        if self.recent is not None:
            self.recent.keep(module.layer_idx, self.kept, q)
        outputs = [self._way(module, x).attend(module, x, x.of(q)) for x in self.parts]
        flat = [out.flatten(0, 1) for out in outputs]
        return (torch.cat(flat) if len(flat) > 1 else flat[0])[None]

    def _store(self, layer: int, rows: Tensor) -> None:
        """rows [N, R] of the step's tokens into their pages."""
        index = self.index[:, self.setup.pool.layout.layer_groups[layer]]
        place = self.slots, index, self.positions, self.fill
        store.append(self.setup.pages[layer], rows, *place)

    def _way(self, module: HFAttention, part: AttentionMetadata) -> AttentionBackend:
        """The last one takes everything."""
        return next(way for way in self.ways if way.takes(module, part))
