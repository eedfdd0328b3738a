"""What becomes of scores before the softmax, beside their scale. Shapes as in `decode`."""

from dataclasses import dataclass

from torch import Tensor

LIMITED = "scores are capped, or rows of a page hidden by a window"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """softcap: scaled scores become softcap * tanh(score / softcap) (None: they stay); window:
    tokens that a query sees, its own included (None: all); positions int [B]: of the queries."""

    softcap: float | None
    window: int | None
    positions: Tensor
