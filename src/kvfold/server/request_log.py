"""One log line for every request that asks for text."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.server.responses import Reply

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
PATHS = ("/v1/completions", "/v1/chat/completions")
ENTRY = "kvfold.request_log"  # of a request's scope
LEFT, ENDED = 499, 503  # statuses of a stream whose client left, or whose server ended


class Entry:
    """What is known of one request. reply: None until the request is accepted."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.status: int | None = None  # of HTTP
        self.client_left = False
        self.reply: Reply | None = None

    @property
    def line(self) -> str:
        """`ID in=TOKENS cached=TOKENS out=TOKENS first=SECONDS total=SECONDS status=STATUS`, with a
        dash for what is not known."""
        known = (
            "- in=- cached=- out=- first=-" if self.reply is None else self._of_reply(self.reply)
        )
        total = time.monotonic() - self.began
        begin = time.strftime("%Y-%m-%d %H:%M:%S")
        return f"{begin} {known} total={total:.3f}s status={self.final_status}"

    def _of_reply(self, reply: "Reply") -> str:
        usage, first_token = reply.usage, reply.choices.first_token
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tokens = f"in={usage['prompt_tokens']} cached={cached} out={usage['completion_tokens']}"
        first = "-" if first_token is None else f"{first_token - self.began:.3f}s"
        return f"{reply.head['id']} {tokens} first={first}"

    @property
    def final_status(self) -> int:
        """The status of HTTP, or of what ended a stream that began with 200."""
        reply = self.reply
        if self.status in (None, 200) and reply is not None and reply.status != 200:
            return reply.status or (LEFT if self.client_left else ENDED)
        return self.status or (LEFT if self.client_left else ENDED)


class RequestLog:
    """An ASGI application around another: `say` is told a line for each request that asks for
    text, once it has ended. Requests that machines send every second, such as /health, have none.
    """

    def __init__(self, app: Any, say: Callable[[str], object]) -> None:
        self.app, self.say = app, say

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS:
            return await self.app(scope, receive, send)
        entry = Entry()

        async def watched_receive() -> Message:
            message = await receive()
            entry.client_left |= message["type"] == "http.disconnect"
            return message

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self.app({**scope, ENTRY: entry}, watched_receive, watched_send)
        finally:
            self.say(entry.line)


def note_reply(scope: MutableMapping[str, Any], reply: "Reply") -> None:
    """Tell the log which reply answers a request, where requests are logged."""
    entry = scope.get(ENTRY)
    if entry is not None:
        entry.reply = reply
