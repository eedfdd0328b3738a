"""Text in, text out for event loops: an engine that a thread of its own steps."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvfold.engine.api.grammar import Guide
from kvfold.engine.api.llm import (
    LLM,
    Asked,
    Completion,
    Opening,
    completion_of,
)
from kvfold.engine.api.stream import Answer, Reading
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.packed import PackedContext
from kvfold.engine.requests.prompts import Prompt
from kvfold.engine.requests.request import CacheParams, Request, SamplingParams, StepOutput
from kvfold.utils.tokens import encode_prompt

logger = logging.getLogger(__name__)
COMPILERS = 4  # grammars that are compiled at once, each in a process
LONG = 2**15  # characters or token ids that take a while to read: 0.03 s of a core
Opened = tuple[Request, Answer]


class EngineFault(RuntimeError):
    """The engine failed, and serves nobody any more."""


@dataclass(eq=False)
class _Box:
    """Outputs on their way to an event loop, which is told with `news`."""

    loop: asyncio.AbstractEventLoop
    outputs: deque[StepOutput] = field(default_factory=deque)  # whose methods are atomic
    news: asyncio.Event = field(default_factory=asyncio.Event)


class EngineThread:
    """Steps an engine while requests that came by here are open. Nobody who reads can block it:
    outputs wait in boxes, at most as many as a request has tokens.

    fault: what ended it, if anything did. Every open request then ends with reason "error".
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fault: BaseException | None = None
        self._open: dict[int, _Box] = {}  # submitted, and not delivered to the end
        self._full: deque[_Box] = deque()  # boxes with news
        self._lock, self._work, self._closed = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="kvfold-engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._open)

    def submit(self, request: Request, box: _Box) -> None:
        """Queue a request. Raises EngineFault where nobody would serve it."""
        with self._lock:
            if self.fault is not None or self._closed:
                raise EngineFault(f"the engine {self._state}")
            self._open[request.id] = box
        self.engine.submit(request, partial(self._deliver, box))
        self._work.set()

    def cancel(self, id: int) -> None:
        """End a request, unless the engine failed and took all with it."""
        if self.fault is None:
            self.engine.cancel(id)

    def close(self) -> None:
        """Cancel what is open and end the thread, after the step in hand."""
        with self._lock:
            self._closed = True
        for id in tuple(self._open):
            self.cancel(id)
        self._work.set()
        self._thread.join()

    @property
    def _state(self) -> str:
        fault = self.fault
        return "was closed" if fault is None else f"failed: {type(fault).__name__}: {fault}"

    def _run(self) -> None:
        try:
            while self._open or not self._closed:
                if self._open:
                    self.engine.work(())
                    self._tell()
                else:
                    self._work.wait()
                    self._work.clear()
        except BaseException as error:  # our bug, or a device that is lost: nothing is sure now
            logger.critical("the engine failed; it serves nobody any more", exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.fault = error
        for id, box in tuple(self._open.items()):
            why = f"the engine {self._state}"
            ended = StepOutput(id=id, token_ids=(), finish_reason="error", error=why)
            self._deliver(box, ended)
        self._tell()

    def _deliver(self, box: _Box, output: StepOutput) -> None:
        box.outputs.append(output)
        self._full.append(box)
        if output.finish_reason is not None:
            self._open.pop(output.id, None)

    def _tell(self) -> None:
        """Say to every event loop once which boxes have news."""
        found: dict[asyncio.AbstractEventLoop, set[_Box]] = {}
        while self._full:
            box = self._full.popleft()
            found.setdefault(box.loop, set()).add(box)
        for loop, boxes in found.items():
            try:
                loop.call_soon_threadsafe(_ring, boxes)
            except RuntimeError:  # it was closed, and nobody is left to read
                for id in [id for id, box in tuple(self._open.items()) if box in boxes]:
                    self.cancel(id)


def _ring(boxes: Iterable[_Box]) -> None:
    for box in boxes:
        box.news.set()


class AsyncStream(Reading, AsyncIterator[StepOutput]):
    """Outputs of requests as they come, to their ends, in the event loop that opened it. Leaving an
    `async with` block closes it.

    requests: by id, in the order they were given.
    """

    def __init__(self, driver: EngineThread, opened: Sequence[Opened]) -> None:
        super().__init__(driver.cancel)
        self._box = _Box(asyncio.get_running_loop())
        self.requests = {request.id: request for request, _ in opened}
        for request, answer in opened:
            driver.submit(request, self._box)
            self._answers[request.id] = answer

    async def __anext__(self) -> StepOutput:
        box = self._box
        while self._answers:
            box.news.clear()
            if not box.outputs:
                await box.news.wait()
                continue
            if (output := self._read(box.outputs.popleft())) is not None:
                return output
        raise StopAsyncIteration

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _size(prompt: Prompt) -> int:
    return len(prompt) if isinstance(prompt, str | Sequence) else 0


def _parts(asked: Sequence[Asked]) -> list[list[Asked]]:
    """Requests in order, in parts of LONG characters or token ids, or of one prompt's. Choices of
    the same prompt, which is read once, are in one part."""
    parts: list[list[Asked]] = []
    total, before = 0, None
    for one in asked:
        size = 0 if one[0] is before else _size(one[0])
        if not parts or total + size > LONG:
            parts, total = [*parts, []], 0
        parts[-1].append(one)
        total, before = total + size, one[0]
    return parts


class AsyncLLM:
    """An `LLM` for event loops: a thread of its own takes all steps, two others tokenise, one of
    them long texts, and others wait for grammars, which may take seconds.

    model: what `LLM` takes, with its settings, or an LLM, which others may go on using. Close it,
    or use it in an `async with` block: its thread lives until then.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        if isinstance(model, LLM) and settings:
            raise ValueError(f"an LLM has its settings already; got {', '.join(settings)} too")
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self.driver = EngineThread(self.llm.engine)
        self._closed = False
        self._leave: set[threading.Event] = set()  # of those who wait for grammars
        if self.llm.tokenizer is not None:  # the first call may change it, and the others not
            encode_prompt(self.llm.tokenizer, "a")
        self._tokenising = ThreadPoolExecutor(1, "kvfold-tokenise")
        self._long = ThreadPoolExecutor(1, "kvfold-tokenise-long")
        self._compiling = ThreadPoolExecutor(COMPILERS, "kvfold-grammar")

    @property
    def fault(self) -> BaseException | None:
        """What the engine failed of, if it did: nothing is served any more."""
        return self.driver.fault

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
        context: PackedContext | None = None,
    ) -> Completion:
        """The completion of one prompt, behind a context, if any. Cancelling the task cancels the
        request. Raises ValueError for a prompt that can never be served, EngineFault where the
        engine failed."""
        async with await self.stream(prompt, sampling, cache=cache, context=context) as stream:
            return completion_of([output async for output in stream])

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
        context: PackedContext | None = None,
    ) -> AsyncStream:
        """Outputs of one request as they come: `async for output in await llm.stream(prompt)`.
        Raises as `generate` does, before it returns."""
        return await self.open([(prompt, sampling, cache)], context)

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
    ) -> Completion:
        """The answer to a conversation, as `LLM.chat`."""
        prompt = await self.run(self.llm.encode_chat, messages)
        return await self.generate(prompt, sampling, cache=cache)

    async def open(
        self,
        asked: Sequence[Asked],
        context: PackedContext | None = None,
        check: Callable[[Sequence[Opened]], None] | None = None,
    ) -> AsyncStream:
        """Outputs of several requests, all of them or none, as they come. context: what all of them
        go on from. check: may refuse the requests, before one of them is queued."""
        guides = await self._guides(asked)  # which keep their grammars until requests have them
        opening, opened = Opening(self.llm, context), list[Opened]()
        for part in _parts(asked):  # others have their turn between two
            size = max(_size(prompt) for prompt, _, _ in part)
            opened += await self.run(opening.requests, part, size=size)
        del guides
        if check is not None:
            check(opened)
        return AsyncStream(self.driver, opened)

    async def run(self, function: Any, *arguments: Any, size: int = 0) -> Any:
        """Call what takes a while, such as a tokenizer, beside the event loop. size: characters or
        tokens of what is read: long ones wait for each other, and nobody else for them. What is
        cancelled before its turn is never called."""
        loop = asyncio.get_running_loop()
        thread = self._long if size > LONG else self._tokenising
        return await loop.run_in_executor(thread, function, *arguments)

    async def _guides(self, asked: Sequence[Asked]) -> list[Guide]:
        """Of their grammars, so that `open` finds them ready. Cancelling ends the work."""
        guided = list({x.but_seed: x for _, x, _ in asked if x is not None and x.guided}.values())
        if not guided:
            return []
        self._leave.add(leave := threading.Event())
        if self._closed:
            leave.set()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._compiling, lambda: [self.llm.grammars.guide(x, leave) for x in guided]
            )
        finally:
            leave.set()
            self._leave.discard(leave)

    def close(self) -> None:
        """Cancel what is open, end the threads."""
        self._closed = True
        for leave in tuple(self._leave):
            leave.set()
        self.driver.close()
        self._tokenising.shutdown(cancel_futures=True)
        self._long.shutdown(cancel_futures=True)
        self._compiling.shutdown(cancel_futures=True)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)
