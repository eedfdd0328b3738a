"""What clients are told when a server ends before it has answered them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from kvfold.server.errors import APIError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
CODE = "shutting_down"
SECONDS = 1.0  # for a client to take the last words


def ending() -> APIError:
    """A router, or a client, may ask another server."""
    return APIError(
        503,
        "the server is shutting down and did not get to the end of this; send it again",
        code=CODE,
        headers={"Retry-After": "1", "Connection": "close"},
    )


def error_events(error: APIError) -> bytes:
    """The end of a stream that failed."""
    return f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n".encode()


def tells_of_ending(events: bytes) -> bool:
    """Whether a stream begins with the error of a server that ends."""
    first = events.partition(b"\n\n")[0].removeprefix(b"data: ")
    try:
        content = json.loads(first)
    except ValueError:
        return False
    error = content.get("error") if isinstance(content, dict) else None
    return isinstance(error, dict) and error.get("code") == CODE


class Ending:
    """An ASGI application around another. Where uvicorn cancels a request, as it does when the time
    to drain is over, the client is told: a 503, or an error as a stream's last event."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        head: Message | None = None  # of the answer, once it has begun

        async def noted(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError, TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await _tell(head, scope, receive, send)


async def _tell(head: Message | None, scope: Message, receive: Receive, send: Send) -> None:
    if head is None:
        await ending().response(scope, receive, send)
    elif _is_stream(head):
        await send({"type": "http.response.body", "body": error_events(ending())})


def _is_stream(head: Message) -> bool:
    headers = dict(head.get("headers", ()))
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")
