"""The server's process: a socket, uvicorn, and the end."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvfold.server.connections import Listener, limit_logs, protocol_of, raise_descriptors
from kvfold.server.limits import Limits
from kvfold.server.request_log import RequestLog
from kvfold.server.shutdown import SECONDS, Ending
from kvfold.utils.errors import SettingError

LOCAL = ("127.0.0.1", "::1", "localhost")
INTERRUPTED = 130  # exit code of a second Ctrl-C


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody else has, before a model is loaded for it. Raises ValueError."""
    if not host.strip():  # the system takes it for every network's
        raise SettingError("`host` is empty: give an address, such as 127.0.0.1, or leave it out")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = Listener(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError, TypeError, UnicodeError) as error:  # of a name that is none
        found.close()
        raise ValueError(f"cannot listen at {host} port {port}: {error}; take another") from None
    return found


class Server(uvicorn.Server):
    """uvicorn, which calls `ready` once clients can connect, not before, and says what it waits for
    when it is told to stop. A second SIGINT ends the process within a second.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self.ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None  # once clients can connect
        self._stop_now: Coroutine[Any, Any, None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to stop, a second SIGINT stops now, a third one at once."""
        if sig != signal.SIGINT or not self.should_exit:
            if not self.should_exit:
                say(stopping(len(self.server_state.tasks), sig))
            super().handle_exit(sig, frame)
        elif self._loop is not None and self._stop_now is None:
            self._stop_now = self._end_process()
            self._loop.call_soon_threadsafe(self._loop.create_task, self._stop_now)
        else:
            os._exit(INTERRUPTED)

    async def _end_process(self) -> None:
        """Tell clients that the server ends, and end the process. The engine's step is not waited
        for, nor are threads that encode long texts."""
        tasks = tuple(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=SECONDS)
        say("stopped")
        os._exit(INTERRUPTED)


def stopping(num_requests: int, sig: int) -> str:
    """What a server says when a signal tells it to stop."""
    if not num_requests:
        return "stopping"
    requests = "1 request" if num_requests == 1 else f"{num_requests} requests"
    again = ", Ctrl-C again to stop now" if sig == signal.SIGINT else ""
    return f"stopping: waiting for {requests}{again}"


def server_of(
    app: FastAPI,
    limits: Limits,
    ready: Callable[[], object],
    log: Callable[[str], object] | None = None,
) -> Server:
    """A server that answers what is open for a while when it is told to end, and tells the others
    that it ends. log: is told a line for each request (None: nobody is)."""
    ending = Ending(app)
    config = uvicorn.Config(
        ending if log is None else RequestLog(ending, log),
        http=protocol_of(limits),
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=limits.drain_seconds,
    )
    return Server(config, ready)


def run(
    app: FastAPI, listener: socket.socket, limits: Limits, *, log_requests: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM, and answer what is open; a second SIGINT ends the process."""
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    raise_descriptors()
    log = say if log_requests else None
    server = server_of(app, limits, lambda: say(f"serving at {url}"), log)
    limit_logs()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # raised again once all is answered
        say("stopped")


def say(line: str) -> None:
    """Print a line to stderr. A disk that is full, or a pipe that is closed, ends no server."""
    with suppress(OSError):
        print(line, file=sys.stderr)
