"""Checks of every request, whatever its route: API key, body size, time limits, client
disconnects."""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

from kvfold.server.errors import APIError
from kvfold.server.limits import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")
OPEN = ("/health", "/", "/docs", "/openapi.json")  # paths that need no API key


class HeadAsGet:
    """ASGI middleware that answers HEAD as GET; uvicorn leaves out the body."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


class Guard:
    """ASGI middleware that checks the API key, the size of a body and the time to send it, and
    drops clients that do not read their response.

    key: the API key; None: no key is needed.
    """

    def __init__(self, app: Any, limits: Limits, key: str | None) -> None:
        self.app, self.limits = app, limits
        self.secret = None if key is None else key.encode()
        self._size = 0  # bytes of all bodies received and not read by a route yet

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        slow = False

        async def send_in_time(message: Message) -> None:
            nonlocal slow
            try:
                async with asyncio.timeout(self.limits.send_seconds):
                    await send(message)
            except TimeoutError:
                slow = True
                raise

        try:
            self._check_key(scope)
            bodies = [await self._body(scope, receive)]
        except APIError as error:
            return await error.response(scope, receive, send_in_time)
        try:
            await self.app(scope, self._replayed(bodies, receive), send_in_time)
        except BaseException as error:
            if not slow or isinstance(error, asyncio.CancelledError):
                raise  # not for a slow client: it would not read an error either
        finally:
            self._take_body(bodies)

    def _check_key(self, scope: Message) -> None:
        if self.secret is None or scope["path"] in OPEN:
            return
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        right = hmac.compare_digest(key.strip().encode("latin-1"), self.secret)
        if kind.lower() != "bearer" or not right:
            raise APIError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, scope: Message, receive: Receive) -> bytes:
        """Read the whole body. Raises APIError if it is too long or takes too long.

        Up to `max_body` bytes more are read and dropped before the error is sent: a client that is
        still sending when the connection closes may never read it. A client that waits for "100
        Continue" gets the error at once.
        """
        headers, most = Headers(scope=scope), self.limits.max_body
        length = headers.get("content-length", "")
        if "expect" in headers and re.fullmatch("[0-9]{1,18}", length):
            self._check_size(int(length))
        parts, size, more_body = [], 0, True
        complete = False
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more_body and size <= 2 * most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise APIError(400, "the client left while it sent its request")
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                        self._size += len(part)
                        self._check_room()
                    more_body = message.get("more_body", False)
            self._check_size(size)
            complete = True
        except TimeoutError:
            raise APIError(
                408, f"the body took over {self.limits.body_seconds} s to arrive", headers=CLOSE
            ) from None
        finally:
            if not complete:
                self._size -= sum(map(len, parts))
        return b"".join(parts)

    def _take_body(self, bodies: list[bytes]) -> bytes:
        """The body, or b"" if it was taken already. It is not held here afterwards."""
        body = bodies.pop() if bodies else b""
        self._size -= len(body)
        return body

    def _replayed(self, bodies: list[bytes], receive: Receive) -> Receive:
        """A `receive` that returns the body, which was read already, and then continues with
        `receive`."""

        async def replay() -> Message:
            if not bodies:
                return await receive()
            return {"type": "http.request", "body": self._take_body(bodies), "more_body": False}

        return replay

    def _check_room(self) -> None:
        if self._size > self.limits.max_bodies:
            raise APIError(
                503,
                f"requests of {self.limits.max_bodies} bytes are being sent: try again",
                code="busy",
                headers=CLOSE | {"Retry-After": "1"},
            )

    def _check_size(self, size: int) -> None:
        most = self.limits.max_body
        if size > most:
            raise APIError(
                413,
                f"the body has {size} bytes or more, and {most} are the most; shorten the prompt",
                code="body_too_large",
                headers=CLOSE,
            )


CLOSE = {"Connection": "close"}


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises APIError (499) then.
    """
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client left")
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
