"""One address before replicas: every request goes to one of them, as it came."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvfold.server.errors import APIError
from kvfold.server.forwarding import (
    Cut,
    Events,
    Pairs,
    Passed,
    answer_headers,
    length_header,
    read_whole,
)
from kvfold.server.guard import Guard, unless_gone
from kvfold.server.limits import Balance, Limits
from kvfold.server.replicas import Replica, Replicas, reason, watching
from kvfold.server.shutdown import error_events, tells_of_ending

BUSY = (429, 503)  # another replica may have room, or be well
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
OWN = ["GET", "HEAD"]
LOST = (aiohttp.ClientError, OSError)  # a timeout is an OSError


@dataclass(frozen=True, kw_only=True)
class Begun:
    """An answer that can no longer be asked for elsewhere. body: all of it, or a stream's first
    events; rest: the events that follow, None where there are none."""

    replica: Replica
    answer: aiohttp.ClientResponse
    headers: Pairs
    body: bytes
    rest: Events | None

    @property
    def refuses(self) -> bool:
        """Whether another replica may answer instead."""
        return self.answer.status in BUSY or tells_of_ending(self.body)

    @property
    def response(self) -> Response:
        """As the client gets it."""
        found: Response
        if self.rest is None:
            found = Response(self.body, self.answer.status)
            found.raw_headers = self.headers + length_header(self.answer, self.body)
        else:
            found = _Stream(self, _rest(self, self.rest), self.answer.status)
            found.raw_headers = self.headers
        return found


class Router:
    """Sends requests on. session: to the replicas; it is set while the application runs."""

    session: aiohttp.ClientSession

    def __init__(self, replicas: Replicas, limits: Limits) -> None:
        self.replicas, self.limits = replicas, limits

    async def answer(self, request: Request) -> Response:
        """The answer of a replica. Who leaves before it begins leaves the replica, too."""
        begun = await unless_gone(request, self._begin(await Passed.of(request)))
        return begun.response

    async def _begin(self, passed: Passed) -> Begun:
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
                begun = await self._ask(replica, passed)
            except LOST as error:
                _count(replica, error)
                continue
            if not begun.refuses:
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

    async def _ask(self, replica: Replica, passed: Passed) -> Begun:
        """What a replica answers, up to the first events of a stream, or all. A stream counts as
        open until its `_Stream` ends. Raises one of LOST."""
        replica.asked += 1
        replica.open += 1
        streams = False
        try:
            answer = await self.session.request(
                passed.method,
                passed.url(replica.url),
                data=passed.body or None,
                headers=passed.headers,
                allow_redirects=False,
            )
            try:
                begun = await _beginning(replica, answer)
            except BaseException:
                answer.close()
                raise
            streams = begun.rest is not None
            return begun
        finally:
            replica.open -= not streams


async def _beginning(replica: Replica, answer: aiohttp.ClientResponse) -> Begun:
    """Raises one of LOST, also for a stream of OpenAI's that is empty."""
    if answer.status == 101:  # which nobody asked for
        raise Cut("it switched to another protocol")
    headers, rest = answer_headers(answer), None
    if answer.content_type != "text/event-stream" or answer.method == "HEAD":
        body = await read_whole(answer)
    else:
        rest = Events(answer)
        body = await anext(rest, b"")
        if tells_of_ending(body):
            body += b"".join([piece async for piece in rest])
            rest = None
    return Begun(replica=replica, answer=answer, headers=headers, body=body, rest=rest)


async def _rest(begun: Begun, events: Events) -> AsyncIterator[bytes]:
    """A stream to its end. Where its replica is lost, an error and the last event."""
    try:
        yield begun.body
        async for piece in events:
            yield piece
    except LOST as error:
        _count(begun.replica, error)
        said = APIError(502, "the replica was lost while it answered", code="replica_lost")
        yield error_events(said)


def _count(replica: Replica, error: BaseException) -> None:
    """A request was lost. A replica that cut an answer short is alive."""
    replica.lost += 1
    if not isinstance(error, Cut):
        replica.turn(reason(error))


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
                cookie_jar=aiohttp.DummyCookieJar(),  # a client's cookies are not another's
                max_field_size=2**16,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            ) as router.session,
            watching(replicas, router.session),
        ):
            yield

    app = FastAPI(title="kvfold", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, limits=limits, key=None)
    app.add_exception_handler(APIError, _refused)
    app.add_exception_handler(HTTPException, _unknown)
    _add_own(app, replicas, registry)
    app.add_route("/{path:path}", router.answer, methods=METHODS)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response


async def _unknown(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return APIError(error.status_code, str(error.detail), headers=error.headers).response


def _add_own(app: FastAPI, replicas: Replicas, registry: CollectorRegistry) -> None:
    @app.api_route("/health", methods=OWN)
    async def health() -> Response:
        said = {x.url: x.why or "ok" for x in replicas.all}
        well = any(x.healthy for x in replicas.all)
        status = "ok" if well else "no replica is healthy"
        return JSONResponse({"status": status, "replicas": said}, 200 if well else 503)

    @app.api_route("/metrics", methods=OWN)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
