"""A client of any OpenAI server: sends requests at their times and keeps when their text came."""

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

from kvfold.bench.serve_load import Job, Prompts

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LONGEST_LINE = 2**22  # bytes of an event
Done = Callable[[int, int], None]


class Unreachable(ValueError):
    """A server that does not answer as OpenAI's do."""


@dataclass(kw_only=True)
class Outcome:
    """What became of a request. Seconds after the start: at, when it was due; sent; events, when
    text came; ended. error: why it has no whole answer."""

    at: float
    prompt_tokens: int
    output_tokens: int = 0
    sent: float = 0.0
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.events) and self.output_tokens > 0

    @property
    def ttft(self) -> float:
        """From when it was due, so that a client that is late hides nothing."""
        return self.events[0] - self.at

    @property
    def gaps(self) -> list[float]:
        """Between pieces of text."""
        return [b - a for a, b in pairwise(self.events)]

    @property
    def jct(self) -> float:
        """Job completion time."""
        return self.ended - self.at

    @property
    def normalised(self) -> float:
        """JCT over output tokens (ZACK §6.2, Fig. 15)."""
        return self.jct / self.output_tokens

    @property
    def tpot(self) -> float:
        """Mean time of an output token after the first; 0 of a single one."""
        return (self.events[-1] - self.events[0]) / max(self.output_tokens - 1, 1)


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where to ask and how. url: with or without /v1; plain: OpenAI's own fields alone."""

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    plain: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is no URL; give one such as http://127.0.0.1:8000")

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class Model:
    """max_tokens: of a prompt and its answer, where the server tells it."""

    name: str
    max_tokens: int | None


class Client:
    """Open it with `connected`."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, model: Model) -> None:
        self.server, self.session, self.model = server, session, model

    async def token_ids(self, text: str) -> list[int] | None:
        """As the server's tokenizer says; None where it has no /tokenize, as vLLM and kvfold do."""
        body = {"model": self.model.name, "prompt": text, "add_special_tokens": False}
        async with self.session.post(f"{self.server.root}/tokenize", json=body) as answer:
            if answer.status != 200:
                return None
            found = (await answer.json()).get("tokens")
            return found or None

    async def replay(
        self,
        jobs: Sequence[Job],
        prompts: Prompts,
        *,
        name: str,
        concurrency: int | None,
        seconds: float,
        done: Done,
    ) -> list[Outcome]:
        """Send every job when it is due, whatever became of the others, with at most `concurrency`
        open; after `seconds` what is open is left, and what is not sent never is."""
        slots = asyncio.Semaphore(concurrency or len(jobs))
        start, ended = time.perf_counter(), 0

        async def one(number: int, job: Job) -> Outcome:
            nonlocal ended
            outcome = Outcome(at=job.at, prompt_tokens=job.prompt)
            body = self._body(prompts.cut(f"{name} {number}", job.prompt), job.output)
            try:
                async with asyncio.timeout(seconds - (time.perf_counter() - start)):
                    await asyncio.sleep(job.at - (time.perf_counter() - start))
                    async with slots:
                        outcome.sent = time.perf_counter() - start
                        await self._ask(body, outcome, start)
            except TimeoutError:
                outcome.error = f"not done after {seconds:g} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                outcome.error = f"{type(error).__name__}: {error}"
            outcome.ended = time.perf_counter() - start
            ended += 1
            done(ended, len(jobs))
            return outcome

        return await asyncio.gather(*(one(i, job) for i, job in enumerate(jobs)))

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
        return body if self.server.plain else body | {"ignore_eos": True}

    async def _ask(self, body: dict[str, Any], outcome: Outcome, start: float) -> None:
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
    """Take an event; whether others may follow."""
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
        if text := delta.get("text") or delta.get("content") or "":
            outcome.events.append(time.perf_counter() - start)
            outcome.text += text
            if not usage:  # until the server says how many: one a piece
                outcome.output_tokens = max(outcome.output_tokens, len(outcome.events))
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
    return True


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Client]:
    """A client of a server's model. Raises Unreachable where there is none."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        read_bufsize=LONGEST_LINE,
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
