"""The lock of an engine: one thread steps it, and calls from other threads run between steps."""

from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from threading import Condition, get_ident


class EngineLock:
    """Held by the thread that works on an engine. Calls by other threads run between its steps.

    `call_soon` never blocks: it may be called from a finalizer, wherever the garbage collector
    interrupts, even in the middle of a step. A signal may also interrupt anywhere between two
    Python operations. So the lock is taken and released by a single dict operation each.
    """

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}  # at most one item, set or cleared by a single operation
        self._calls: deque[Callable[[], object]] = deque()  # a deque's methods are atomic
        self._released = Condition()  # its lock is re-entrant, as finalizers need

    def call_soon(self, action: Callable[[], object]) -> None:
        """Call `action` now, or let the holder call it when its step has ended."""
        self._calls.append(action)
        self._run_if_free()

    @contextmanager
    def hold(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock, and yield whether it is held. Without `wait`, take it only if it is free.
        Raises RuntimeError if this thread holds it already."""
        me = {"thread": get_ident()}
        if self._holder == me:
            raise RuntimeError("a step within a step: hooks may add and cancel requests, not step")
        try:
            while self._holder.setdefault("thread", me["thread"]) != me["thread"] and wait:
                self.wait_for(())
            if self._holder == me:
                self._run_calls()
            yield self._holder == me
        finally:
            if self._holder == me:
                self._holder.clear()
                self._notify()
        self._run_if_free()

    def wait_for(self, box: Sized) -> None:
        """Wait until `box` is not empty or the lock is free."""
        with self._released:
            while not box and self._holder:
                self._released.wait(1)  # then check again: a signal may have cost the notification

    def _run_if_free(self) -> None:
        """Run the queued calls, unless the lock is held: the holder runs them when it releases."""
        me = {"thread": get_ident()}
        while self._calls and self._holder != me:
            try:
                if self._holder.setdefault("thread", me["thread"]) != me["thread"]:
                    return
                self._run_calls()
            finally:
                if self._holder == me:
                    self._holder.clear()
                    self._notify()

    def _notify(self) -> None:
        with self._released:
            self._released.notify_all()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()
