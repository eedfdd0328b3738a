"""What clients receive when the server shuts down before their request is answered."""

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
SECONDS = 1.0  # most time to send a client the shutdown error


def shutdown_error() -> APIError:
    """The error of a server that shuts down: the client, or a router, may send the request
    elsewhere."""
    return APIError(
        503,
        "the server is shutting down and did not get to the end of this; send it again",
        code=CODE,
        headers={"Retry-After": "1", "Connection": "close"},
    )


def error_events(error: APIError) -> bytes:
    """The last server-sent events of a stream that failed."""
    return f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n".encode()


def is_shutdown_error(events: bytes) -> bool:
    """Whether a stream's first event is the error of a server that shuts down."""
    first = events.partition(b"\n\n")[0].removeprefix(b"data: ")
    try:
        content = json.loads(first)
    except ValueError:
        return False
    error = content.get("error") if isinstance(content, dict) else None
    return isinstance(error, dict) and error.get("code") == CODE


class ShutdownResponses:
    """ASGI middleware that answers the requests which uvicorn cancels at shutdown.

    uvicorn cancels a request when `drain_seconds` are over. The client then gets a 503, or an error
    as the last event of a stream that has begun.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        head: Message | None = None  # of the response, once it has begun

        async def send_and_note_head(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
            await send(message)

        try:
            await self.app(scope, receive, send_and_note_head)
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError, TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await _send_error(head, scope, receive, send)


async def _send_error(head: Message | None, scope: Message, receive: Receive, send: Send) -> None:
    if head is None:
        await shutdown_error().response(scope, receive, send)
    elif _is_stream(head):
        await send({"type": "http.response.body", "body": error_events(shutdown_error())})


def _is_stream(head: Message) -> bool:
    headers = dict(head.get("headers", ()))
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")
