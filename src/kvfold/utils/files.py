"""Write files and directories atomically: completely or not at all."""

import errno
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

try:
    import fcntl
except ImportError:  # Windows, where directories are not locked
    fcntl = None  # type: ignore[assignment]


def check_here() -> None:
    """Raises ValueError if the current directory was deleted; libraries that look for it would end
    the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ValueError("the folder you are in was deleted: change to another one") from None


def check_writable(path: Path) -> None:
    """Raises ValueError if `path` cannot become a file. Call it before long work."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a device or a pipe; name a file")
    _check_link(path)
    parent = Path(os.path.realpath(path)).parent  # where a link leads
    if not parent.is_dir():
        raise ValueError(f"cannot write {path}: folder {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"cannot write {path}: folder {parent} is read-only; name another one")
    _check_creates(parent, path)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Context manager: a scratch file to write, which replaces `path` atomically if the block
    succeeds.

    It has the mode of a new file (umask). A `path` that is a link stays one.
    """
    check_writable(path)
    path = Path(os.path.realpath(path))
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(4)}{path.suffix}")
    try:
        with open(scratch, "x") as file:
            mode = os.fstat(file.fileno()).st_mode
        yield scratch
        scratch.chmod(mode)  # some libraries write theirs for the owner alone
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())  # else a power cut leaves an empty file in place of the old one
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file with `text`, atomically. Bytes of file names that are not utf-8 are
    escaped as in JSON and Python."""
    with new_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, data: Any) -> None:
    """Replace `path` by `data` as JSON. Raises ValueError for numbers that JSON does not have."""
    with writing(path):
        write_text(path, json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager: name the file in errors of a full or unplugged disk."""
    from safetensors import SafetensorError  # what it raises has no class of its own

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", str(error))
        if reason is None:  # it says so already
            raise
        raise OSError(f"cannot write {path}: {reason}") from error


def check_apart(outputs: Mapping[str, Path], inputs: Mapping[str, Sequence[Path]]) -> None:
    """Raises ValueError for an output that would replace an input, a file in an input folder, or
    another output. Keys are the names of the settings."""
    for name, path in outputs.items():
        for other, same in outputs.items():
            if other != name and _same(path, same):
                raise ValueError(
                    f"{name} and {other} both name {path}: give each a file of its own"
                )
        for other, paths in inputs.items():
            if any(_same(path, x) for x in paths):
                raise ValueError(
                    f"{name} would replace {path}, which {other} reads: name another file"
                )
            if path.is_file() and any(_holds(x, path) for x in paths):
                raise ValueError(
                    f"{name} would replace {path}, a file of the folder that {other} reads: name"
                    " another file"
                )


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(path) == os.path.realpath(other)


def _holds(folder: Path, path: Path) -> bool:
    """Whether `path` is in a folder that holds a model or maps (folders of results do not
    count)."""
    if not any((folder / name).is_file() for name in ("config.json", "kvfold.json")):
        return False
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_makeable(path: Path) -> None:
    """Raises ValueError if `path` cannot become a directory. Call it before long work."""
    _check_link(path)
    if not path.resolve().name:
        raise ValueError(f"cannot write {path}: it is the root of all folders; name one in it")
    if path.resolve() == Path.cwd():
        raise ValueError(f"cannot write {path}: it is the folder you are in; name one in it")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"cannot write {path}: {above} is a file; name another folder")
    if not os.access(above, os.W_OK):
        raise ValueError(f"cannot write {path}: folder {above} is read-only; name another one")
    _check_creates(above, path)


def _check_creates(folder: Path, path: Path) -> None:
    """Raises ValueError if no file can be created in `folder`, for writing `path`. Permissions do
    not tell: /proc and other folders of the system are writable, but create nothing."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: nothing can be created in folder {folder} ({error.strerror});"
            " name another one"
        ) from None


def _check_link(path: Path) -> None:
    """Raises ValueError for a path through a link that leads back to itself."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"cannot write {path}: it is a link that leads back to itself; name another place"
            ) from None


def finite(value: Any) -> Any:
    """`value` for JSON: keys become strings, and numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def new_directory(path: Path, *, wait: bool = False) -> Iterator[Path]:
    """Context manager: a scratch directory to fill, which becomes `path` if the block succeeds.

    Until then other processes cannot write `path`. What a killed process left behind is removed.
    wait: wait for another process that writes it, instead of raising. Raises ValueError, before the
    block, for a `path` that is in use or being written.
    """
    _check_link(path)
    named, path = path, path.resolve()  # the scratch folder is next to the resolved path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, wait):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(
                f"output {named} exists and is not an empty directory; name another one"
            )
        scratch = path.with_name(f".{path.name}.kvfold-partial")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
            _share(scratch)
            if path.exists():
                path.rmdir()
            scratch.rename(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[None]:
    """Context manager: lock `path` against other processes by a file next to it; the system unlocks
    it however this process ends. Raises ValueError if another process has it, unless `wait`."""
    lock = path.with_name(f".{path.name}.kvfold-lock")
    while True:
        with open(lock, "w") as file:
            if not _lock(file, wait):
                raise ValueError(f"output {path} is being written by another process; wait for it")
            if not lock.exists() or not os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                continue  # its last owner has just removed it
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _lock(file: TextIO, wait: bool) -> bool:
    """Lock `file` until it is closed. Returns False if another process has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks
    return True


def _share(folder: Path) -> None:
    """Give everything in `folder` the modes of new files and folders (umask): some libraries write
    files for the owner alone."""
    mode = folder.stat().st_mode
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)
