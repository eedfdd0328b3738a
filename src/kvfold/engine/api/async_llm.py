"""LLM for event loops (asyncio): a thread steps the engine, and other threads tokenise."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvfold.engine.api.grammar import GrammarGuide
from kvfold.engine.api.llm import (
    LLM,
    Completion,
    PromptSpec,
    RequestBuilder,
    completion_of,
)
from kvfold.engine.api.stream import OutputDecoder, OutputReader
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.packed import PackedContext
from kvfold.engine.requests.prompts import Prompt
from kvfold.engine.requests.request import CacheParams, Request, SamplingParams, StepOutput
from kvfold.utils.tokens import encode_prompt

logger = logging.getLogger(__name__)
COMPILERS = 4  # grammars compiled at the same time, each in a process
LONG = 2**15  # characters or token ids that take 0.03 s of a CPU core to tokenise
OpenRequest = tuple[Request, OutputDecoder]


class EngineFault(RuntimeError):
    """The engine has failed and serves no more requests."""


@dataclass(eq=False)
class _Mailbox:
    """Outputs on their way to an event loop, which waits for `news`."""

    loop: asyncio.AbstractEventLoop
    outputs: deque[StepOutput] = field(default_factory=deque)  # a deque's methods are atomic
    news: asyncio.Event = field(default_factory=asyncio.Event)


class EngineThread:
    """Steps an engine in a thread while submitted requests are open. A slow reader does not block
    it: outputs wait in mailboxes, at most as many as a request has tokens.

    fault: the error that stopped the engine, if any. All open requests then end with reason
        "error".
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fault: BaseException | None = None
        self._open: dict[int, _Mailbox] = {}  # mailbox of each request that has not ended
        self._full: deque[_Mailbox] = deque()  # mailboxes with new outputs
        self._lock, self._work, self._closed = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="kvfold-engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Number of submitted requests that have not ended."""
        return len(self._open)

    def submit(self, request: Request, box: _Mailbox) -> None:
        """Queue a request. Raises EngineFault if the engine has stopped."""
        with self._lock:
            if self.fault is not None or self._closed:
                raise EngineFault(f"the engine {self._state}")
            self._open[request.id] = box
        self.engine.submit(request, partial(self._deliver, box))
        self._work.set()

    def cancel(self, id: int) -> None:
        """End a request, unless the engine has failed and ended it already."""
        if self.fault is None:
            self.engine.cancel(id)

    def close(self) -> None:
        """Cancel open requests, and stop the thread after the current step."""
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
                    self.engine.step_or_wait(())
                    self._tell()
                elif not self.engine.run_idle():
                    self._work.wait()
                    self._work.clear()
        except BaseException as error:  # our bug, or a lost device: no state can be trusted
            logger.critical("the engine failed; it serves no more requests", exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.fault = error
        for id, box in tuple(self._open.items()):
            why = f"the engine {self._state}"
            ended = StepOutput(id=id, token_ids=(), finish_reason="error", error=why)
            self._deliver(box, ended)
        self._tell()

    def _deliver(self, box: _Mailbox, output: StepOutput) -> None:
        box.outputs.append(output)
        self._full.append(box)
        if output.finish_reason is not None:
            self._open.pop(output.id, None)

    def _tell(self) -> None:
        """Notify each event loop once of its mailboxes with new outputs."""
        boxes_of_loop: dict[asyncio.AbstractEventLoop, set[_Mailbox]] = {}
        while self._full:
            box = self._full.popleft()
            boxes_of_loop.setdefault(box.loop, set()).add(box)
        for loop, boxes in boxes_of_loop.items():
            try:
                loop.call_soon_threadsafe(_ring, boxes)
            except RuntimeError:  # the loop is closed, so nobody reads these outputs
                for id in [id for id, box in tuple(self._open.items()) if box in boxes]:
                    self.cancel(id)


def _ring(boxes: Iterable[_Mailbox]) -> None:
    for box in boxes:
        box.news.set()


class AsyncStream(OutputReader, AsyncIterator[StepOutput]):
    """The outputs of requests as they come, in the event loop that opened the stream. Leaving an
    `async with` block closes it.

    requests: by id, in the order of submission.
    """

    def __init__(self, driver: EngineThread, opened: Sequence[OpenRequest]) -> None:
        super().__init__(driver.cancel)
        self._box = _Mailbox(asyncio.get_running_loop())
        self.requests = {request.id: request for request, _ in opened}
        for request, decoder in opened:
            driver.submit(request, self._box)
            self._decoders[request.id] = decoder

    async def __anext__(self) -> StepOutput:
        box = self._box
        while self._decoders:
            box.news.clear()
            if not box.outputs:
                await box.news.wait()
                continue
            if (output := self._decode(box.outputs.popleft())) is not None:
                return output
        raise StopAsyncIteration

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _size(prompt: Prompt) -> int:
    return len(prompt) if isinstance(prompt, str | Sequence) else 0


def _parts(specs: Sequence[PromptSpec]) -> list[list[PromptSpec]]:
    """Split requests, in order, into parts of at most LONG characters or token ids, or of one
    prompt. Requests with the same prompt, which is tokenised once, are in one part."""
    parts: list[list[PromptSpec]] = []
    total, previous_prompt = 0, None
    for spec in specs:
        size = 0 if spec[0] is previous_prompt else _size(spec[0])
        if not parts or total + size > LONG:
            parts, total = [*parts, []], 0
        parts[-1].append(spec)
        total, previous_prompt = total + size, spec[0]
    return parts


class AsyncLLM:
    """An `LLM` for event loops. One thread runs all steps, two tokenise (one of them long texts),
    and others wait for grammars, whose compilation may take seconds.

    model: what `LLM` takes, with its settings; or an LLM, which others may continue to use. Close
        it, or use it in an `async with` block: its threads live until then.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        if isinstance(model, LLM) and settings:
            raise ValueError(f"an LLM has its settings already; got {', '.join(settings)} too")
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self.driver = EngineThread(self.llm.engine)
        self._closed = False
        self._leave: set[threading.Event] = set()  # stop events of grammar compilations
        if self.llm.tokenizer is not None:  # the first call may modify it: not thread-safe
            encode_prompt(self.llm.tokenizer, "a")
        self._tokenising = ThreadPoolExecutor(1, "kvfold-tokenise")
        self._long = ThreadPoolExecutor(1, "kvfold-tokenise-long")
        self._compiling = ThreadPoolExecutor(COMPILERS, "kvfold-grammar")

    @property
    def fault(self) -> BaseException | None:
        """The error that stopped the engine, if any. It then serves no more requests."""
        return self.driver.fault

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
        context: PackedContext | None = None,
    ) -> Completion:
        """Complete one prompt, after a packed context if there is one. Cancelling the task cancels
        the request. Raises ValueError if the request can never be served, EngineFault if the engine
        has failed."""
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
        """The outputs of one request as they come: `async for output in await llm.stream(prompt)`.
        Raises like `generate`, before it returns."""
        return await self.open([(prompt, sampling, cache)], context)

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
    ) -> Completion:
        """The assistant's answer to a conversation, see `LLM.chat`."""
        prompt = await self.run(self.llm.encode_chat, messages)
        return await self.generate(prompt, sampling, cache=cache)

    async def open(
        self,
        specs: Sequence[PromptSpec],
        context: PackedContext | None = None,
        check: Callable[[Sequence[OpenRequest]], None] | None = None,
    ) -> AsyncStream:
        """The outputs of several requests as they come. All of them are queued, or none.

        context: packed context that all start from. check: called with all requests before one is
            queued, and may raise.
        """
        guides = await self._guides(specs)  # keeps the grammars alive until requests use them
        opening, opened = RequestBuilder(self.llm, context), list[OpenRequest]()
        for part in _parts(specs):  # other calls may run between two parts
            size = max(_size(prompt) for prompt, _, _ in part)
            opened += await self.run(opening.requests, part, size=size)
        del guides
        if check is not None:
            check(opened)
        return AsyncStream(self.driver, opened)

    async def run(self, function: Any, *arguments: Any, size: int = 0) -> Any:
        """Call a slow function, such as a tokenizer, in a thread. size: characters or tokens of its
        input; long inputs have their own thread, so that short ones do not wait for them. A call
        that is cancelled before it starts is never made. Raises EngineFault after `close`."""
        thread = self._long if size > LONG else self._tokenising
        return await self._call(thread, function, *arguments)

    async def _call(self, thread: ThreadPoolExecutor, function: Any, *arguments: Any) -> Any:
        """Call a function in a thread. Raises EngineFault after `close`."""
        if self._closed:
            raise EngineFault("the engine was closed")
        return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)

    async def _guides(self, specs: Sequence[PromptSpec]) -> list[GrammarGuide]:
        """Compile the grammars of requests in advance. Cancelling stops it."""
        guided = {x.identity_but_seed: x for _, x, _ in specs if x is not None and x.guided}
        if not guided:
            return []
        self._leave.add(leave := threading.Event())
        try:
            guides: list[GrammarGuide] = await self._call(
                self._compiling,
                lambda: [self.llm.grammars.guide(x, leave) for x in guided.values()],
            )
            return guides
        finally:
            leave.set()
            self._leave.discard(leave)

    def close(self) -> None:
        """Cancel open requests, and stop the threads."""
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
