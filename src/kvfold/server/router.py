"""One address before replicas: every request goes to one of them, as it came."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvfold.server.errors import APIError
from kvfold.server.guard import Guard, unless_gone
from kvfold.server.limits import Balance, Limits
from kvfold.server.replicas import Replica, Replicas, reason, watching

HOP = (  # headers of one connection, and those that are written anew
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "date"),
)
BUSY = (429, 503)  # another replica may have room, or be well
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
LOST = (aiohttp.ClientError, OSError)  # a timeout is an OSError


@dataclass(frozen=True, kw_only=True)
class Begun:
    """An answer that can no longer be asked for elsewhere. first: of its bytes; whole: all are."""

    replica: Replica
    answer: aiohttp.ClientResponse
    first: bytes
    whole: bool

    @property
    def headers(self) -> dict[str, str]:
        return {k: v for k, v in self.answer.headers.items() if k.lower() not in HOP}


class Router:
    """Sends requests on. session: to the replicas; it is set while the application runs."""

    session: aiohttp.ClientSession

    def __init__(self, replicas: Replicas, limits: Limits) -> None:
        self.replicas, self.limits = replicas, limits

    async def answer(self, request: Request) -> Response:
        """The answer of a replica. Who leaves before it begins leaves the replica, too."""
        body = await request.body()
        begun = await unless_gone(request, self._begin(request, body))
        status, headers = begun.answer.status, begun.headers
        if begun.whole:
            return Response(begun.first, status, headers)
        return _Stream(begun, _rest(begun), status, headers)

    async def _begin(self, request: Request, body: bytes) -> Begun:
        """An answer's beginning, from the first replica that gives one. Raises APIError."""
        tried: list[Replica] = []
        refusal: Begun | None = None
        while len(tried) <= self.replicas.balance.retries:
            replica = self.replicas.pick(tried)
            if replica is None:
                break
            self.replicas.retries += bool(tried)
            tried.append(replica)
            try:
                begun = await self._ask(replica, request, body)
            except LOST as error:
                replica.lost += 1
                replica.turn(reason(error))
                continue
            if begun.answer.status not in BUSY:
                return begun
            refusal = begun
        if refusal is not None:
            return refusal
        lost = f"{len(tried)} replicas were lost before they answered" if tried else "none is well"
        raise APIError(
            503,
            f"no replica answers: {lost}; try again",
            code="no_replica",
            headers={"Retry-After": "1"},
        )

    async def _ask(self, replica: Replica, request: Request, body: bytes) -> Begun:
        """What a replica answers, up to the first piece of a stream, or all. A stream counts as
        open until its `_Stream` ends. Raises one of LOST."""
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        replica.asked += 1
        replica.open += 1
        streams = False
        try:
            answer = await self.session.request(
                request.method,
                f"{replica.url}{request.url.path}{query}",
                data=body,
                headers=headers,
                allow_redirects=False,
            )
            try:
                streams = answer.content_type == "text/event-stream"
                first = await (answer.content.readany() if streams else answer.read())
            except BaseException:
                streams = False
                answer.close()
                raise
            return Begun(replica=replica, answer=answer, first=first, whole=not streams)
        finally:
            replica.open -= not streams


async def _rest(begun: Begun) -> AsyncIterator[bytes]:
    """A stream to its end. Where its replica is lost, an error and the last event."""
    replica = begun.replica
    try:
        yield begun.first
        async for piece in begun.answer.content.iter_any():
            yield piece
    except LOST as error:
        replica.lost += 1
        replica.turn(reason(error))
        said = APIError(502, "the replica was lost while it answered", code="replica_lost")
        yield f"\n\ndata: {json.dumps(said.body)}\n\ndata: [DONE]\n\n".encode()


class _Stream(StreamingResponse):
    """Closes what it passes on, whoever ends it and when."""

    def __init__(self, begun: Begun, *how: Any) -> None:
        super().__init__(*how)
        self.begun = begun

    async def __call__(self, *scope: Any) -> None:
        try:
            await super().__call__(*scope)
        finally:
            self.begun.replica.open -= 1
            self.begun.answer.close()


def create_router(
    urls: Sequence[str], *, balance: Balance | None = None, limits: Limits | None = None
) -> FastAPI:
    """An ASGI application that spreads requests over replicas. Keys are theirs to ask for."""
    limits = limits or Limits()
    replicas = Replicas(urls, balance or Balance())
    router = Router(replicas, limits)
    registry = CollectorRegistry()
    registry.register(replicas)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=5, sock_read=limits.request_seconds
        )
        # Connections are dropped before a replica drops them, which takes uvicorn five seconds.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with (
            aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            ) as router.session,
            watching(replicas, router.session),
        ):
            yield

    app = FastAPI(title="kvfold", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, limits=limits, key=None)
    app.add_exception_handler(APIError, _refused)
    _add_own(app, replicas, registry)
    app.add_route("/{path:path}", router.answer, methods=METHODS)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response


def _add_own(app: FastAPI, replicas: Replicas, registry: CollectorRegistry) -> None:
    @app.get("/health")
    async def health() -> Response:
        said = {x.url: x.why or "ok" for x in replicas.all}
        well = any(x.healthy for x in replicas.all)
        status = "ok" if well else "no replica is healthy"
        return JSONResponse({"status": status, "replicas": said}, 200 if well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
