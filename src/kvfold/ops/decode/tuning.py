"""How the decode kernels are cut, from what was measured: tuning.json.

`python tools/tune_decode.py` writes that file anew on a GPU.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2
from pathlib import Path

from kvfold.ops.common.plan import padded_queries, power_of_two
from kvfold.ops.common.tuning import Tuning, load
from kvfold.ops.decode.groups import DecodeGroups

FILE = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Groups that a measurement holds for. bits and widths of keys and of values, widths rounded up
    to powers of two; page: rows; queries: of a KV head, rounded up to a power of two."""

    bits: tuple[int, int]
    widths: tuple[int, int]
    page: int
    queries: int

    def distance(self, other: "Shape") -> tuple[float, ...]:
        """Most decisive first: how codes become numbers, bytes of a row, the page."""
        mine = (self.row_bits, self.page, self.queries)
        others = (other.row_bits, other.page, other.queries)
        bits = sum(abs(log2(a / b)) for a, b in zip(self.bits, other.bits, strict=True))
        return (bits, *(abs(log2(a / b)) for a, b in zip(mine, others, strict=True)))

    @property
    def compiled(self) -> tuple[object, ...]:
        """All that registers depend on."""
        return self.bits, self.widths, self.page, padded_queries(self.queries)

    @property
    def row_bits(self) -> int:
        return sum(n * bits for n, bits in zip(self.widths, self.bits, strict=True))


def tuning_for(groups: DecodeGroups, queries: int) -> Tuning:
    """The cut for a layer's groups; queries: query heads of a KV head.

    A shape that was not measured takes the nearest one's, without its limit on registers, which
    might spill, and with no more slices than then run at once.
    """
    widths = power_of_two(groups.widths[0]), power_of_two(groups.widths[1])
    return _nearest(groups.bits, widths, groups.page, queries)


@lru_cache(maxsize=4096)
def _nearest(bits: tuple[int, int], widths: tuple[int, int], page: int, queries: int) -> Tuning:
    wanted = Shape(bits=bits, widths=widths, page=page, queries=power_of_two(queries))
    near = min(table(), key=wanted.distance)
    found = table()[near]
    if near.compiled == wanted.compiled:
        return found
    return replace(found, registers=None, slices=min(found.slices, Tuning.slices))


@lru_cache
def table() -> dict[Shape, Tuning]:
    """All that was measured."""
    return {
        Shape(
            bits=tuple(x["bits"]),
            widths=tuple(x["widths"]),
            page=x["page"],
            queries=x["queries"],
        ): tuning
        for x, tuning in load(FILE)
    }
