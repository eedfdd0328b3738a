"""Backends over a cache: what each must say and do.

Shapes: B sequences of a part, T queries of each; Hq query heads; W numbers that W_O takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.attention.base import LayerMaps, LayerShape
from kvfold.attention.metadata import AttentionMetadata, CacheView
from kvfold.attention.observer import Observer
from kvfold.spec.layout import Group

RESIDUAL = "a residual keeps rows in two places"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of queries that a backend is chosen for. decode: one a sequence, which sees all of its
    rows; observed: what they attend to is added to metrics; dtype: of queries; reweighed: by a
    policy that needs their weights as they are."""

    decode: bool
    observed: bool
    device_type: str
    dtype: torch.dtype
    reweighed: bool = False


class AttentionBackend(ABC):
    """One way to attend over a cache, made anew for every step, in which what it plans is kept.

    captures: whether a CUDA graph can hold it; weighs: whether it has the weights of whole rows.
    """

    captures: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    def __init__(self, view: CacheView) -> None:
        self.view = view

    @classmethod
    @abstractmethod
    def supports(cls, layer: LayerShape, groups: Sequence[Group], task: Task) -> str | None:
        """Why it cannot serve a layer, whose groups these are: a phrase for users. None: it can."""

    @classmethod
    def keeps(cls, groups: Sequence[Group], device_type: str) -> bool:
        """Whether it leaves what decoded queries add to metrics to an `Observer`, which keeps them,
        in a layer whose groups these are."""
        return False

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerMaps], observer: Observer | None
    ) -> "Callable[[CacheView], AttentionBackend]":
        """A maker of one a step, for the layers that it decodes, of which it reads no pages yet.
        observer: of kept queries."""
        return cls

    @abstractmethod
    def attend(
        self, layer: LayerMaps, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """Attention of q [B, Hq, T, .] to the part's rows, the step's own stored: what W_O takes
        [B, T, W]. Adds to metrics what is observed, now or later. into [B, T, W]: memory that the
        result may be written to."""


def reads_unevenly(layer: LayerShape, groups: Sequence[Group]) -> str | None:
    """Why what reads all of a layer's pages in one way does not serve it."""
    if layer.softcap is not None:
        return "scores are capped"
    if groups[0].layout.residual:
        return RESIDUAL
    if layer.window is not None:
        return f"a sliding window of {layer.window} tokens hides rows of a page"
    return None
