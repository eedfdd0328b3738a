"""What surrounds any route: who may ask, how much, how slowly, and whether anybody still waits."""

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
OPEN = ("/health", "/", "/docs", "/openapi.json")  # asked by what has no key


class HeadAsGet:
    """An ASGI application around another: answers HEAD as GET; uvicorn leaves out the body."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


class Guard:
    """An ASGI application before another: API key, bytes of a body, time to send it, and time for
    the client to read what it asked for.

    key: None lets everyone in.
    """

    def __init__(self, app: Any, limits: Limits, key: str | None) -> None:
        self.app, self.limits = app, limits
        self.secret = None if key is None else key.encode()
        self._size = 0  # bytes of all bodies that came and were not read yet

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        slow = False

        async def patient(message: Message) -> None:
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
            return await error.response(scope, receive, patient)
        try:
            await self.app(scope, self._replayed(bodies, receive), patient)
        except BaseException as error:
            if not slow or isinstance(error, asyncio.CancelledError):
                raise  # else it reads nothing, so that nothing can be told
        finally:
            self._take(bodies)

    def _check_key(self, scope: Message) -> None:
        if self.secret is None or scope["path"] in OPEN:
            return
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), self.secret)
        if kind.lower() != "bearer" or not right:
            raise APIError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, scope: Message, receive: Receive) -> bytes:
        """The whole body. Raises APIError where it is too long or too late.

        As much again is read and dropped before a refusal, which whoever still sends when the
        connection is closed may never read; a client that waits to be asked is told at once."""
        headers, most = Headers(scope=scope), self.limits.max_body
        length = headers.get("content-length", "")
        if "expect" in headers and re.fullmatch("[0-9]{1,18}", length):
            self._check_size(int(length))
        parts, size, more = [], 0, True
        whole = False
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more and size <= 2 * most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise APIError(400, "the client left while it sent its request")
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                        self._size += len(part)
                        self._check_room()
                    more = message.get("more_body", False)
            self._check_size(size)
            whole = True
        except TimeoutError:
            raise APIError(
                408, f"the body took over {self.limits.body_seconds} s to arrive", headers=CLOSE
            ) from None
        finally:
            if not whole:
                self._size -= sum(map(len, parts))
        return b"".join(parts)

    def _take(self, bodies: list[bytes]) -> bytes:
        """The body, where nobody took it yet. Nothing here holds it after that."""
        body = bodies.pop() if bodies else b""
        self._size -= len(body)
        return body

    def _replayed(self, bodies: list[bytes], receive: Receive) -> Receive:
        """`receive` of a body that was read already."""

        async def again() -> Message:
            if not bodies:
                return await receive()
            return {"type": "http.request", "body": self._take(bodies), "more_body": False}

        return again

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


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client leaves."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client left")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
