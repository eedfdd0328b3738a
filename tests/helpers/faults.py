"""Faults of files, for tests of what reads them: cuts, flipped bits, wrong sizes, types and links.

A reader is a function of a path that returns what it read, in a form that `==` compares. It must
raise ValueError with one line, or return what it returns for the whole file: anything else is a
file that was read wrongly, or a traceback.
"""

import json
import os
import random
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Fault = tuple[str, bytes]  # what was done, and what the file holds then
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    10**9,
    2**63,
    10**400,
    float("nan"),
    "",
    "a\x00b",
    [],
    [[]],
    {},
)
SIZES = (0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


def cuts(content: bytes, rng: random.Random, count: int) -> Iterator[Fault]:
    """The file cut short, at its first bytes, at its last and in between."""
    ends = [0, 1, 7, 8, 9, len(content) - 1]
    ends += [rng.randrange(len(content)) for _ in range(count)]
    for end in ends[: count + 6]:
        yield f"cut at {end}", content[:end]
    yield "longer", content + b"\0" * 64


def flips(
    content: bytes, rng: random.Random, count: int, stop: int | None = None, start: int = 0
) -> Iterator[Fault]:
    """One flipped bit, from byte `start` up to `stop`."""
    for _ in range(count):
        place, bit = rng.randrange(start, stop or len(content)), rng.randrange(8)
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        yield f"bit {bit} of byte {place}", bytes(changed)


def sizes(
    content: bytes, rng: random.Random, count: int, stop: int | None = None, start: int = 0
) -> Iterator[Fault]:
    """Eight bytes that a reader may take for a size or an offset, in the same bounds."""
    for _ in range(count):
        place, size = rng.randrange(start, (stop or len(content)) - 8), rng.choice(SIZES)
        yield f"{size} at {place}", content[:place] + struct.pack("<Q", size) + content[place + 8 :]


def values(found: Any, rng: random.Random, count: int) -> Iterator[tuple[str, Any]]:
    """JSON with one value of another kind, or without it."""
    places = list(_places(found))
    for _ in range(count):
        *above, last = rng.choice(places)
        changed = json.loads(json.dumps(found))
        holder = changed
        for key in above:
            holder = holder[key]
        if rng.random() < 0.15:
            del holder[last]
            yield f"without {[*above, last]}", changed
            continue
        holder[last] = rng.choice(VALUES)
        yield f"{str(holder[last])[:20]} at {[*above, last]}", changed


def _places(found: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = found.items() if isinstance(found, dict) else enumerate(found)
    for key, value in items:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*above, key))


def safetensors(content: bytes) -> tuple[Any, int]:
    """The header of a safetensors file, and where its data begins."""
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), 8 + size


def with_header(content: bytes, header: Any) -> bytes:
    """A safetensors file with another header."""
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + content[safetensors(content)[1] :]


@dataclass
class Findings:
    """What became of faults: refused, read as before, read wrongly, or another error."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def check(self, read: Callable[[], Any], whole: Any, said: str) -> None:
        kind = said.split()[0]
        try:
            found = read()
        except (ValueError, OSError) as error:
            text = str(error)
            self.counts["refused"] += 1
            if not text or len(text) > 3000 or re.search(r"Traceback|\n.*\n.*\n", text):
                self.wrong.append(f"{said}: not one line: {text[:300]!r}")
        except Exception as error:
            self.wrong.append(f"{said}: {type(error).__name__}: {str(error)[:200]}")
        else:
            self.counts["read as before"] += 1
            if found != whole:
                self.wrong.append(f"{said}: read wrongly")
        self.counts[kind] += 1


def places_that_are_no_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Links and things that have a file's name."""
    for name in ("loop", "nowhere", "folder", "pipe", "closed"):
        path = folder / f"{name}.x"
        if name == "loop":
            path.symlink_to(path)
        elif name == "nowhere":
            path.symlink_to(folder / "gone")
        elif name == "folder":
            path.mkdir()
        elif name == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(b"")
        yield name, path


class Peak:
    """Most memory that this process held inside the block, beyond what it held before, in bytes."""

    def __enter__(self) -> "Peak":
        Path("/proc/self/clear_refs").write_text("5")
        self._before, self.bytes = _status("VmRSS"), 0
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", text)[1])  # type: ignore[index]
