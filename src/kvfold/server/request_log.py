"""One log line per request for text."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.server.responses import GenerationResponse

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
PATHS = ("/v1/completions", "/v1/chat/completions")
ENTRY = "kvfold.request_log"  # key in a request's ASGI scope
# Logged statuses of a stream whose client disconnected, or whose server shut down.
CLIENT_LEFT, SERVER_ENDED = 499, 503


class Entry:
    """What is known about one request. response: None until the request is accepted."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.status: int | None = None  # of HTTP
        self.client_left = False
        self.response: GenerationResponse | None = None

    @property
    def line(self) -> str:
        """The log line: time, `ID in=TOKENS cached=TOKENS out=TOKENS first=SECONDS total=SECONDS
        status=STATUS`, with a dash for what is not known."""
        details = (
            "- in=- cached=- out=- first=-"
            if self.response is None
            else self._response_part(self.response)
        )
        total = time.monotonic() - self.began
        logged_at = time.strftime("%Y-%m-%d %H:%M:%S")
        return f"{logged_at} {details} total={total:.3f}s status={self.final_status}"

    def _response_part(self, response: "GenerationResponse") -> str:
        usage, first_token = response.usage, response.choices.first_token
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tokens = f"in={usage['prompt_tokens']} cached={cached} out={usage['completion_tokens']}"
        first = "-" if first_token is None else f"{first_token - self.began:.3f}s"
        return f"{response.head['id']} {tokens} first={first}"

    @property
    def final_status(self) -> int:
        """The HTTP status, or the status of the error that ended a stream after its 200."""
        response = self.response
        if self.status in (None, 200) and response is not None and response.status != 200:
            return response.status or (CLIENT_LEFT if self.client_left else SERVER_ENDED)
        return self.status or (CLIENT_LEFT if self.client_left else SERVER_ENDED)


class RequestLog:
    """ASGI middleware that calls `say` with a line for each request for text, once it has ended.
    Other requests, such as /health, which are often polled every second, are not logged."""

    def __init__(self, app: Any, say: Callable[[str], object]) -> None:
        self.app, self.say = app, say

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS:
            return await self.app(scope, receive, send)
        entry = Entry()

        async def note_disconnect() -> Message:
            message = await receive()
            entry.client_left |= message["type"] == "http.disconnect"
            return message

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self.app({**scope, ENTRY: entry}, note_disconnect, note_status)
        finally:
            self.say(entry.line)


def note_response(scope: MutableMapping[str, Any], response: "GenerationResponse") -> None:
    """Attach a request's response to its log entry, if requests are logged."""
    entry = scope.get(ENTRY)
    if entry is not None:
        entry.response = response
