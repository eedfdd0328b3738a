"""Find the smallest cache within a loss budget, by bisection (ZACK §6.3)."""

import re
from collections.abc import Callable

from kvfold.utils.errors import SettingError

LOWEST = 0.02
_BUDGET = re.compile(r"\s*ppl\s*<=\s*([0-9]+\.?[0-9]*)\s*")


def parse_budget(text: str) -> float:
    """The perplexity ratio that `ppl<=RATIO` allows. Raises ValueError with the legal form."""
    match = _BUDGET.fullmatch(text)
    if match is None or float(match[1]) < 1:
        raise SettingError(
            f"`budget={text!r}` is not of the form 'ppl<=RATIO' with a ratio of at least 1 to the"
            " original's perplexity; for 1 % more write 'ppl<=1.01'"
        )
    return float(match[1])


def search(
    ratio_at: Callable[[float], float],
    limit: float,
    *,
    low: float = LOWEST,
    tolerance: float = 0.01,
) -> tuple[float, float]:
    """The smallest keep in [low, 1] with ratio_at(keep) <= limit, to within `tolerance`.

    Assumes that the ratio falls as keep grows. Returns (keep, its ratio); keep is 1.0 if nothing
    smaller is within the limit.
    """
    if not 0 < low < 1 or tolerance <= 0:
        raise ValueError(f"search: low={low} must be in (0, 1) and tolerance={tolerance} above 0")
    if (ratio := ratio_at(low)) <= limit:
        return low, ratio
    high, best = 1.0, None
    while high - low > tolerance:
        middle = (low + high) / 2
        ratio = ratio_at(middle)
        if ratio <= limit:
            high, best = middle, ratio
        else:
            low = middle
    return high, ratio_at(high) if best is None else best
