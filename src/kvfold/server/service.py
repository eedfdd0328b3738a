"""Requests of clients as requests of an engine: admitted, timed, and ended when nobody waits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec

from kvfold.engine.api.async_llm import AsyncLLM, AsyncStream, OpenRequest
from kvfold.engine.api.detokenizer import decoder_of
from kvfold.engine.requests.packed import PackedContext
from kvfold.engine.requests.prompts import Prompt
from kvfold.engine.requests.request import CacheParams, SamplingParams, StepOutput
from kvfold.server.errors import APIError, from_value_error
from kvfold.server.limits import Limits
from kvfold.server.metrics import Metrics
from kvfold.server.protocol import OURS, TokenizeBody
from kvfold.server.token_texts import TokenTexts
from kvfold.utils.errors import SettingError, renamed
from kvfold.utils.tokens import encode, encode_prompt, most_characters, surely_longer

PromptSpec = tuple[Prompt, SamplingParams, CacheParams]
MOST_SCORES = 2**20  # log-probabilities of prompts in an answer
MOST_TOKENIZED = 2**17  # tokens of a text that /tokenize counts, where no sequence is as long


class Echo(NamedTuple):
    """A prompt's text. typed: the client sent it, and no token ids."""

    text: str
    typed: bool


class Service:
    """A model under a name, with limits. contexts: what requests may begin with, by name. Raises
    ValueError for one that is of another model or cache."""

    def __init__(
        self, llm: AsyncLLM, name: str, limits: Limits, contexts: Mapping[str, PackedContext]
    ) -> None:
        for context in contexts.values():
            llm.llm.check_context(context)
        self.llm, self.name, self.limits, self.contexts = llm, name, limits, contexts
        self.created = int(time.time())
        self.metrics = Metrics(llm.llm, name, contexts)
        llm.llm.engine.hooks = self.metrics
        self._preparing = 0  # choices that are not with the engine yet
        self._reading = 0  # texts that are tokenised, or wait for it, and are no choices yet

    @property
    def tokenizer(self) -> Any:
        if self.llm.llm.tokenizer is None:
            raise APIError(400, "this model has no tokenizer: prompts are token ids")
        return self.llm.llm.tokenizer

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its outputs."""
        return self.llm.llm.runner.pool.max_tokens

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise APIError(
                404,
                f"the model {name!r:.100} does not exist; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @property
    def card(self) -> dict[str, Any]:
        """The model as OpenAI lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvfold",
            "root": self.name,
            "parent": None,
            "max_model_len": self.max_tokens,
            "contexts": {name: len(x.token_ids) for name, x in self.contexts.items()},
        }

    def context(self, name: str | None) -> PackedContext | None:
        """Of a name; None of none."""
        if name is None or name in self.contexts:
            return None if name is None else self.contexts[name]
        known = ", ".join(map(repr, self.contexts)) or "none: kvfold serve --context NAME=FILE"
        raise APIError(
            404,
            f"the context {name!r:.100} does not exist; this server has {known}",
            param="context",
            code="context_not_found",
        )

    async def encode_chat(
        self, turns: list[dict[str, str]], variables: dict[str, Any]
    ) -> list[int]:
        size = sum(len(turn["content"]) for turn in turns)
        with renamed(content="messages"):
            ids: list[int] = await self._read(
                size, partial(self.llm.llm.encode_chat, turns, **variables)
            )
        return ids

    async def tokenize(self, body: TokenizeBody) -> bytes:
        """The answer, in JSON."""
        if body.messages is not None:
            ids = await self.encode_chat(body.turns, body.variables)
        else:
            text = body.prompt or ""
            how = encode if body.add_special_tokens is False else encode_prompt
            with renamed(text="prompt"):
                ids = await self._read(len(text), self._encode, how, text)
        told: bytes = await self._read(len(ids), self._told, ids, body.return_token_strs)
        return told

    def _told(self, ids: list[int], with_texts: bool | None) -> bytes:
        texts = [self.token_texts.of(id) for id in ids] if with_texts else None
        counts = {"count": len(ids), "max_model_len": self.max_tokens}
        return msgspec.json.encode(counts | {"tokens": ids, "token_strs": texts})

    def _encode(self, how: Callable[[Any, str], list[int]], text: str) -> list[int]:
        most = max(self.max_tokens, MOST_TOKENIZED)
        if len(text) > most_characters(most):
            raise APIError(
                400,
                f"prompt has {len(text)} characters, and {most_characters(most)} are the most that "
                "are tokenised",
                param="prompt",
            )
        if surely_longer(self.tokenizer, text, most):
            raise APIError(
                400, f"prompt has over {most} tokens, the most that are counted", param="prompt"
            )
        return how(self.tokenizer, text)

    async def echo(self, prompt: Prompt) -> Echo:
        if isinstance(prompt, str):
            return Echo(prompt, typed=True)
        return Echo(await self.text_of(prompt), typed=False)

    async def text_of(self, prompt: Sequence[int]) -> str:
        self.llm.llm.check_size(prompt)
        text: str = await self._read(len(prompt), self._decode, prompt)
        return text

    def _decode(self, prompt: Sequence[int]) -> str:
        ids = self.llm.llm.encode(prompt)
        return decoder_of(self.tokenizer)(ids)

    async def _read(self, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a tokenizer, which `size` characters or tokens go through. Raises APIError where as
        many texts wait for it as choices may wait."""
        most = self.llm.llm.runner.pool.num_slots + self.limits.max_queue
        if self._reading >= most:
            raise APIError(
                429,
                f"{most} texts wait to be tokenised, which are the most: try again",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._reading += 1
        try:
            return await self.llm.run(function, *arguments, size=size)
        finally:
            self._reading -= 1

    async def open(
        self, asked: Sequence[PromptSpec], context: PackedContext | None = None
    ) -> "Choices":
        """Queue choices, all or none. Raises APIError where the queue is full."""
        self._admit(len(asked))
        self._preparing += len(asked)
        try:
            with renamed(**OURS):
                stream = await self.llm.open(asked, context, _check_scores)
        finally:
            self._preparing -= len(asked)
        return Choices(stream, self.limits.request_seconds, self.metrics)

    def _admit(self, count: int) -> None:
        slots = self.llm.llm.runner.pool.num_slots
        if count > slots + self.limits.max_queue:
            raise APIError(
                400, f"{count} choices never fit a queue of {slots + self.limits.max_queue}"
            )
        if self._preparing + self.llm.driver.num_open + count > slots + self.limits.max_queue:
            raise APIError(
                429,
                f"{slots} choices run or are about to and {self.limits.max_queue} may wait: the "
                "queue is full, try again",
                code="queue_full",
                headers={"Retry-After": "1"},
            )


def _renamed(refusal: SettingError) -> APIError:
    """In the client's words, also where an answer has begun."""
    try:
        with renamed(**OURS):
            raise refusal
    except SettingError as error:
        return from_value_error(error)


def _check_scores(opened: Sequence[OpenRequest]) -> None:
    """Raises SettingError for more log-probabilities of prompts than an answer should hold."""
    wanted = [(x.num_prompt, x.sampling.prompt_logprobs) for x, _ in opened]
    count = sum(tokens * (1 + top) for tokens, top in wanted if top is not None)
    if count > MOST_SCORES:
        raise SettingError(
            f"`prompt_logprobs`: {count} log-probabilities of prompts are wanted, and an answer "
            f"has at most {MOST_SCORES}: ask for fewer of each token, or send fewer prompts at once"
        )


class Choices(AsyncIterator[tuple[int, StepOutput]]):
    """Outputs of a request's choices, each with its choice's number. seconds: most time in all.

    Raises APIError where a choice cannot be served to its end.
    """

    def __init__(self, stream: AsyncStream, seconds: float, metrics: Metrics) -> None:
        self.stream, self.seconds, self.metrics = stream, seconds, metrics
        self.requests = list(stream.requests.values())
        self._numbers = {id: number for number, id in enumerate(stream.requests)}
        self._deadline = asyncio.get_running_loop().time() + seconds
        self.first_token: float | None = None  # when the first token came, of `time.monotonic`

    async def __anext__(self) -> tuple[int, StepOutput]:
        try:
            async with asyncio.timeout_at(self._deadline):
                output = await anext(self.stream)
        except TimeoutError:
            self.close()
            raise APIError(
                504, f"the answer took over {self.seconds} s; ask for fewer tokens", code="timeout"
            ) from None
        if output.token_ids and self.first_token is None:
            self.first_token = time.monotonic()
        if output.finish_reason is not None:
            self.metrics.ended(output.finish_reason)
        if output.finish_reason == "error":
            self.close()
            if output.refusal is not None:
                raise _renamed(output.refusal)
            raise APIError(500, f"generation failed: {output.error}", code="generation_failed")
        return self._numbers[output.id], output

    def close(self) -> None:
        """Cancel what has not ended."""
        self.stream.close()
