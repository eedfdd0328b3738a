"""The interface of an attention backend.

Shapes: B sequences of one attention call (a *part* of the step), T queries per sequence; Hq query
heads; s widest value rank; W input width of the output projection W_O.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.attention.base import LayerAttention, LayerShape
from kvfold.attention.metadata import AttentionMetadata, CacheView
from kvfold.attention.observer import Observer
from kvfold.layout.pages import Group

Weighed = tuple[Tensor, Tensor]  # attention output [B, Hq, T, s], log2-sum-exp2 fp32 [B, Hq, T]
RESIDUAL = "a residual keeps token entries in two places"


@dataclass(frozen=True, kw_only=True)
class Task:
    """The kind of queries for which a backend is chosen.

    decode: one query per sequence, which sees all of its token entries.
    observed: the attention of these queries is added to eviction metrics.
    dtype: of queries.
    needs_weights: the policy needs the attention weights themselves.
    """

    decode: bool
    observed: bool
    device_type: str
    dtype: torch.dtype
    needs_weights: bool = False


class AttentionBackend(ABC):
    """One implementation of attention over a cache. An instance serves one step and holds that
    step's plans.

    supports_graphs: a CUDA graph can capture it.
    returns_weights: it can return attention weights.
    """

    supports_graphs: ClassVar[bool] = False
    returns_weights: ClassVar[bool] = False

    def __init__(self, view: CacheView) -> None:
        self.view = view

    @classmethod
    @abstractmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        """Why this backend cannot serve a layer with these groups, as a phrase for users; None if
        it can."""

    @classmethod
    def needs_observer(cls, groups: Sequence[Group], device_type: str) -> bool:
        """Whether an `Observer` must buffer the decode queries of a layer with these groups and add
        their attention to the metrics later."""
        return False

    @classmethod
    def replays(cls, layer: LayerAttention) -> bool:
        """Whether all that `attend` launches for a layer is recorded (`ops.common.recording`), so
        that it can be repeated for other layers with the same shape and layout."""
        return False

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerAttention], observer: Observer | None
    ) -> "Callable[[CacheView], AttentionBackend]":
        """A function that creates the backend for a step. layers: those that this backend serves;
        observer: buffers decode queries. Reads no pages."""
        return cls

    @abstractmethod
    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """Attention of q [B, Hq, T, .] to the stored entries of the part's sequences, this
        step's included. Returns the input of W_O [B, T, W]. Also adds observed attention to the
        metrics, now or later.

        into [B, T, W]: memory that the result may be written to.
        """

    def weigh(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        """Decode attention of q [B, Hq, 1, .] to the stored entries, to be merged with attention to
        others: without sinks and eviction metrics. Values may be latents. Only some backends can
        (`attention.selector.WEIGHING`)."""
        raise NotImplementedError


def why_not_uniform(layer: LayerShape, groups: Sequence[Group]) -> str | None:
    """Why a backend that treats all pages of a layer alike cannot serve it; None if it can."""
    if layer.softcap is not None:
        return "scores are capped"
    if groups[0].layout.residual:
        return RESIDUAL
    if layer.window is not None:
        return f"a sliding window of {layer.window} tokens hides token entries of a page"
    return None
