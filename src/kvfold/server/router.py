"""`kvfold route`: an HTTP proxy that spreads requests over replicas."""

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
    BrokenResponse,
    Events,
    ForwardedRequest,
    Headers,
    length_header,
    read_body,
    response_headers,
)
from kvfold.server.guard import Guard, cancel_on_disconnect
from kvfold.server.limits import Balance, Limits
from kvfold.server.replicas import Replica, Replicas, reason, watching
from kvfold.server.shutdown import error_events, is_shutdown_error

BUSY = (429, 503)  # statuses after which another replica is tried
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
ROUTER_METHODS = ["GET", "HEAD"]  # of paths that the router answers itself
LOST = (aiohttp.ClientError, OSError)  # errors of a lost replica; a timeout is an OSError


@dataclass(frozen=True, kw_only=True)
class UpstreamResponse:
    """The response headers and first bytes of a replica.

    body: the whole body, or the first events of a stream.
    events: the remaining events of a stream; None if the body is complete.
    """

    replica: Replica
    response: aiohttp.ClientResponse
    headers: Headers
    body: bytes
    events: Events | None

    @property
    def retryable(self) -> bool:
        """Whether the request may be sent to another replica: this one is busy or shuts down."""
        return self.response.status in BUSY or is_shutdown_error(self.body)

    @property
    def client_response(self) -> Response:
        """The response to the client."""
        response: Response
        if self.events is None:
            response = Response(self.body, self.response.status)
            response.raw_headers = self.headers + length_header(self.response, self.body)
        else:
            response = _UpstreamStream(self, _all_events(self, self.events), self.response.status)
            response.raw_headers = self.headers
        return response


class Router:
    """Forwards requests to replicas. session: connections to them; set while the application
    runs."""

    session: aiohttp.ClientSession

    def __init__(self, replicas: Replicas, limits: Limits) -> None:
        self.replicas, self.limits = replicas, limits

    async def response(self, request: Request) -> Response:
        """A replica's response. If the client disconnects before it begins, the replica's request
        is cancelled."""
        forwarded = await ForwardedRequest.from_request(request)
        upstream = await cancel_on_disconnect(request, self._first_response(forwarded))
        return upstream.client_response

    async def _first_response(self, forwarded: ForwardedRequest) -> UpstreamResponse:
        """The beginning of a response, from the first replica that accepts the request.

        Raises APIError (503) if none answers.
        """
        tried: list[Replica] = []
        refusal: UpstreamResponse | None = None
        while len(tried) <= self.replicas.balance.retries:
            replica = self.replicas.pick(tried)
            if replica is None:
                break
            self.replicas.retries += bool(tried)
            tried.append(replica)
            try:
                upstream = await self._send(replica, forwarded)
            except LOST as error:
                _record_loss(replica, error)
                continue
            if not upstream.retryable:
                return upstream
            refusal = upstream
        if refusal is not None:
            return refusal
        problem = (
            f"{len(tried)} replicas were lost before they answered" if tried else "none is healthy"
        )
        raise APIError(
            503,
            f"no replica answers: {problem}; try again",
            code="no_replica",
            headers={"Retry-After": "1"},
        )

    async def _send(self, replica: Replica, forwarded: ForwardedRequest) -> UpstreamResponse:
        """Send a request to a replica and read its response, of a stream the first events. Raises
        one of LOST.

        A stream counts as open until its `_UpstreamStream` ends.
        """
        replica.num_sent += 1
        replica.num_open += 1
        streams = False
        try:
            response = await self.session.request(
                forwarded.method,
                forwarded.url(replica.url),
                data=forwarded.body or None,
                headers=forwarded.headers,
                allow_redirects=False,
            )
            try:
                upstream = await _read_upstream(replica, response)
            except BaseException:
                response.close()
                raise
            streams = upstream.events is not None
            return upstream
        finally:
            replica.num_open -= not streams


async def _read_upstream(replica: Replica, response: aiohttp.ClientResponse) -> UpstreamResponse:
    """Read a response, of a stream the first events. Raises one of LOST, also for an OpenAI stream
    without events."""
    if response.status == 101:  # no request asks for another protocol
        raise BrokenResponse("it switched to another protocol")
    headers, events = response_headers(response), None
    if response.content_type != "text/event-stream" or response.method == "HEAD":
        body = await read_body(response)
    else:
        events = Events(response)
        body = await anext(events, b"")
        if is_shutdown_error(body):
            body += b"".join([data async for data in events])
            events = None
    return UpstreamResponse(
        replica=replica, response=response, headers=headers, body=body, events=events
    )


async def _all_events(upstream: UpstreamResponse, events: Events) -> AsyncIterator[bytes]:
    """All events of a stream. If the replica is lost, the last ones are an error and [DONE]."""
    try:
        yield upstream.body
        async for data in events:
            yield data
    except LOST as error:
        _record_loss(upstream.replica, error)
        api_error = APIError(502, "the replica was lost while it answered", code="replica_lost")
        yield error_events(api_error)


def _record_loss(replica: Replica, error: BaseException) -> None:
    """Count a request that was not answered completely, and mark the replica unhealthy unless it is
    alive and only cut the response short."""
    replica.num_lost += 1
    if not isinstance(error, BrokenResponse):
        replica.set_health(reason(error))


class _UpstreamStream(StreamingResponse):
    """A streaming response that closes the replica's response when it ends, for whatever reason."""

    def __init__(self, upstream: UpstreamResponse, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.upstream = upstream

    async def __call__(self, *asgi: Any) -> None:
        try:
            await super().__call__(*asgi)
        finally:
            self.upstream.replica.num_open -= 1
            self.upstream.response.close()


def create_router(
    urls: Sequence[str], *, balance: Balance | None = None, limits: Limits | None = None
) -> FastAPI:
    """An ASGI application that spreads requests over replicas, which check API keys themselves."""
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
        # Idle connections are closed before the replica's uvicorn closes them, after 5 seconds.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with (
            aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),  # cookies must not be shared between clients
                max_field_size=2**16,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            ) as router.session,
            watching(replicas, router.session),
        ):
            yield

    app = FastAPI(title="kvfold", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, limits=limits, key=None)
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_router_routes(app, replicas, registry)
    app.add_route("/{path:path}", router.response, methods=METHODS)
    return app


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return APIError(error.status_code, str(error.detail), headers=error.headers).response


def _add_router_routes(app: FastAPI, replicas: Replicas, registry: CollectorRegistry) -> None:
    @app.api_route("/health", methods=ROUTER_METHODS)
    async def health() -> Response:
        states = {x.url: x.error or "ok" for x in replicas.all}
        any_healthy = any(x.healthy for x in replicas.all)
        status = "ok" if any_healthy else "no replica is healthy"
        return JSONResponse({"status": status, "replicas": states}, 200 if any_healthy else 503)

    @app.api_route("/metrics", methods=ROUTER_METHODS)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
