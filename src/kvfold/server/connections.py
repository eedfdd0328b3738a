"""Connections of a server: how many, and how long one may be open without a request. Log lines of
one kind, how often."""

import asyncio
import logging
import resource
import socket
import time
from collections import defaultdict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvfold.server.limits import Limits

SPARE = 64  # descriptors for all but connections
LAST = 16  # of these, for what has to open files even in a rush of connections
WANTED = 2**16  # descriptors, where the system allows as many
LINES, MINUTE = 10, 60.0  # log lines of one kind in so many seconds


def num_descriptors() -> int:
    """How many this process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if resource.RLIM_INFINITY in (soft, hard) else soft


def raise_descriptors() -> None:
    """Allow this process as many as the system does, WANTED at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < WANTED:
        most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Listener(socket.socket):
    """A socket that listens, and closes what it accepts where descriptors run short: they are
    numbered from the lowest that is free."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError, after which asyncio looks again."""
        connection, address = super().accept()
        if connection.fileno() >= num_descriptors() - LAST:
            connection.close()
            raise BlockingIOError
        return connection, address


def protocol_of(limits: Limits) -> type[H11Protocol]:
    """uvicorn's HTTP, with limits: a head may take `head_seconds`, and where there are more than
    `max_connections` the oldest one without a request is closed for a new one."""
    most = min(limits.max_connections, max(1, num_descriptors() - SPARE))
    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # without a request, oldest first

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
            if not self._busy:  # else the next request has come already
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
    """Lets through so many log lines of a kind a minute, and says how many it kept back."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int, str], int] = defaultdict(int)
        self._until = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() > self._until:
            kept_back = sum(max(0, count - LINES) for count in self._counts.values())
            self._counts.clear()
            self._until = time.monotonic() + MINUTE
            if kept_back:
                record.msg = f"{record.msg} ({kept_back} earlier lines were left out)"
        kind = record.name, record.levelno, str(record.msg)[:40]
        self._counts[kind] += 1
        return self._counts[kind] <= LINES


def limit_logs() -> None:
    """Of uvicorn, and of all that has no handler but the last one."""
    handlers = [*logging.getLogger("uvicorn").handlers, *logging.getLogger().handlers]
    for handler in [*handlers, logging.lastResort]:
        if handler is not None and not any(isinstance(x, RateLimit) for x in handler.filters):
            handler.addFilter(RateLimit())
