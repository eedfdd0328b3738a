"""Whose turn it is: an engine has one owner at a time, and everybody else leaves a note."""

from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from threading import Condition, Lock, get_ident


class Turn:
    """Taken by the thread that works on an engine. What others ask for is done between its steps.

    `ask` never waits: it may be called by a finalizer, wherever the garbage collector interrupts,
    in the middle of a step too.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: int | None = None
        self._inbox: deque[Callable[[], object]] = deque()  # whose methods are atomic
        self._over = Condition()  # its lock may be taken again by a finalizer

    def ask(self, action: Callable[[], object]) -> None:
        """Have `action` done now, or by the owner when its step is over."""
        self._inbox.append(action)
        self._settle()

    @contextmanager
    def take(self, *, wait: bool = True) -> Iterator[bool]:
        """Be the owner, if need be after another; without `wait`, only if there is none: whether it
        is. Raises RuntimeError within one's own turn."""
        if self._owner == get_ident():
            raise RuntimeError("a step within a step: hooks may add and cancel requests, not step")
        if not self._lock.acquire(blocking=wait):
            yield False
            return
        try:
            self._owner = get_ident()
            self._read()
            yield True
        finally:
            self._owner = None
            self._release()
            self._settle()

    def wait(self, box: Sized) -> None:
        """Until `box` holds something or nobody is the owner."""
        with self._over:
            while not box and self._lock.locked():
                self._over.wait()

    def _settle(self) -> None:
        """Read the inbox. Where there is an owner, it will: its turn ends with this."""
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._release()

    def _read(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _release(self) -> None:
        self._lock.release()
        with self._over:
            self._over.notify_all()
