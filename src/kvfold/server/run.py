"""The server's process: a socket, uvicorn, and the end."""

import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from kvfold.server.connections import Listener, limit_logs, protocol_of, raise_descriptors
from kvfold.server.ending import Ending
from kvfold.server.limits import Limits

LOCAL = ("127.0.0.1", "::1", "localhost")


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody else has, before a model is loaded for it. Raises ValueError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = Listener(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise ValueError(f"cannot listen at {host} port {port}: {error}; take another") from None
    return found


class Server(uvicorn.Server):
    """uvicorn, which calls `ready` once clients can connect, not before."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


def server_of(app: FastAPI, limits: Limits, ready: Callable[[], object]) -> Server:
    """A server that answers what is open for a while when it is told to end, and tells the others
    that it ends."""
    config = uvicorn.Config(
        Ending(app),
        http=protocol_of(limits),
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=limits.drain_seconds,
    )
    return Server(config, ready)


def run(app: FastAPI, listener: socket.socket, limits: Limits) -> None:
    """Serve until SIGINT or SIGTERM, and answer what is open; a second one leaves that."""
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    raise_descriptors()
    server = server_of(app, limits, lambda: say(f"serving at {url}"))
    limit_logs()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # raised again once all is answered
        say("stopped")


def say(line: str) -> None:
    """Print a line to stderr. A disk that is full, or a pipe that is closed, ends no server."""
    with suppress(OSError):
        print(line, file=sys.stderr)
