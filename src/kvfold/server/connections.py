"""Limits on a server's connections (their number, and how long one may stay idle) and on its log
lines."""

import asyncio
import logging
import resource
import socket
import time
from collections import defaultdict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvfold.server.limits import Limits

SPARE = 64  # file descriptors that are not for connections
LAST = 16  # of these, reserved for opening files when connections use up the rest
WANTED = 2**16  # descriptors to ask the system for
LINES, MINUTE = 10, 60.0  # most log lines of one kind, and in how many seconds


def num_descriptors() -> int:
    """How many file descriptors this process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if resource.RLIM_INFINITY in (soft, hard) else soft


def raise_descriptors() -> None:
    """Raise this process's limit of descriptors to the system's, at most to WANTED."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < WANTED:
        most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Listener(socket.socket):
    """A listening socket that closes accepted connections when descriptors run short.

    Descriptors are numbered from the lowest free one, so a high number means that few are left.
    """

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError if it was closed; asyncio then tries again
        later."""
        connection, address = super().accept()
        if connection.fileno() >= num_descriptors() - LAST:
            connection.close()
            raise BlockingIOError
        return connection, address


def protocol_of(limits: Limits) -> type[H11Protocol]:
    """uvicorn's HTTP protocol with limits.

    N request's head may take `head_seconds`. With more than `max_connections` open, the oldest
    connection without a request is closed for the new one.
    """
    most = min(limits.max_connections, max(1, num_descriptors() - SPARE))
    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # idle connections, oldest first

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                oldest = next(iter(waiting), self)
                oldest.transport.abort()
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._busy:
                self._end_wait()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._busy:  # otherwise the next request has arrived already
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._end_wait()

        @property
        def _busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            self._end_wait()
            if not self.transport.is_closing():
                waiting[self] = self.loop.call_later(limits.head_seconds, self.transport.abort)

        def _end_wait(self) -> None:
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()

    return Protocol


class RateLimit(logging.Filter):
    """A logging filter that allows LINES log lines of a kind per minute, and says how many it
    dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int, str], int] = defaultdict(int)
        self._until = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() > self._until:
            num_dropped = sum(max(0, count - LINES) for count in self._counts.values())
            self._counts.clear()
            self._until = time.monotonic() + MINUTE
            if num_dropped:
                record.msg = f"{record.msg} ({num_dropped} earlier lines were left out)"
        kind = record.name, record.levelno, str(record.msg)[:40]
        self._counts[kind] += 1
        return self._counts[kind] <= LINES


def limit_logs() -> None:
    """Rate-limit the log lines of uvicorn, of the root logger and of Python's last-resort
    handler."""
    handlers = [*logging.getLogger("uvicorn").handlers, *logging.getLogger().handlers]
    for handler in [*handlers, logging.lastResort]:
        if handler is not None and not any(isinstance(x, RateLimit) for x in handler.filters):
            handler.addFilter(RateLimit())
