"""A bound on the time and memory of Python code that is not ours: a chat template may run without
an end, and nothing beneath stops it."""

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
    """What ends the call. No Exception, so that no handler of the code inside takes it."""


def bounded(seconds: float, num_bytes: int, call: Callable[[], T]) -> T:
    """What `call` returns. Raises TimeoutError where it takes longer, and MemoryError where this
    process grows by more bytes meanwhile.

    It ends between two steps of Python: one call into C is not interrupted.
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
            with lock:  # from here on nothing is raised
                done.set()
            time.sleep(0)  # what was raised before arrives here
    except Exceeded:
        assert error is not None
        raise error from None


def _raise_in(thread: int) -> None:
    """Raises Exceeded in a thread, at its next step in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Exceeded))


def _resident() -> int:
    """Bytes that this process holds; 0 where the system does not say."""
    try:
        return int(_SIZES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
