"""Stub replicas: OpenAI servers without a model, that fail as they are told."""

import asyncio
import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

for package in ("fastapi", "uvicorn", "aiohttp", "httpx"):
    pytest.importorskip(package, reason='needs pip install "kvfold[server,load]" and httpx')

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvfold.server.limits import Limits
from kvfold.server.run import bind, server_of


@dataclass
class Stub:
    """What a replica says of itself. how: "well", "full" (429), "cut" (after two tokens), "dead"
    (nothing at all of an answer), "slow" (waits for `go` before it answers)."""

    name: str
    how: str = "well"
    healthy: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    open: int = 0
    go: threading.Event = field(default_factory=threading.Event)

    @property
    def app(self) -> Starlette:
        post = [("/v1/completions", self.complete)]
        routes = [Route(path, call, methods=["POST"]) for path, call in post]
        routes += [Route("/v1/models", self.models), Route("/health", self.health)]
        return Starlette(routes=routes)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "stub", "owned_by": self.name}]})

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "?"}, 200 if self.healthy else 503)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.how == "full":
            return JSONResponse({"error": {"message": "full"}}, 429, headers={"Retry-After": "7"})
        if not body.get("stream"):
            if self.how == "dead":
                return StreamingResponse(self.events(body), media_type="application/json")
            await self.wait()
            return JSONResponse({"by": self.name, "choices": [{"text": "whole"}]})
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def wait(self) -> None:
        while self.how == "slow" and not self.go.is_set():
            await asyncio.sleep(0.005)

    async def events(self, body: dict[str, Any]) -> Any:
        self.open += 1
        try:
            if self.how == "dead":
                raise asyncio.CancelledError
            await self.wait()
            count = body["max_tokens"]
            for i in range(count):
                if self.how == "cut" and i == 2:
                    raise asyncio.CancelledError
                reason = "length" if i + 1 == count else None
                yield event({"choices": [{"text": f"{i} ", "finish_reason": reason}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            yield event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self.open -= 1


def event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


@contextmanager
def running(app: Any) -> Iterator[str]:
    """An application at a port of this machine; its URL, once clients can connect."""
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    server = server_of(app, Limits(drain_seconds=1), ready.set)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        assert ready.wait(120)
        yield url
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def stub(name: str = "one", **how: Any) -> Iterator[Stub]:
    found = Stub(name, **how)
    with running(found.app) as found.url:
        yield found


class Raw:
    """A replica that answers a POST with fixed bytes and keeps the bytes of requests. It answers
    the router's looks at /health itself."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.requests = answer, list[bytes]()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # it was closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                request = received(connection)
                looks = request.startswith(b"GET /health ")
                connection.sendall(ALIVE if looks else self.answer)
                if not looks and request:
                    self.requests.append(request)


ALIVE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def received(connection: socket.socket) -> bytes:
    """A request to its end, as it came: its body has a known length."""
    data = b""
    while b"\r\n\r\n" not in data and (piece := connection.recv(2**16)):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    while len(body) < (int(length[1]) if length else 0) and (piece := connection.recv(2**16)):
        body += piece
    return head + b"\r\n\r\n" + body


@contextmanager
def raw(answer: bytes) -> Iterator[Raw]:
    replica = Raw(answer)
    thread = threading.Thread(target=replica.serve, daemon=True)
    thread.start()
    try:
        yield replica
    finally:
        replica.listener.shutdown(socket.SHUT_RDWR)
        replica.listener.close()
        thread.join(30)
