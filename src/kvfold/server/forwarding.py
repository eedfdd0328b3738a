"""Forward HTTP requests to a replica and its responses to the client, unchanged.

Paths, headers and bodies stay as they are; server-sent events are forwarded whole. What the client
library (aiohttp) would change is refused.
"""

import json
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import aiohttp
from starlette.requests import Request
from yarl import URL

from kvfold.server.errors import APIError

Headers = list[tuple[bytes, bytes]]
# Hop-by-hop headers (RFC 9110, 7.6.1), and headers that are set anew.
HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"}
HOP_BY_HOP |= {b"transfer-encoding", b"proxy-authenticate", b"proxy-authorization", b"expect"}
DROPPED_FROM_REQUEST = HOP_BY_HOP | {b"host", b"content-length"}
DROPPED_FROM_REQUEST |= {b"accept-encoding"}  # no error event fits into a compressed stream
DROPPED_FROM_RESPONSE = HOP_BY_HOP | {b"content-length", b"date"}  # uvicorn sets the date
CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
LAST_EVENT = re.compile(rb"data: ?\[DONE\]\s*\Z")
ENDS_WITH_DONE = ("/v1/completions", "/v1/chat/completions")  # paths whose streams end with [DONE]


class BrokenResponse(aiohttp.ClientPayloadError):
    """A response that ended early or cannot be forwarded, although its replica is alive."""


@dataclass(frozen=True, kw_only=True)
class ForwardedRequest:
    """A request as it is sent to a replica. path, query: as the client sent them, still encoded."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes

    @classmethod
    async def from_request(cls, request: Request) -> "ForwardedRequest":
        """Read a request from a client.

        Raises APIError for what aiohttp would change, and for a path that begins with %2F: it is
        not valid, although the router's route matches it decoded.
        """
        scope = request.scope
        path, query = scope["raw_path"].decode("ascii"), scope["query_string"].decode("ascii")
        if not path.startswith("/"):
            raise APIError(400, "the target of the request must begin with /, and not with %2F")
        if "#" in path + query:
            raise APIError(400, "the target of the request has a #; send %23 for it")
        headers = [
            (name.decode(), _header_text(name, value))
            for name, value in _without(scope["headers"], DROPPED_FROM_REQUEST)
        ]
        body = await request.body()
        return cls(method=request.method, path=path, query=query, headers=headers, body=body)

    def url(self, replica: str) -> URL:
        """The URL at a replica. Its host is the replica's, whatever the path contains."""
        base = URL(replica)
        return URL.build(
            scheme=base.scheme,
            authority=base.raw_authority,
            path=base.raw_path.rstrip("/") + self.path,
            query_string=self.query,
            encoded=True,
        )


def _header_text(name: bytes, value: bytes) -> str:
    """A header's value as text, which aiohttp sends as UTF-8. Raises APIError."""
    if CONTROL.search(value):
        raise _header_error(name, "a control character")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _header_error(name, "bytes that are not UTF-8") from None


def _header_error(name: bytes, problem: str) -> APIError:
    message = f"the header {name.decode()} holds {problem}; send text in UTF-8"
    return APIError(400, message, code="invalid_header")


def response_headers(response: aiohttp.ClientResponse) -> Headers:
    """The headers of a response, unchanged. Raises BrokenResponse for values that no server can
    send."""
    for name, value in response.raw_headers:
        if CONTROL.search(value):
            raise BrokenResponse(f"its header {name.decode()} holds a control character")
    return _without(
        ((name.lower(), value) for name, value in response.raw_headers), DROPPED_FROM_RESPONSE
    )


def _without(headers: Iterable[tuple[bytes, bytes]], names: set[bytes]) -> Headers:
    """Headers except `names` and those that the header Connection lists."""
    all_headers = list(headers)
    connection = [value for name, value in all_headers if name == b"connection"]
    dropped = names | {x.strip().lower() for x in b",".join(connection).split(b",")}
    return [(name, value) for name, value in all_headers if name not in dropped]


def length_header(response: aiohttp.ClientResponse, body: bytes) -> Headers:
    """The Content-Length of a response that was read whole. A response without a body (HEAD, 204,
    304) keeps the length that it states."""
    if response.method == "HEAD" or response.status in (204, 304):
        stated = response.headers.get("Content-Length")
        return [] if stated is None else [(b"content-length", stated.encode())]
    return [(b"content-length", str(len(body)).encode())]


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read a response's body. Raises BrokenResponse if its length is not stated and it is
    incomplete JSON."""
    body = await response.read()
    stated = "Content-Length" in response.headers or "Transfer-Encoding" in response.headers
    if not stated and response.content_type == "application/json" and response.method != "HEAD":
        try:
            json.loads(body)
        except ValueError:
            raise BrokenResponse(f"its JSON ended after {len(body)} bytes") from None
    return body


class Events(AsyncIterator[bytes]):
    """Server-sent events of a response as they arrive: one or more complete events at a time.

    Raises BrokenResponse, instead of the incomplete rest, if an OpenAI stream ends without [DONE].
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._needs_done = response.status == 200 and response.url.path.endswith(ENDS_WITH_DONE)
        self._pending = bytearray()  # the beginning of an incomplete event
        self._done = False

    async def __anext__(self) -> bytes:
        while data := await self._content.readany():
            searched = max(0, len(self._pending) - 3)
            self._pending += data
            if end := _end_of_events(self._pending, searched):
                return self._take_events(end)
        if self._needs_done and not (self._done or LAST_EVENT.search(self._pending[-64:])):
            raise BrokenResponse("its stream ended without [DONE]")
        if not self._pending:
            raise StopAsyncIteration
        return self._take_events(len(self._pending))

    def _take_events(self, size: int) -> bytes:
        events = bytes(self._pending[:size])
        del self._pending[:size]
        self._done = LAST_EVENT.search(events[-64:]) is not None
        return events


def _end_of_events(data: bytearray, start: int) -> int:
    """Where the last complete event in `data` ends; 0 if there is none. start: no event ends before
    it."""
    ends = ((data.rfind(separator, start), len(separator)) for separator in (b"\n\n", b"\r\n\r\n"))
    return max(place + length if place >= 0 else 0 for place, length in ends)
