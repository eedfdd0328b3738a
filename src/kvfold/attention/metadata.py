"""Attention metadata of a step: which tokens attend in one call, and the pages that they read.

A step packs N tokens of several sequences into one row, decoding sequences first. A *part* is the
set of tokens of one attention call. Shapes: B sequences of a part, T queries per sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.attention import Observation, as_observation
from kvfold.cache.pool import CoarsePool, Pool
from kvfold.layout.pages import CacheLayout
from kvfold.ops import store
from kvfold.ops.common.launch import upload
from kvfold.ops.common.pages import LayerPages


class CacheView(Protocol):
    """A cache as attention backends read it.

    dtype: of queries and rows.
    max_tokens: of a sequence.
    observing: the attention that the policy observes, or None.
    """

    @property
    def layout(self) -> CacheLayout: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def observing(self) -> Observation | None: ...
    @property
    def pages(self) -> Mapping[int, LayerPages]:
        """Pages by layer."""
        ...

    def lengths(self, slots: Tensor, groups: Tensor) -> Tensor:
        """Rows int32 [B, n] of sequences slots int64 [B] in the groups int64 [n], which are counted
        over the whole model."""
        ...


@dataclass(frozen=True)
class PoolView:
    """A page pool as steps read and write it. policy: the eviction policy, or None; dtype: of
    queries and rows."""

    pool: Pool
    policy: Policy | None
    dtype: torch.dtype

    @property
    def layout(self) -> CacheLayout:
        return self.pool.layout

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def max_tokens(self) -> int:
        return self.pool.max_tokens

    @cached_property
    def pages(self) -> Mapping[int, LayerPages]:
        """Pages by layer: views, which follow later changes of the pool."""
        return dict(enumerate(map(self.pool.pages, self.pool.layout.layer_groups)))

    def lengths(self, slots: Tensor, groups: Tensor) -> Tensor:
        """As in `CacheView`."""
        return self.pool.lengths[slots[:, None], groups]

    @cached_property
    def coarse(self) -> "PoolView | None":
        """View of the rows of the coarse pool; None if all tokens store the same."""
        pool = self.pool.coarse
        return None if pool is None else PoolView(pool, None, self.dtype)

    def reads_coarse(self, slots: Sequence[int] | None = None) -> bool:
        """Whether attention of the sequences `slots` (None: any) reads rows of the coarse pool.
        Always with two ranks; with fewer bits only once rows of theirs were demoted."""
        pool = self.pool.coarse
        if pool is None or self.layout.spec.hybrid is not None:
            return pool is not None
        return slots is not None and bool(pool.host_lengths[slots].any())

    @cached_property
    def spans(self) -> Sequence[slice]:
        """The groups that `ops.store` reads or moves in one call: those of a layer, or of all
        layers."""
        return store.spans(self.pool.layout, self.pool.device.type)

    @property
    def observing(self) -> Observation | None:
        """The policy if it needs attention, else None."""
        return as_observation(self.policy)

    @property
    def observes_decodes(self) -> bool:
        return self.observing is not None and self.observing.scorer.continual

    @property
    def needs_weights(self) -> bool:
        """Whether the policy needs the attention weights of observed queries."""
        return self.observing is not None and self.observing.scorer.needs_weights


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The tokens of one attention call: T queries of each of the sequences `slots` [B].

    They are tokens first_token .. first_token + B * T of the packed row, or the tokens `tokens`
    int64 [B, T] of it; there, the first token of a sequence may be repeated as padding.

    positions: int [B, T].
    lengths: [layers, B], rows of each sequence's longest group, on the host (empty in a CUDA
        graph).
    rows: upper bound of the rows that these sequences have in all groups of a layer.
    stop: upper bound of positions.
    prompt_lengths: [B] if the attention of these queries is observed, else None.
    decode: T is 1, and a query sees all rows of its sequence.
    coarse: metadata of the same queries for the rows of the coarse pool; None: none are read.
    """

    first_token: int
    slots: Tensor
    positions: Tensor
    lengths: npt.NDArray[np.int64]
    rows: int
    stop: int
    prompt_lengths: Tensor | None = None
    decode: bool = False
    tokens: Tensor | None = None
    coarse: "AttentionMetadata | None" = None

    @classmethod
    def for_step(
        cls,
        view: PoolView,
        slots: list[int],
        positions: Tensor,
        *,
        first_token: int,
        stop: int,
        prompt_lengths: list[int] | None,
        decode: bool = False,
        tokens: Tensor | None = None,
    ) -> "AttentionMetadata":
        """Metadata for sequences `slots`, from the lengths on the host. positions [B * T];
        prompt_lengths: if their queries are observed."""
        rows, device = view.pool.host_lengths[slots], view.pool.device
        coarse = None
        if view.coarse is not None and view.reads_coarse(slots):
            settings: dict[str, Any] = {
                "first_token": first_token,
                "stop": stop,
                "decode": decode,
            }
            coarse = cls.for_step(
                view.coarse, slots, positions, prompt_lengths=None, tokens=tokens, **settings
            )
        firsts = [groups.start for groups in view.pool.layout.layer_groups]
        lengths = None if prompt_lengths is None else upload(np.array(prompt_lengths), device)
        return cls(
            first_token=first_token,
            slots=upload(np.array(slots), device),
            positions=positions.view(len(slots), -1),
            lengths=np.maximum.reduceat(rows, firsts, axis=1).T,
            rows=int(np.add.reduceat(rows.sum(0), firsts).max()),
            stop=stop,
            prompt_lengths=lengths,
            decode=decode,
            tokens=tokens,
            coarse=coarse,
        )

    @classmethod
    def for_decodes(
        cls, view: PoolView, slots: Tensor, positions: Tensor, demoted: bool = False
    ) -> "AttentionMetadata":
        """Metadata for one token per sequence without any host data: slots, positions int64 [B].
        demoted: sequences may have rows that were demoted to fewer bits."""
        return cls(
            first_token=0,
            slots=slots,
            positions=positions[:, None],
            lengths=np.empty((0, 0), dtype=np.int64),
            rows=_most_rows(view, len(slots)),
            stop=0,
            # A prompt length of 0: generated tokens are observed, whatever the prompt's length.
            prompt_lengths=torch.zeros_like(slots) if view.observes_decodes else None,
            decode=True,
            coarse=cls.for_decodes(view.coarse, slots, positions)
            if view.coarse is not None and (demoted or view.reads_coarse())
            else None,
        )

    @property
    def packed(self) -> Tensor:
        """Indices of the B * T queries in the packed row, int64."""
        if self.tokens is not None:
            return self.tokens.flatten()
        stop = self.first_token + self.positions.numel()
        return torch.arange(self.first_token, stop, device=self.positions.device)

    @cached_property
    def _sizes(self) -> list[int]:
        sizes: list[int] = self.lengths.max(1).tolist()
        return sizes

    def size(self, layer: int) -> int:
        """Rows of the longest group of a layer."""
        return self._sizes[layer]

    def slice_of(self, packed: Tensor) -> Tensor:
        """Slice this part out of packed [1, H, N, n]: [B, H, T, n]."""
        if self.tokens is not None:
            return packed[0][:, self.tokens].transpose(0, 1)
        rows = packed[0].narrow(1, self.first_token, self.positions.numel())
        heads, _, numbers = rows.shape
        return rows.view(heads, *self.positions.shape, numbers).transpose(0, 1)


def _most_rows(view: PoolView, batch: int) -> int:
    """Upper bound of the rows of `batch` sequences in a layer. With eviction all memory may belong
    to one group, otherwise all groups have equally many rows."""
    pool, layout = view.pool, view.pool.layout
    num_groups = max(len(pages.groups) for pages in view.pages.values())
    if layout.tracked or isinstance(pool, CoarsePool):
        num_pages = pool.num_bytes // min(group.layout.page_bytes for group in layout.groups)
    else:
        num_pages = pool.num_bytes // layout.page_bytes * num_groups
    return min(num_pages * layout.page, batch * pool.max_tokens * num_groups)
