"""A step's tokens as attention sees them: what attends together, and the pages it reads.

A step packs N tokens of several sequences into one row, decoding ones first. Shapes: B sequences of
a part, T queries of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvfold.cache.eviction.attention import AttentionPolicy, observing
from kvfold.cache.eviction.base import Policy
from kvfold.cache.pool import NarrowPool, Pool
from kvfold.ops import store
from kvfold.ops.common.launch import upload
from kvfold.ops.common.pages import LayerPages
from kvfold.spec.layout import CacheLayout


class CacheView(Protocol):
    """A cache as backends read it. dtype: of queries and rows; max_tokens: of a sequence;
    observing: the policy that looks at attention, or None."""

    @property
    def layout(self) -> CacheLayout: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def observing(self) -> AttentionPolicy | None: ...
    @property
    def pages(self) -> Mapping[int, LayerPages]:
        """By layer."""
        ...

    def lengths(self, slots: Tensor, groups: Tensor) -> Tensor:
        """Rows int32 [B, n] of sequences slots int64 [B], of the groups int64 [n] of the model."""
        ...


@dataclass(frozen=True)
class PoolView:
    """A pool as steps read and write it. policy: of what is observed and evicted, or None; dtype:
    of queries and rows."""

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
        """Of every layer: views, in which what the pool changes is seen."""
        return dict(enumerate(map(self.pool.pages, self.pool.layout.layer_groups)))

    def lengths(self, slots: Tensor, groups: Tensor) -> Tensor:
        """As of `CacheView`."""
        return self.pool.lengths[slots[:, None], groups]

    @cached_property
    def narrow(self) -> "PoolView | None":
        """Rows of unimportant tokens, where these are narrower."""
        pool = self.pool.narrow
        return None if pool is None else PoolView(pool, None, self.dtype)

    @cached_property
    def spans(self) -> Sequence[slice]:
        """The groups that `ops.store` reads or moves at once, of a layer or of all."""
        return store.spans(self.pool.layout, self.pool.device.type)

    @property
    def observing(self) -> AttentionPolicy | None:
        """The policy, if it looks at attention."""
        return observing(self.policy)

    @property
    def observes_decodes(self) -> bool:
        return self.observing is not None and self.observing.continual


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Tokens begin..begin + B * T of the packed row, or `tokens` int64 [B, T] of it, where a token
    may come more than once at the beginning of a sequence: T queries each of the sequences `slots`
    [B].

    positions int [B, T]; lengths [layers, B]: rows of every sequence's longest group, on the host
    (nothing in a graph); rows: at least as many as any layer holds for these sequences, in all of
    its groups; stop: an upper bound of positions; prompt_lengths [B] where the attention of these
    queries is observed, else None; decode: T is 1, and no row of these sequences comes after their
    queries; narrow: the same queries before narrow rows, where there are some.
    """

    begin: int
    slots: Tensor
    positions: Tensor
    lengths: npt.NDArray[np.int64]
    rows: int
    stop: int
    prompt_lengths: Tensor | None = None
    decode: bool = False
    tokens: Tensor | None = None
    narrow: "AttentionMetadata | None" = None

    @classmethod
    def of_step(
        cls,
        view: PoolView,
        slots: list[int],
        positions: Tensor,
        *,
        begin: int,
        stop: int,
        prompt_lengths: list[int] | None,
        decode: bool = False,
        tokens: Tensor | None = None,
    ) -> "AttentionMetadata":
        """Of sequences `slots`, whose lengths the host knows. positions [B * T]; prompt_lengths:
        where their queries are observed."""
        rows, device = view.pool.host_lengths[slots], view.pool.device
        less = None
        if view.narrow is not None:
            where: dict[str, Any] = {"begin": begin, "stop": stop, "decode": decode}
            less = cls.of_step(
                view.narrow, slots, positions, prompt_lengths=None, tokens=tokens, **where
            )
        firsts = [where.start for where in view.pool.layout.layer_groups]
        lengths = None if prompt_lengths is None else upload(np.array(prompt_lengths), device)
        return cls(
            begin=begin,
            slots=upload(np.array(slots), device),
            positions=positions.view(len(slots), -1),
            lengths=np.maximum.reduceat(rows, firsts, axis=1).T,
            rows=int(np.add.reduceat(rows.sum(0), firsts).max()),
            stop=stop,
            prompt_lengths=lengths,
            decode=decode,
            tokens=tokens,
            narrow=less,
        )

    @classmethod
    def of_decodes(cls, view: PoolView, slots: Tensor, positions: Tensor) -> "AttentionMetadata":
        """One token of every sequence, with nothing from the host: slots, positions int64 [B]."""
        return cls(
            begin=0,
            slots=slots,
            positions=positions[:, None],
            lengths=np.empty((0, 0), dtype=np.int64),
            rows=_most_rows(view, len(slots)),
            stop=0,
            # Generated tokens are observed wherever the prompt ended.
            prompt_lengths=torch.zeros_like(slots) if view.observes_decodes else None,
            decode=True,
            narrow=None if view.narrow is None else cls.of_decodes(view.narrow, slots, positions),
        )

    @property
    def packed(self) -> Tensor:
        """Where its B * T queries are in the packed row, int64."""
        if self.tokens is not None:
            return self.tokens.flatten()
        stop = self.begin + self.positions.numel()
        return torch.arange(self.begin, stop, device=self.positions.device)

    @cached_property
    def _sizes(self) -> list[int]:
        sizes: list[int] = self.lengths.max(1).tolist()
        return sizes

    def size(self, layer: int) -> int:
        """Rows of the longest group of a layer."""
        return self._sizes[layer]

    def of(self, packed: Tensor) -> Tensor:
        """This part of packed [1, H, N, n] as [B, H, T, n]."""
        if self.tokens is not None:
            return packed[0][:, self.tokens].transpose(0, 1)
        rows = packed[0].narrow(1, self.begin, self.positions.numel())
        heads, _, numbers = rows.shape
        return rows.view(heads, *self.positions.shape, numbers).transpose(0, 1)


def _most_rows(view: PoolView, batch: int) -> int:
    """Rows that `batch` sequences may have in a layer: all memory may be one group's where rows are
    dropped, else every group has as many."""
    pool, layout = view.pool, view.pool.layout
    most = max(len(pages.groups) for pages in view.pages.values())
    if layout.tracked or isinstance(pool, NarrowPool):
        held = pool.num_bytes // min(group.layout.page_bytes for group in layout.groups)
    else:
        held = pool.num_bytes // layout.page_bytes * most
    return min(held * layout.page, batch * pool.max_tokens * most)
