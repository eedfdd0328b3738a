"""Read text files and JSON objects: checked, bounded in size, and as documents."""

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import resources
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

SEPARATOR = "<|endoftext|>"
MOST_TEXT = 2**30  # bytes of a decompressed text file
MOST_JSON = 2**26  # bytes of a JSON text; parsed it takes up to about 20x as much memory
_CHUNK = 2**20
_OPEN: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
_NOT_JSON = {  # error of the JSON parser -> what is wrong with the text
    json.JSONDecodeError: "not a JSON object",
    RecursionError: "nested too deeply",
    UnicodeDecodeError: "not utf-8 text",
    UnicodeEncodeError: "holds half a character, a surrogate without the other",
    ValueError: "holds a number of thousands of digits",
}


def packaged(name: str) -> str:
    """A text that ships with kvfold, such as `calibration.txt`."""
    return resources.files("kvfold.data").joinpath(name).read_text(encoding="utf-8")


def read_text(path: str | Path) -> str:
    """Read a utf-8 file, decompressed if its name ends in .xz or .gz, with Unix line ends.

    Raises ValueError for a file that is missing, damaged, not utf-8 text, blank, or larger than
    MOST_TEXT; no more than that is decompressed.
    """
    path = Path(path)
    if not path.is_file():
        wrong = "not a regular file" if path.exists() else "no such file"
        raise ValueError(f"file {path}: {wrong}; give a text file, plain, .xz or .gz")
    try:
        text = _content(path).decode("utf-8-sig")
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"file {path}: cannot be read ({error})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"file {path}: not utf-8 text at byte {error.start}") from None
    if "\0" in text:
        raise ValueError(f"file {path}: not text (it contains zero bytes)")
    if not text.strip():
        raise ValueError(f"file {path}: empty")
    return text.replace("\r\n", "\n")


def _content(path: Path) -> bytes:
    """The decompressed bytes of a file. Raises ValueError for more than MOST_TEXT."""
    with _OPEN.get(path.suffix, open)(path, "rb") as file:
        chunks = iter(partial(file.read, _CHUNK), b"")
        content = b"".join(islice(chunks, MOST_TEXT // _CHUNK + 1))
    if len(content) > MOST_TEXT:
        raise ValueError(f"file {path}: more than {MOST_TEXT} bytes of text; split it")
    return content


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers from 1. Yields them one at a
    time, since lists of many short lines take much memory. Raises as `read_text`."""
    lines = StringIO(read_text(path), newline="\n")
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object from text, or from utf-8 bytes. Raises ValueError that says what is
    wrong."""
    if len(text) > MOST_JSON:
        raise ValueError(f"larger than {MOST_JSON} bytes")
    try:
        value = json.loads(text if isinstance(text, str) else text.decode())
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(_NOT_JSON[type(error)]) from error
    if not isinstance(value, dict):
        raise ValueError(_NOT_JSON[json.JSONDecodeError])
    return value


def read_texts(paths: str | Path | Iterable[str | Path]) -> str:
    """Read one or more files and join them as documents, in order. Raises as `read_text`."""
    if isinstance(paths, str | Path):
        paths = [paths]
    texts = [read_text(path) for path in paths]
    if not texts:
        raise ValueError("text files: none given; give at least one .txt or .txt.xz file")
    return f"\n{SEPARATOR}\n".join(texts)


def documents(text: str) -> list[str]:
    """The non-empty documents of a text, separated by lines `<|endoftext|>`."""
    return [part.strip() for part in text.split(SEPARATOR) if part.strip()]


def running(text: str) -> str:
    """The documents of a text joined by blank lines, as text for any tokenizer."""
    return "\n\n".join(documents(text))
