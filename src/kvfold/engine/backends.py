"""How a part of a step attends in a layer: what all ways have in common.

A step packs N tokens of several sequences into one row, decoding ones first.
Shapes: B sequences of a part, T queries of each, D model width; S slots, G groups of the layer, n
pages of the longest group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from kvfold.cache.eviction.attention import AttentionPolicy, observing
from kvfold.cache.eviction.base import Policy
from kvfold.cache.pool import Pool
from kvfold.models.adapter import HFAttention
from kvfold.ops.common.pages import LayerPages


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Tokens begin..begin + B * T of the packed row: T queries each of the sequences `slots` [B].

    positions int [B, T]; sizes: of every layer, rows of the longest group (nothing in a graph);
    rows: at least as many as any layer holds for these sequences, in all of its groups; stop: an
    upper bound of positions; prompt_lengths [B] where the attention of these queries is observed,
    else None; decode: T is 1, and no row of these sequences comes after their queries.
    """

    begin: int
    slots: Tensor
    positions: Tensor
    sizes: Sequence[int]
    rows: int
    stop: int
    prompt_lengths: Tensor | None = None
    decode: bool = False

    def of(self, packed: Tensor) -> Tensor:
        """This part of packed [1, H, N, n] as [B, H, T, n]."""
        rows = packed[0, :, self.begin : self.begin + self.positions.numel()]
        return rows.unflatten(1, self.positions.shape).transpose(0, 1)


@dataclass(frozen=True)
class AttentionContext:
    """What all steps of a runner share. policy: what is observed and evicted, or None; windows:
    sliding window of every layer, or None; spans: the groups that `ops.store` reads or moves at
    once, of a layer or of all."""

    pool: Pool
    policy: Policy | None
    windows: Sequence[int | None]
    spans: Sequence[slice]

    @cached_property
    def pages(self) -> tuple[LayerPages, ...]:
        """Of every layer: views, in which what the pool changes is seen."""
        return tuple(map(self.pool.pages, self.pool.layout.layer_groups))

    @property
    def attention_policy(self) -> AttentionPolicy | None:
        """The policy, if it looks at attention."""
        return observing(self.policy)

    @property
    def watches_decodes(self) -> bool:
        policy = self.attention_policy
        return policy is not None and policy.continual


class AttentionBackend(Protocol):
    """One way to attend, for one step."""

    def takes(self, module: HFAttention, part: AttentionMetadata) -> bool:
        """Whether it does what this part needs in this layer. Nothing is computed."""
        ...

    def attend(self, module: HFAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """Attention of q [B, Hq, T, .] to the part's rows, the step's own stored, through W_O:
        [B, T, D]. Adds to metrics what is observed, now or later."""
        ...
