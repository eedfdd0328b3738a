"""What a proxy passes on: targets and headers as they came, and events of streams, whole ones.

What the client library would change is refused.
"""

import json
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import aiohttp
from starlette.requests import Request
from yarl import URL

from kvfold.server.errors import APIError

Pairs = list[tuple[bytes, bytes]]
# Headers of one connection (RFC 9110, 7.6.1), and those that are written anew.
OF_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"}
OF_CONNECTION |= {b"transfer-encoding", b"proxy-authenticate", b"proxy-authorization", b"expect"}
OF_REQUEST = OF_CONNECTION | {b"host", b"content-length"}
OF_REQUEST |= {b"accept-encoding"}  # an error could not be added to a compressed stream
OF_ANSWER = OF_CONNECTION | {b"content-length", b"date"}  # the date is uvicorn's
CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
LAST_EVENT = re.compile(rb"data: ?\[DONE\]\s*\Z")
ENDS_WITH_DONE = ("/v1/completions", "/v1/chat/completions")  # streams of others end as they like


class Cut(aiohttp.ClientPayloadError):
    """An answer that ended too early, or cannot be passed on, of a replica that is alive."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A request as replicas get it. path, query: as the client sent them."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes

    @classmethod
    async def of(cls, request: Request) -> "Passed":
        """Raises APIError for what aiohttp would change, and for a path that is none: the route
        matches the path without its %2F, which no replica is asked for."""
        scope = request.scope
        path, query = scope["raw_path"].decode("ascii"), scope["query_string"].decode("ascii")
        if not path.startswith("/"):
            raise APIError(400, "the target of the request must begin with /, and not with %2F")
        if "#" in path + query:
            raise APIError(400, "the target of the request has a #; send %23 for it")
        headers = [
            (name.decode(), _text_of(name, value))
            for name, value in _without(scope["headers"], OF_REQUEST)
        ]
        body = await request.body()
        return cls(method=request.method, path=path, query=query, headers=headers, body=body)

    def url(self, replica: str) -> URL:
        """Where to ask: the host is the replica's, whatever the path holds."""
        base = URL(replica)
        return URL.build(
            scheme=base.scheme,
            authority=base.raw_authority,
            path=base.raw_path.rstrip("/") + self.path,
            query_string=self.query,
            encoded=True,
        )


def _text_of(name: bytes, value: bytes) -> str:
    """A header's value for aiohttp, which writes it in UTF-8. Raises APIError."""
    if CONTROL.search(value):
        raise _header_error(name, "a control character")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _header_error(name, "bytes that are not UTF-8") from None


def _header_error(name: bytes, what: str) -> APIError:
    message = f"the header {name.decode()} holds {what}; send text in UTF-8"
    return APIError(400, message, code="invalid_header")


def answer_headers(answer: aiohttp.ClientResponse) -> Pairs:
    """An answer's headers as they came. Raises Cut for what no server can send."""
    for name, value in answer.raw_headers:
        if CONTROL.search(value):
            raise Cut(f"its header {name.decode()} holds a control character")
    return _without(((name.lower(), value) for name, value in answer.raw_headers), OF_ANSWER)


def _without(headers: Iterable[tuple[bytes, bytes]], names: set[bytes]) -> Pairs:
    """Headers but those of `names`, and those that the header Connection names."""
    pairs = list(headers)
    named = [value for name, value in pairs if name == b"connection"]
    left_out = names | {x.strip().lower() for x in b",".join(named).split(b",")}
    return [(name, value) for name, value in pairs if name not in left_out]


def length_header(answer: aiohttp.ClientResponse, body: bytes) -> Pairs:
    """The Content-Length of an answer that was read whole. One without a body keeps what it says of
    the body that it would have."""
    if answer.method == "HEAD" or answer.status in (204, 304):
        stated = answer.headers.get("Content-Length")
        return [] if stated is None else [(b"content-length", stated.encode())]
    return [(b"content-length", str(len(body)).encode())]


async def read_whole(answer: aiohttp.ClientResponse) -> bytes:
    """The body. Raises Cut where its length is not stated and it is no whole JSON."""
    body = await answer.read()
    stated = "Content-Length" in answer.headers or "Transfer-Encoding" in answer.headers
    if not stated and answer.content_type == "application/json" and answer.method != "HEAD":
        try:
            json.loads(body)
        except ValueError:
            raise Cut(f"its JSON ended after {len(body)} bytes") from None
    return body


class Events(AsyncIterator[bytes]):
    """Server-sent events of an answer as they come, one or several whole ones at a time.

    Raises Cut where a stream of OpenAI's ends without [DONE], in place of what is left of it.
    """

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._content = answer.content
        self._needs_done = answer.status == 200 and answer.url.path.endswith(ENDS_WITH_DONE)
        self._pending = bytearray()  # of an event that is not whole yet
        self._done = False

    async def __anext__(self) -> bytes:
        while piece := await self._content.readany():
            searched = max(0, len(self._pending) - 3)
            self._pending += piece
            if end := _end_of_events(self._pending, searched):
                return self._take(end)
        if self._needs_done and not (self._done or LAST_EVENT.search(self._pending[-64:])):
            raise Cut("its stream ended without [DONE]")
        if not self._pending:
            raise StopAsyncIteration
        return self._take(len(self._pending))

    def _take(self, size: int) -> bytes:
        events = bytes(self._pending[:size])
        del self._pending[:size]
        self._done = LAST_EVENT.search(events[-64:]) is not None
        return events


def _end_of_events(data: bytearray, start: int) -> int:
    """Where the last whole event ends; 0: there is none. start: nothing ends before it."""
    ends = ((data.rfind(blank, start), len(blank)) for blank in (b"\n\n", b"\r\n\r\n"))
    return max(place + length if place >= 0 else 0 for place, length in ends)
