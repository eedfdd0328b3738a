"""Run a server process: bind the socket, run uvicorn, shut down on signals."""

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
from kvfold.server.shutdown import SECONDS, ShutdownResponses
from kvfold.utils.errors import SettingError

LOCAL = ("127.0.0.1", "::1", "localhost")
INTERRUPTED = 130  # exit code after a second Ctrl-C


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket, before the model is loaded, so that a port in use fails at once.

    Raises ValueError.
    """
    if not host.strip():  # the system would listen on every network
        raise SettingError("`host` is empty: give an address, such as 127.0.0.1, or leave it out")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, TypeError, UnicodeError) as error:  # also for invalid names
        listener.close()
        raise ValueError(f"cannot listen at {host} port {port}: {error}; take another") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn's server, with a callback and with messages for whoever runs it.

    `ready` is called once clients can connect. On a signal it says how many requests it waits for.
    A second SIGINT ends the process within a second.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self.ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None  # None: clients cannot connect yet
        self._stop_now: Coroutine[Any, Any, None] | None = None  # after a second SIGINT

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully on the first signal, within a second on a second SIGINT, and
        immediately on a third."""
        if not self.should_exit:
            super().handle_exit(sig, frame)  # before it is said: another signal may come at once
            say(stopping(len(self.server_state.tasks), sig))
        elif sig != signal.SIGINT:
            super().handle_exit(sig, frame)
        elif self._loop is not None and self._stop_now is None:
            self._stop_now = self._end_process()
            self._loop.call_soon_threadsafe(self._loop.create_task, self._stop_now)
        else:
            os._exit(INTERRUPTED)

    @property
    def interrupted_twice(self) -> bool:
        return self._stop_now is not None

    async def _end_process(self) -> None:
        """Cancel all requests, so that their clients get an error, and end the process.

        Neither the engine's current step nor threads that tokenize long texts are waited for.
        """
        tasks = tuple(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=SECONDS)
        finally:  # also where uvicorn's own shutdown ends first, and with it the event loop
            say("stopped")
            os._exit(INTERRUPTED)


def stopping(num_requests: int, sig: int) -> str:
    """The message of a server that a signal tells to stop."""
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
    """A uvicorn server that drains open requests at shutdown.

    log: called with one line per request (None: no request log).
    """
    shutdown_app = ShutdownResponses(app)
    config = uvicorn.Config(
        shutdown_app if log is None else RequestLog(shutdown_app, log),
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
    """Serve until SIGINT or SIGTERM, then drain open requests. A second SIGINT ends the process."""
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    raise_descriptors()
    log = say if log_requests else None
    server = server_of(app, limits, lambda: say(f"serving at {url}"), log)
    limit_logs()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again after it has drained
        say("stopped")
        if server.interrupted_twice:
            os._exit(INTERRUPTED)


def say(line: str) -> None:
    """Print a line to stderr. A full disk or a closed pipe does not stop the server."""
    with suppress(OSError):
        print(line, file=sys.stderr)
