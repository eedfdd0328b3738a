"""Which page layouts the Triton kernels can read."""

from collections.abc import Iterable, Mapping

from kvfold.layout import Side
from kvfold.layout.pages import Group, Segment

BITS = (16, 8, 4)
SIDES = {"k": "keys", "v": "values", "kv": "keys and values"}


def unsupported_reason(
    op: str, groups: Iterable[Group], sides: Mapping[Side, Iterable[Segment | None]]
) -> str | None:
    """Why kernels of an operation do not read the pages of these groups; None where they do:
    formats that name it, of 16 bits, or codes of 8 or 4 bits with an fp16 scale a row, in whole
    16-bit words, of one width a side. sides: the segments of keys and of values."""
    for layout in {group.layout: None for group in groups}:
        coded = any(x.quantized for x in layout.segments)
        if layout.itemsize != 2 and not all(x.quantized for x in layout.segments):
            return f"numbers of {8 * layout.itemsize} bits: the kernels read 16, and codes"
        if coded and layout.scale != 2:
            return "fp8 scales: the kernels read fp16 ones"
        for x in layout.segments:
            side = SIDES[x.side]
            if x.per_channel:
                return f"{side} with a scale a channel: the kernels read a scale a row"
            if op not in x.format.kernels:
                return f"{side} in format {x.format.name}, which the kernels do not read"
            if x.bits not in BITS:
                return f"{side} in {x.bits} bits: the kernels read 16, 8 and 4"
            if x.width * x.bits % 16:
                return (
                    f"{side} of {x.width} numbers in {x.bits} bits: the kernels read whole 16-bit"
                    " words"
                )
    for side, segments in sides.items():
        if len(bits := {x.bits for x in segments if x}) > 1:
            listed = " and ".join(map(str, sorted(bits)))
            return f"{SIDES[side]} in {listed} bits: the kernels read one width of a layer"
    return None
