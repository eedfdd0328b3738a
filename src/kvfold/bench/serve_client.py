"""A client for OpenAI-compatible servers that sends requests at given times and records when their
text arrives."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from kvfold.bench.serve_load import Prompts, TimedRequest

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_LINE = 2**22  # bytes of a streamed event
Done = Callable[[int, int], None]


class Unreachable(ValueError):
    """The server cannot be reached, or does not speak OpenAI's protocol."""


@dataclass(kw_only=True)
class Outcome:
    """The result of one request. In seconds after the start: at, when it was due; sent; events,
    when text arrived; ended. error: why the answer is missing or incomplete."""

    at: float
    prompt_tokens: int
    output_tokens: int = 0
    sent: float = 0.0
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # if the server was asked for them
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.events) and self.output_tokens > 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token since the request was due: a late client hides nothing."""
        return self.events[0] - self.at

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces of text."""
        return [b - a for a, b in pairwise(self.events)]

    @property
    def jct(self) -> float:
        """Job completion time in seconds."""
        return self.ended - self.at

    @property
    def normalised(self) -> float:
        """Normalised latency: job completion time per output token (ZACK §6.2, Fig. 15)."""
        return self.jct / self.output_tokens

    @property
    def tpot(self) -> float:
        """Time per output token: mean seconds of a token after the first; 0 for a single token."""
        return (self.events[-1] - self.events[0]) / max(self.output_tokens - 1, 1)


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server to send requests to. url: with or without /v1. plain: send only fields of OpenAI's
    API. return_token_ids: ask for the token ids of answers, which kvfold and vLLM then send."""

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    plain: bool = False
    return_token_ids: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is no URL; give one such as http://127.0.0.1:8000")

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the server. max_tokens: of a prompt and its answer, if the server says."""

    name: str
    max_tokens: int | None


class Client:
    """Sends requests to one model of a server. `connected` creates it."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, model: Model) -> None:
        self.server, self.session, self.model = server, session, model

    async def token_ids(self, text: str) -> list[int] | None:
        """Token ids of a text by the server's /tokenize, which vLLM and kvfold have; None without
        it."""
        body = {"model": self.model.name, "prompt": text, "add_special_tokens": False}
        async with self.session.post(f"{self.server.root}/tokenize", json=body) as answer:
            if answer.status != 200:
                return None
            ids = (await answer.json()).get("tokens")
            return ids or None

    async def replay(
        self,
        requests: Sequence[TimedRequest],
        prompts: Prompts,
        *,
        name: str,
        concurrency: int | None,
        seconds: float,
        done: Done,
    ) -> list[Outcome]:
        """Send every request when it is due, whatever the state of the others, with at most
        `concurrency` open at once. After `seconds`, open requests are abandoned and the rest are
        not sent. Questions about a document are due when the one before has been answered."""
        total = sum(x.questions for x in requests)
        slots = asyncio.Semaphore(concurrency or total)
        start, ended = time.perf_counter(), 0

        async def send(prompt: list[int] | str, request: TimedRequest, at: float) -> Outcome:
            nonlocal ended
            outcome = Outcome(at=at, prompt_tokens=request.prompt)
            try:
                async with asyncio.timeout(seconds - (time.perf_counter() - start)):
                    await asyncio.sleep(at - (time.perf_counter() - start))
                    async with slots:
                        outcome.sent = time.perf_counter() - start
                        await self.ask(prompt, request.output, outcome, start)
            except TimeoutError:
                outcome.error = f"not done after {seconds:g} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                outcome.error = f"{type(error).__name__}: {error}"
            outcome.ended = time.perf_counter() - start
            ended += 1
            done(ended, total)
            return outcome

        async def send_all(name: str, request: TimedRequest) -> list[Outcome]:
            if request.questions == 1:
                return [await send(prompts.cut(name, request.prompt), request, request.at)]
            outcomes: list[Outcome] = []
            for number in range(request.questions):
                prompt = prompts.ask(name, request.prompt, number)
                at = outcomes[-1].ended if outcomes else request.at
                outcomes.append(await send(prompt, request, at))
            return outcomes

        sent = await asyncio.gather(*(send_all(f"{name} {i}", x) for i, x in enumerate(requests)))
        return [outcome for outcomes in sent for outcome in outcomes]

    def _body(self, prompt: list[int] | str, output: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.server.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.server.return_token_ids:
            body["return_token_ids"] = True
        return body if self.server.plain else body | {"ignore_eos": True}

    async def ask(
        self, prompt: list[int] | str, output: int, outcome: Outcome, start: float
    ) -> None:
        """Send one request for an answer of `output` tokens, and add what comes to its outcome.
        start: the time from which the outcome counts."""
        body = self._body(prompt, output)
        url = self.server.root + PATHS[self.server.endpoint]
        async with self.session.post(url, json=body) as answer:
            if answer.status != 200:
                outcome.error = f"HTTP {answer.status}: {(await answer.text())[:200]}"
                return
            async for line in answer.content:
                if line.startswith(b"data:") and not _read(line[5:].strip(), outcome, start):
                    break
        if outcome.error is None and outcome.finish_reason is None:
            outcome.error = "the stream broke off"


def _read(data: bytes, outcome: Outcome, start: float) -> bool:
    """Add a streamed event to an outcome. Returns whether more events may follow."""
    if data == b"[DONE]":
        return False
    event = json.loads(data)
    if "error" in event:
        outcome.error = f"{event['error'].get('message', event['error'])}"[:200]
        return False
    if usage := event.get("usage"):
        outcome.output_tokens = usage["completion_tokens"]
        outcome.prompt_tokens = usage["prompt_tokens"]
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or choice
        token_ids = choice.get("token_ids") or ()
        outcome.token_ids += token_ids
        text = delta.get("text") or delta.get("content") or ""
        if text or token_ids:
            outcome.events.append(time.perf_counter() - start)
            outcome.text += text
            if not usage:  # count one token a piece until the server reports the number
                outcome.output_tokens = max(outcome.output_tokens, len(outcome.events))
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
    return True


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Client]:
    """A client of a server's model. Raises Unreachable if it has no such model."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        read_bufsize=MAX_LINE,
    ) as session:
        yield Client(server, session, await _find_model(server, session))


async def _find_model(server: Server, session: aiohttp.ClientSession) -> Model:
    url = f"{server.root}/v1/models"
    try:
        async with session.get(url) as answer:
            status, text = answer.status, await answer.text()
        listed = json.loads(text)["data"]
        models: dict[str, int | None] = {x["id"]: x.get("max_model_len") for x in listed}
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"{url} cannot be reached: {error}; is the server running?") from None
    except (ValueError, KeyError, TypeError):
        raise Unreachable(f"{url} does not list models: HTTP {status}: {text[:100]}") from None
    name = server.model or (next(iter(models)) if len(models) == 1 else "")
    if name not in models:
        raise Unreachable(f"{url} has models {', '.join(models)}; name one of them with --model")
    return Model(name=name, max_tokens=models[name])
