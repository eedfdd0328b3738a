"""Bound the time and memory of Python code that is not ours: a chat template may run forever."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
POLL = 0.05  # seconds between looks at the memory
_SIZES = Path("/proc/self/statm")  # on Linux; elsewhere only time is bounded


class Exceeded(BaseException):
    """Raised in the bounded call. Not a subclass of Exception, so that no handler inside the call
    catches it."""


def bounded(seconds: float, num_bytes: int, call: Callable[[], T]) -> T:
    """Return call(). Raises TimeoutError if it takes more than `seconds`, and MemoryError if this
    process grows by more than `num_bytes` meanwhile.

    The call ends between two Python instructions; a call into C is not interrupted.
    """
    thread, done, lock = threading.get_ident(), threading.Event(), threading.Lock()
    error: Exception | None = None

    def watch() -> None:
        nonlocal error
        end, most = time.monotonic() + seconds, _resident() + num_bytes
        while error is None and not done.wait(min(POLL, seconds)):
            if time.monotonic() > end:
                error = TimeoutError(f"it takes more than {seconds:g} seconds")
            elif _resident() > most:
                error = MemoryError(f"it takes more than {num_bytes} bytes of memory")
        with lock:
            if error is not None and not done.is_set():
                _raise_in(thread)

    try:
        try:
            threading.Thread(target=watch, daemon=True).start()
            return call()
        finally:
            with lock:  # nothing is raised after this
                done.set()
            time.sleep(0)  # an exception that was raised before arrives here
    except Exceeded:
        assert error is not None
        raise error from None


def _raise_in(thread: int) -> None:
    """Raise Exceeded in a thread, at its next Python instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Exceeded))


def _resident() -> int:
    """Resident bytes of this process; 0 if unknown."""
    try:
        return int(_SIZES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
