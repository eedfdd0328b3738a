"""Limits of attention scores before the softmax: softcap and sliding window.

Shapes as in `ops.decode`.
"""

from dataclasses import dataclass

from torch import Tensor

LIMITED = "scores have a softcap, or a sliding window hides entries of a page"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Softcap and sliding window of a layer's scores.

    softcap: scaled scores become softcap * tanh(score / softcap); None: no softcap.
    window: tokens that a query sees, including its own; None: all.
    positions int [B]: position of each query.
    """

    softcap: float | None
    window: int | None
    positions: Tensor
