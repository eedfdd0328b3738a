"""Whose turn it is: an engine has one owner at a time, and everybody else leaves a note."""

from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from threading import Condition, get_ident


class Turn:
    """Taken by the thread that works on an engine. What others ask for is done between its steps.

    `ask` never waits: it may be called by a finalizer, wherever the garbage collector interrupts,
    in the middle of a step too. An interrupt may come wherever Python calls or loops: a turn is
    taken, and given back, by one call of a dict's.
    """

    def __init__(self) -> None:
        self._owner: dict[str, int] = {}  # one item at most, which a single call takes or clears
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
        me = {"thread": get_ident()}
        if self._owner == me:
            raise RuntimeError("a step within a step: hooks may add and cancel requests, not step")
        try:
            while self._owner.setdefault("thread", me["thread"]) != me["thread"] and wait:
                self.wait(())
            if self._owner == me:
                self._read()
            yield self._owner == me
        finally:
            if self._owner == me:
                self._owner.clear()
                self._notify()
        self._settle()

    def wait(self, box: Sized) -> None:
        """Until `box` holds something or nobody is the owner."""
        with self._over:
            while not box and self._owner:
                self._over.wait(1)  # and look: an interrupt may have cost the notice

    def _settle(self) -> None:
        """Read the inbox. Where there is an owner, it will: its turn ends with this."""
        me = {"thread": get_ident()}
        while self._inbox and self._owner != me:
            try:
                if self._owner.setdefault("thread", me["thread"]) != me["thread"]:
                    return
                self._read()
            finally:
                if self._owner == me:
                    self._owner.clear()
                    self._notify()

    def _notify(self) -> None:
        with self._over:
            self._over.notify_all()

    def _read(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
