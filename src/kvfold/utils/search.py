"""Find the smallest cache within a loss budget, by bisection (ZACK §6.3)."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvfold.utils.errors import SettingError

LOWEST = 0.02
_NUMBER = r"([0-9]*\.?[0-9]+|[0-9]+\.)"
_PERPLEXITY = re.compile(rf"\s*ppl\s*<=\s*{_NUMBER}\s*")
_ACCURACY = re.compile(rf"\s*accuracy\s*>=\s*{_NUMBER}\s*")
_PERPLEXITY_FORM = (
    "'ppl<=RATIO' with a ratio of at least 1 to the original's perplexity; for 1 % more write"
    " 'ppl<=1.01'"
)
_ACCURACY_FORM = (
    "'accuracy>=SHARE' with a share below 1 of the original's accuracy; for 1 % less write"
    " 'accuracy>=0.99'"
)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much a search may lose: perplexity up to `limit` times the original's, or accuracy down
    to a share `limit` of the original's."""

    metric: Literal["ppl", "accuracy"]
    limit: float


def parse_budget(text: str) -> Budget:
    """The budget that `ppl<=RATIO` or `accuracy>=SHARE` names. Raises SettingError with the legal
    forms."""
    if (match := _PERPLEXITY.fullmatch(text)) and float(match[1]) >= 1:
        return Budget(metric="ppl", limit=float(match[1]))
    if (match := _ACCURACY.fullmatch(text)) and 0 < float(match[1]) < 1:
        return Budget(metric="accuracy", limit=float(match[1]))
    if text.strip().startswith("accuracy"):
        raise SettingError(f"`budget={text!r}` is not of the form {_ACCURACY_FORM}")
    raise SettingError(
        f"`budget={text!r}` is not of the form {_PERPLEXITY_FORM}. For the accuracy of a task write"
        f" {_ACCURACY_FORM}"
    )


def parse_ratio(text: str) -> float:
    """The perplexity ratio that `ppl<=RATIO` allows. Raises SettingError with the legal form."""
    match = _PERPLEXITY.fullmatch(text)
    if match is None or float(match[1]) < 1:
        raise SettingError(f"`budget={text!r}` is not of the form {_PERPLEXITY_FORM}")
    return float(match[1])


def search(
    loss_at: Callable[[float], float],
    limit: float,
    *,
    low: float = LOWEST,
    tolerance: float = 0.01,
) -> tuple[float, float]:
    """The smallest keep in [low, 1] with loss_at(keep) <= limit, to within `tolerance`.

    Assumes that the loss falls as keep grows: larger keeps that were tried are within the limit
    too. Returns (keep, its loss); keep is 1.0 if nothing smaller is within the limit.
    """
    if not 0 < low < 1 or tolerance <= 0:
        raise ValueError(f"search: low={low} must be in (0, 1) and tolerance={tolerance} above 0")
    if (loss := loss_at(low)) <= limit:
        return low, loss
    high, best = 1.0, None
    while high - low > tolerance:
        middle = (low + high) / 2
        loss = loss_at(middle)
        if loss <= limit:
            high, best = middle, loss
        else:
            low = middle
    return high, loss_at(high) if best is None else best
