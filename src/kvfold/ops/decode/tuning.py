"""Tuning of the kernel `triton`: the fastest measured tile sizes and warps, from tuning.json.

`python tools/tune_decode.py` measures them again on a GPU and rewrites that file.
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
    """The shape of groups that a measurement applies to.

    bits and widths: of keys and of values, widths rounded up to powers of two; page: entries per
        page; queries: query heads per KV head, rounded up to a power of two.
    """

    bits: tuple[int, int]
    widths: tuple[int, int]
    page: int
    queries: int

    def distance(self, other: "Shape") -> tuple[float, ...]:
        """How far another shape's measurement is from this one: by bit widths, then bytes of an
        entry, then page size, then queries."""
        sizes = (self.row_bits, self.page, self.queries)
        other_sizes = (other.row_bits, other.page, other.queries)
        bits = sum(abs(log2(a / b)) for a, b in zip(self.bits, other.bits, strict=True))
        return (bits, *(abs(log2(a / b)) for a, b in zip(sizes, other_sizes, strict=True)))

    @property
    def compiled(self) -> tuple[object, ...]:
        """All that the number of registers depends on."""
        return self.bits, self.widths, self.page, padded_queries(self.queries)

    @property
    def row_bits(self) -> int:
        """Bits of an entry."""
        return sum(n * bits for n, bits in zip(self.widths, self.bits, strict=True))


def tuning_for(groups: DecodeGroups, queries: int) -> Tuning:
    """Return the tuning for a layer's groups. queries: query heads per KV head.

    A shape that was not measured takes that of the nearest one, without its register limit, which
    might cause spills, and with no more splits than then run at the same time.
    """
    widths = power_of_two(groups.widths[0]), power_of_two(groups.widths[1])
    return _nearest(groups.bits, widths, groups.page, queries)


@lru_cache(maxsize=4096)
def _nearest(bits: tuple[int, int], widths: tuple[int, int], page: int, queries: int) -> Tuning:
    wanted = Shape(bits=bits, widths=widths, page=page, queries=power_of_two(queries))
    nearest = min(table(), key=wanted.distance)
    tuning = table()[nearest]
    if nearest.compiled == wanted.compiled:
        return tuning
    return replace(tuning, registers=None, slices=min(tuning.slices, Tuning.slices))


@lru_cache
def table() -> dict[Shape, Tuning]:
    """Return all measurements."""
    return {
        Shape(
            bits=tuple(x["bits"]),
            widths=tuple(x["widths"]),
            page=x["page"],
            queries=x["queries"],
        ): tuning
        for x, tuning in load(FILE)
    }
