"""Files and directories written whole or not at all."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_writable(path: Path) -> None:
    """Raises ValueError if `path` cannot become a file; to be asked before long work."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a file")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"cannot write {path}: folder {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"cannot write {path}: folder {parent} is read-only; name another one")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file holding `text`, in one step."""
    check_writable(path)
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.absolute().parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(scratch).chmod(0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any) -> None:
    """Replace `path` by `data` as JSON. Raises ValueError for a number JSON does not have."""
    with writing(path):
        write_text(path, json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the file that a full disk, or one that was unplugged, does not take."""
    from safetensors import SafetensorError  # what it raises has no class of its own

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", str(error))
        if reason is None:  # it says so already
            raise
        raise OSError(f"cannot write {path}: {reason}") from error


def check_makeable(path: Path) -> None:
    """Raises ValueError if `path` cannot become a directory; to be asked before long work."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"cannot write {path}: {above} is a file; name another folder")
    if not os.access(above, os.W_OK):
        raise ValueError(f"cannot write {path}: folder {above} is read-only; name another one")


def finite(value: Any) -> Any:
    """`value` for JSON: keys become strings, and numbers that are not finite null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `path` when the block ends without an error.

    Raises OSError, and writes nothing, if `path` exists by then and is not an empty directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        if path.exists():
            path.rmdir()
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
