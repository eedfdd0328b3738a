"""Admit the requests of HTTP clients, pass them to the engine, and end them at their time limit."""

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
from kvfold.server.protocol import CLIENT_NAMES, TokenizeBody
from kvfold.server.reasoning import CLOSE, TAIL_TOKENS, Phase, added_tokens, can_reason, phase_of
from kvfold.server.token_texts import TokenTexts
from kvfold.server.tools.request import ToolUse, check_template, template_text
from kvfold.utils.errors import SettingError, renamed
from kvfold.utils.tokens import encode, encode_prompt, most_characters, surely_longer

PromptSpec = tuple[Prompt, SamplingParams, CacheParams]
MAX_PROMPT_LOGPROBS = 2**20  # log-probabilities of prompts in one response
MAX_TOKENIZED = 2**17  # tokens that /tokenize accepts, even if a sequence may only have fewer


class EchoedPrompt(NamedTuple):
    """The text of a prompt that `echo` returns. from_text: the client sent text, not token ids."""

    text: str
    from_text: bool


class Service:
    """A model under its public name, with the server's limits.

    contexts: packed contexts that requests may start with, by name.

    Raises ValueError for a context of another model or cache.
    """

    def __init__(
        self, async_llm: AsyncLLM, name: str, limits: Limits, contexts: Mapping[str, PackedContext]
    ) -> None:
        self.async_llm, self.llm = async_llm, async_llm.llm
        for context in contexts.values():
            self.llm.check_context(context)
        self.name, self.limits, self.contexts = name, limits, contexts
        self.created = int(time.time())
        self.metrics = Metrics(self.llm, name, contexts)
        self.llm.engine.hooks = self.metrics
        self._num_preparing = 0  # choices that were accepted but not submitted to the engine yet
        self._num_tokenizing = 0  # texts that are being tokenised, or wait for it

    @property
    def tokenizer(self) -> Any:
        if self.llm.tokenizer is None:
            raise APIError(400, "this model has no tokenizer: send prompts as token ids")
        return self.llm.tokenizer

    @property
    def max_tokens(self) -> int:
        """Most tokens of a sequence: its prompt and its outputs."""
        return self.llm.runner.pool.max_tokens

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
    def model_card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
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
        """The packed context called `name`; None if no name is given. Raises APIError (404) if
        unknown."""
        if name is None or name in self.contexts:
            return None if name is None else self.contexts[name]
        known = ", ".join(map(repr, self.contexts)) or "none: kvfold serve --context NAME=FILE"
        raise APIError(
            404,
            f"the context {name!r:.100} does not exist; this server has {known}",
            param="context",
            code="context_not_found",
        )

    @property
    def chat_template(self) -> Any:
        """The tokenizer's chat template, or several by name; None: it has none."""
        return getattr(self.llm.tokenizer, "chat_template", None)

    def chat_settings(self, tools: ToolUse | None) -> dict[str, Any]:
        """Settings of `SamplingParams` for a chat's answer. Raises APIError."""
        settings = {"skip_special_tokens": False} if self.shows_special_tokens(tools) else {}
        if tools is None:
            return settings
        return settings | {
            "structural_tag": tools.structural_tag,
            "json_schema": None,
            "regex": None,
        }

    def shows_special_tokens(self, tools: ToolUse | None) -> bool:
        """Whether special tokens mark parts of an answer, so that its text must have them."""
        special = getattr(self.llm.tokenizer, "all_special_tokens", ())
        return CLOSE in special or (tools is not None and tools.form.special)

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends reasoning; None if it is not one token."""
        return added_tokens(self.llm.tokenizer).get(CLOSE)

    def phase_of(
        self, prompt: Sequence[int], messages: Sequence[Mapping[str, Any]], continues: bool
    ) -> Phase:
        """Where a chat's answer begins. prompt: token ids of the conversation. continues: whether
        the answer continues the last message."""
        if not can_reason(template_text(self.chat_template), self.llm.tokenizer):
            return "after"
        decode = decoder_of(self.tokenizer, skip_special_tokens=False)
        continued = messages[-1]["content"] if continues else None
        return phase_of(decode(list(prompt[-TAIL_TOKENS:])), continued)

    async def encode_chat(
        self, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> list[int]:
        """Token ids of a conversation. variables: of the chat template, and tools. Raises APIError
        for tools and their calls if the template leaves them out."""
        tools = variables.get("tools")
        check_template(self.chat_template, messages, tools)
        size = sum(len(message["content"]) for message in messages)
        size += sum(len(str(message.get("tool_calls", ""))) for message in messages)
        size += len(str(tools or ""))
        with renamed(content="messages"):
            ids: list[int] = await self._run_tokenizer(
                size, partial(self.llm.encode_chat, messages, **variables)
            )
        return ids

    async def tokenize(self, body: TokenizeBody) -> bytes:
        """The JSON response of /tokenize."""
        if body.messages is not None:
            ids = await self.encode_chat(body.template_messages, body.template_variables)
        else:
            text = body.prompt or ""
            encoder = encode if body.add_special_tokens is False else encode_prompt
            with renamed(text="prompt"):
                ids = await self._run_tokenizer(len(text), self._tokenize_text, encoder, text)
        content: bytes = await self._run_tokenizer(
            len(ids), self._tokens_json, ids, body.return_token_strs
        )
        return content

    def _tokens_json(self, ids: list[int], with_texts: bool | None) -> bytes:
        texts = [self.token_texts.of(id) for id in ids] if with_texts else None
        counts = {"count": len(ids), "max_model_len": self.max_tokens}
        return msgspec.json.encode(counts | {"tokens": ids, "token_strs": texts})

    def _tokenize_text(self, encoder: Callable[[Any, str], list[int]], text: str) -> list[int]:
        limit = max(self.max_tokens, MAX_TOKENIZED)
        if len(text) > most_characters(limit):
            raise APIError(
                400,
                f"prompt has {len(text)} characters; /tokenize accepts at most "
                f"{most_characters(limit)}",
                param="prompt",
            )
        if surely_longer(self.tokenizer, text, limit):
            raise APIError(
                400,
                f"prompt has over {limit} tokens, the most that /tokenize counts",
                param="prompt",
            )
        return encoder(self.tokenizer, text)

    async def echo(self, prompt: Prompt) -> EchoedPrompt:
        if isinstance(prompt, str):
            return EchoedPrompt(prompt, from_text=True)
        return EchoedPrompt(await self.detokenize(prompt), from_text=False)

    async def detokenize(self, prompt: Sequence[int]) -> str:
        self.llm.check_size(prompt)
        text: str = await self._run_tokenizer(len(prompt), self._detokenize, prompt)
        return text

    def _detokenize(self, prompt: Sequence[int]) -> str:
        ids = self.llm.encode(prompt)
        return decoder_of(self.tokenizer)(ids)

    async def _run_tokenizer(self, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the tokenizer in another thread. size: characters or token ids of its
        input.

        Raises APIError (429) if as many texts wait for the tokenizer as choices may wait for the
        engine.
        """
        limit = self.llm.runner.pool.num_slots + self.limits.max_queue
        if self._num_tokenizing >= limit:
            raise APIError(
                429,
                f"the queue is full: {limit} texts wait to be tokenised; try again",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._num_tokenizing += 1
        try:
            return await self.async_llm.run(function, *arguments, size=size)
        finally:
            self._num_tokenizing -= 1

    async def submit(
        self,
        specs: Sequence[PromptSpec],
        context: PackedContext | None = None,
        requested: int | None = None,
        names: Mapping[str, str] = CLIENT_NAMES,
    ) -> "ChoiceStream":
        """Submit all choices of a request to the engine. requested: output tokens that the client
        asks for, if it does. names: of the engine's settings in the request.

        Raises APIError (429) if the queue has no room for all choices, and (400) if no sequence has
        room for the requested tokens.
        """
        self._check_queue(len(specs))

        def check(opened: Sequence[OpenRequest]) -> None:
            _check_prompt_logprobs(opened)
            if requested is not None:
                self._check_length(max(x.num_prompt for x, _ in opened), requested)

        self._num_preparing += len(specs)
        try:
            with renamed(**names):
                stream = await self.async_llm.open(specs, context, check)
        finally:
            self._num_preparing -= len(specs)
        return ChoiceStream(stream, self.limits.request_seconds, self.metrics, names)

    def _check_length(self, num_prompt: int, requested: int) -> None:
        """Raises APIError for more output tokens than fit a sequence after its prompt. The engine
        would end such an answer early, as one that was cut."""
        room = self.max_tokens - num_prompt + 1  # the last output has no cache entry
        if requested > room:
            raise APIError(
                400,
                f"max_tokens: {requested} tokens do not fit: this server's maximum context length"
                f" is {self.max_tokens} tokens, and the prompt has {num_prompt}: ask for at most"
                f" {room}, shorten the prompt, or leave max_tokens out",
                param="max_tokens",
            )

    def _check_queue(self, count: int) -> None:
        slots = self.llm.runner.pool.num_slots
        limit = slots + self.limits.max_queue
        if count > limit:
            raise APIError(400, f"{count} choices never fit a queue of {limit}")
        if self._num_preparing + self.async_llm.driver.num_open + count > limit:
            raise APIError(
                429,
                f"the queue is full: {slots} choices may run and {self.limits.max_queue} may wait; "
                "try again",
                code="queue_full",
                headers={"Retry-After": "1"},
            )


def _client_error(refusal: SettingError, names: Mapping[str, str]) -> APIError:
    """The engine's refusal as an APIError that names fields as the client does."""
    try:
        with renamed(**names):
            raise refusal
    except SettingError as error:
        return from_value_error(error)


def _check_prompt_logprobs(opened: Sequence[OpenRequest]) -> None:
    """Raises SettingError if the prompts' log-probabilities are too many for one response."""
    wanted = [(x.num_prompt, x.sampling.prompt_logprobs) for x, _ in opened]
    count = sum(tokens * (1 + top) for tokens, top in wanted if top is not None)
    if count > MAX_PROMPT_LOGPROBS:
        raise SettingError(
            f"`prompt_logprobs`: {count} log-probabilities of prompts are wanted, and a response "
            f"has at most {MAX_PROMPT_LOGPROBS}: ask for fewer per token, or send fewer prompts at "
            "once"
        )


class ChoiceStream(AsyncIterator[tuple[int, StepOutput]]):
    """Outputs of a request's choices as they come: (index of the choice, output).

    seconds: most time until all choices end. names: of the engine's settings in the request. Raises
    APIError if a choice cannot be completed.
    """

    def __init__(
        self, stream: AsyncStream, seconds: float, metrics: Metrics, names: Mapping[str, str]
    ) -> None:
        self.stream, self.seconds, self.metrics, self._names = stream, seconds, metrics, names
        self.requests = list(stream.requests.values())
        self._indices = {id: index for index, id in enumerate(stream.requests)}
        self._deadline = asyncio.get_running_loop().time() + seconds
        self.first_token: float | None = None  # time of the first token, of `time.monotonic`

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
            self.metrics.count_end(output.finish_reason)
        if output.finish_reason == "error":
            self.close()
            if output.refusal is not None:
                raise _client_error(output.refusal, self._names)
            raise APIError(500, f"generation failed: {output.error}", code="generation_failed")
        return self._indices[output.id], output

    def close(self) -> None:
        """Cancel the choices that have not ended."""
        self.stream.close()
