"""Check that a GGUF file's tensors fill it as its table says, and that its metadata is plausible.

The format has no checksum, so changed numbers of a tensor go unnoticed. Everything else must be
checked, because transformers reads from wherever an offset points.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from numbers import Real
from typing import Any

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by type
_STRING, _ARRAY = 8, 9
_ALIGNMENT, _MOST_DIMS = 32, 4
_NEEDED = ("block_count", "embedding_length", "attention.head_count")
_ABOVE_0 = re.compile(r"(freq_base|epsilon)$")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_WHOLE = ("I8", "I16", "I32", "I64")  # types that hold no weights


@dataclass
class _Header:
    """Reads a file's bytes from `place` on. Raises ValueError at the end of the file."""

    data: mmap.mmap
    place: int = 0

    def take(self, count: int) -> bytes:
        return self.data[self.skip(count) : self.place]

    def skip(self, count: int) -> int:
        """Skip bytes; returns the previous place."""
        previous = self.place
        if count > len(self.data) - previous:
            raise ValueError("the file ends within its header")
        self.place += count
        return previous

    def number(self, kind: str = "Q") -> int:
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))
        return int(value)

    def text(self) -> str:
        return self.take(self.number()).decode()

    def skip_value(self, kind: int, nested: bool = False) -> None:
        if kind in _SCALARS:
            self.skip(_SCALARS[kind])
        elif kind == _STRING:
            self.skip(self.number())
        elif kind == _ARRAY and not nested:
            item, count = self.number("I"), self.number()
            if item in _SCALARS:
                self.skip(_SCALARS[item] * count)
                return
            for _ in range(count):
                self.skip_value(item, nested=True)
        else:
            raise ValueError(f"its metadata has a value of the unknown type {kind}")


def check_file(path: str, metadata: Mapping[str, Any]) -> None:
    """Raises ValueError for a file whose tensors do not fill its data section one after another, or
    whose `metadata`, as transformers reads it, fits no model with these tensors."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        header.skip(8)  # of magic and version, which transformers checks
        num_tensors, num_keys = header.number(), header.number()
        _check_keys(header, num_keys)
        names = _check_tensors(header, num_tensors, metadata.get("general.alignment", _ALIGNMENT))
    _check_names(names, metadata)
    _check_values(metadata)


def _check_keys(header: _Header, count: int) -> None:
    keys: set[str] = set()
    for _ in range(count):
        keys.add(header.text())
        header.skip_value(header.number("I"))
    if len(keys) != count:
        raise ValueError("its metadata has a key twice")


def _check_tensors(header: _Header, count: int, alignment: Any) -> set[str]:
    """Names of the tensors, after checking that they follow the header without gaps except for
    alignment."""
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment must be a whole number above 0; got {alignment!r}")
    entries: list[tuple[int, int, str]] = []
    for _ in range(count):
        name = header.text()
        size = _bytes_of(header, name)
        entries.append((header.number(), size, name))
    data_start = end = _aligned(header.place, alignment)
    for offset, size, name in sorted(entries):
        if data_start + offset != _aligned(end, alignment):
            raise ValueError(f"tensor {name} does not begin where the one before it ends")
        end = data_start + offset + size
    if len(header.data) not in (end, _aligned(end, alignment)):
        raise ValueError(f"its tensors end at byte {end}, and the file at {len(header.data)}")
    names = {name for _, _, name in entries}
    if len(names) != count:
        raise ValueError("it has a tensor twice")
    return names


def _bytes_of(header: _Header, name: str) -> int:
    """Bytes of a tensor, from its sizes and type, which are read next."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    num_dims = header.number("I")
    if not 1 <= num_dims <= _MOST_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    dims = [header.number() for _ in range(num_dims)]
    kind = GGMLQuantizationType(header.number("I"))
    block, size = GGML_QUANT_SIZES[kind]
    if kind.name in _WHOLE or not all(dims) or dims[0] % block:
        raise ValueError(f"tensor {name} cannot be {kind.name} of sizes {dims}")
    return prod(dims) // block * size


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


def _check_names(names: set[str], metadata: Mapping[str, Any]) -> None:
    """Raises ValueError for unknown tensors, and for layers without any."""
    from gguf.constants import TENSOR_NAMES

    known, blocks = set(TENSOR_NAMES.values()), set()
    for name in names:
        stem, _, kind = name.rpartition(".")
        if match := _BLOCK.fullmatch(stem):
            blocks.add(int(match[1]))
            stem = f"blk.{{bid}}.{match[2]}"
        if stem not in known or kind not in ("weight", "bias"):
            raise ValueError(f"it has an unknown tensor {name}")
    count = metadata.get(f"{metadata['general.architecture']}.block_count")
    if count != len(blocks) or blocks != set(range(len(blocks))):
        raise ValueError(f"block_count is {count}, and its tensors are of {len(blocks)} layers")


def _check_values(metadata: Mapping[str, Any]) -> None:
    from gguf.constants import Keys

    arch = metadata["general.architecture"]
    for name in _NEEDED:
        value = metadata.get(f"{arch}.{name}")
        items = value if isinstance(value, list | tuple) else [value]
        if not items or not all(isinstance(x, int) and x > 0 for x in items):
            raise ValueError(f"{name} must be a whole number above 0; got {value!r:.100}")
    ropes = {x.format(arch=arch) for x in vars(Keys.Rope).values() if isinstance(x, str)}
    for key, value in metadata.items():
        if not key.startswith(f"{arch}."):
            continue
        if key.startswith(f"{arch}.rope.") and key not in ropes:
            raise ValueError(f"its metadata has an unknown key {key}")
        number = isinstance(value, Real)
        if _ABOVE_0.search(key) and not (number and value > 0 and isfinite(value)):
            raise ValueError(f"{key} must be a number above 0; got {value!r:.100}")
        if number and not isfinite(value):
            raise ValueError(f"{key} must be a finite number; got {value}")
