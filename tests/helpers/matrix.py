"""Cases of which `make test` runs some, and `make test-all` every one."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """A case for `make test-all` alone."""
    return pytest.param(*case, marks=pytest.mark.slow)


def matrix(*axes: Sequence[Any], diagonals: int = 1) -> list[Any]:
    """Every combination of values; all are slow but so many diagonals, each of which has every
    value of every axis at least once."""
    sizes = [len(axis) for axis in axes]
    fast = {
        tuple((k + d * i) % size for i, size in enumerate(sizes))
        for d in range(diagonals)
        for k in range(max(sizes))
    }
    return [
        (pytest.param if places in fast else slow)(
            *(axis[i] for axis, i in zip(axes, places, strict=True))
        )
        for places in product(*map(range, sizes))
    ]
