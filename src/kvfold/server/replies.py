"""Answers in OpenAI's form, whole or as server-sent events."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from kvfold.engine.llm import completion_of
from kvfold.engine.request import FinishReason, StepOutput, TokenLogprobs
from kvfold.server.errors import APIError
from kvfold.server.protocol import ChatBody, CompletionBody, StreamOptions
from kvfold.server.service import Choices, Service
from kvfold.server.tokens import TokenTexts, utf8

Json = dict[str, Any]
LEAST = -9999.0  # log-probability of what cannot be; JSON has no infinity
REASONS: Mapping[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "pool": "length",
    "cancelled": "abort",
}


class Reply:
    """One request's answer. Subclasses write a choice, `part`: of a stream, or of the whole."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, service: Service, body: CompletionBody | ChatBody, choices: Choices) -> None:
        self.service, self.body, self.choices = service, body, choices
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self.head |= {"model": service.name}
        self.num_outputs = [0] * len(choices.requests)
        self._texts: TokenTexts | None = None

    @property
    def texts(self) -> TokenTexts:
        self._texts = self._texts or self.service.token_texts
        return self._texts

    @property
    def usage(self) -> Json:
        """Tokens until now. A prompt counts once however many choices it has."""
        requests = self.choices.requests
        prompt = sum(x.num_prompt for x in requests[:: self.body.choices])
        cached = sum(x.num_cached for x in requests[:: self.body.choices])
        outputs = sum(self.num_outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": outputs,
            "total_tokens": prompt + outputs,
            "prompt_tokens_details": {"cached_tokens": cached},
            "evicted_tokens": round(sum(x.num_evicted for x in requests)),
        }

    async def whole(self) -> Json:
        found: list[list[StepOutput]] = [[] for _ in self.choices.requests]
        async for number, output in self.choices:
            found[number].append(output)
            self.num_outputs[number] += len(output.token_ids)
        done = [_joined(outputs) for outputs in found]
        choices = [self.choice(number, output, whole=True) for number, output in enumerate(done)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events; what fails is told in one, before the last."""
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield _event({**self.head, "object": self.chunk_kind, **chunk})
        except APIError as error:
            yield _event(error.body)
        finally:
            self.choices.close()
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncGenerator[Json, None]:
        options = self.body.stream_options or StreamOptions()
        always = options.include_usage and options.continuous_usage_stats
        for choice in self.opening():
            yield {"choices": [choice]}
        async for number, output in self.choices:
            self.num_outputs[number] += len(output.token_ids)
            if not (output.text or output.logprobs or output.finish_reason):
                continue  # held back, until it is known how it reads
            choice = self.choice(number, output, whole=False)
            yield {"choices": [choice], **({"usage": self.usage} if always else {})}
        if options.include_usage:
            yield {"choices": [], "usage": self.usage}

    def opening(self) -> list[Json]:
        """Choices before the first tokens."""
        return []

    def choice(self, number: int, output: StepOutput, *, whole: bool) -> Json:
        reason = output.finish_reason
        found = {
            "index": number,
            **self.content(number, output.text, whole=whole),
            "logprobs": None if output.logprobs is None else self.logprobs(number, output),
            "finish_reason": None if reason is None else REASONS[reason],
        }
        if self.body.return_token_ids:
            found["token_ids"] = list(output.token_ids)
        return found

    def content(self, number: int, text: str, *, whole: bool) -> Json:
        raise NotImplementedError

    def logprobs(self, number: int, output: StepOutput) -> Json:
        raise NotImplementedError


class CompletionReply(Reply):
    """prompts: texts to echo, one a prompt; or none."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def __init__(
        self, service: Service, body: CompletionBody, choices: Choices, echoed: list[str]
    ) -> None:
        super().__init__(service, body, choices)
        self._echoed = dict(enumerate(text for text in echoed for _ in range(body.choices)))
        self._offsets = [0] * len(choices.requests)

    def content(self, number: int, text: str, *, whole: bool) -> Json:
        return {"text": self._echoed.pop(number, "") + text}

    def choice(self, number: int, output: StepOutput, *, whole: bool) -> Json:
        found = super().choice(number, output, whole=whole)
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._of_prompt(number, output)
        return found

    def _of_prompt(self, number: int, output: StepOutput) -> list[dict[int, Json] | None]:
        """vLLM's form: of every token of the prompt, the first of which has none."""
        most = self.body.prompt_logprobs
        _, *told = self._prompt(number)
        found: list[dict[int, Json] | None] = [None]
        for token, scored in zip(told, output.prompt_logprobs or (), strict=True):
            each = {
                id: self._told(id, value, rank)
                for rank, (id, value) in enumerate(scored.top[:most], 1)
            }
            found.append(each | {token: self._told(token, scored.chosen, scored.rank)})
        return found

    def _told(self, token: int, logprob: float, rank: int | None) -> Json:
        text = self.texts.of(token)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    def _prompt(self, number: int) -> list[int]:
        request = self.choices.requests[number]
        return request.token_ids[: request.num_prompt]

    def logprobs(self, number: int, output: StepOutput) -> Json:
        found: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if self.body.echo and output.prompt_logprobs is not None:
            first, *told = self._prompt(number)
            self._add(found, number, first, None)
            for token, scored in zip(told, output.prompt_logprobs, strict=True):
                self._add(found, number, token, scored)
        for token, logprobs in _pairs(output):
            self._add(found, number, token, logprobs)
        return found

    def _add(self, found: Json, number: int, token: int, of: TokenLogprobs | None) -> None:
        """A token, of which None is known where nothing came before it."""
        text = self.texts.of(token)
        found["tokens"].append(text)
        found["text_offset"].append(self._offsets[number])
        self._offsets[number] += len(text)
        if of is None:
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            return
        found["token_logprobs"].append(_finite(of.chosen))
        likeliest = {
            self.texts.of(id): _finite(value) for id, value in of.top[: self.body.logprobs]
        }
        found["top_logprobs"].append({text: _finite(of.chosen)} | likeliest)


class ChatReply(Reply):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def opening(self) -> list[Json]:
        said = {"role": "assistant", "content": ""}
        return [
            {"index": i, "delta": said, "logprobs": None, "finish_reason": None}
            for i in range(len(self.choices.requests))
        ]

    def content(self, number: int, text: str, *, whole: bool) -> Json:
        if whole:
            return {"message": {"role": "assistant", "content": text}}
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, number: int, output: StepOutput) -> Json:
        return {
            "content": [
                self._entry(token, logprobs.chosen)
                | {"top_logprobs": [self._entry(*pair) for pair in logprobs.top]}
                for token, logprobs in _pairs(output)
            ]
        }

    def _entry(self, token: int, logprob: float) -> Json:
        text = self.texts.of(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": utf8(text)}


def _pairs(output: StepOutput) -> "zip[tuple[int, TokenLogprobs]]":
    return zip(output.token_ids, output.logprobs or (), strict=True)


def _joined(outputs: list[StepOutput]) -> StepOutput:
    done = completion_of(outputs)
    return StepOutput(
        id=outputs[-1].id,
        token_ids=done.token_ids,
        text=done.text,
        logprobs=done.logprobs,
        finish_reason=done.finish_reason,
        prompt_logprobs=done.prompt_logprobs,
    )


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _event(content: Json) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
