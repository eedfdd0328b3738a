"""Answers in OpenAI's form, whole or as server-sent events."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from kvfold.engine.api.detokenizer import decoder_of
from kvfold.engine.api.llm import completion_of
from kvfold.engine.requests.request import FinishReason, StepOutput, TokenLogprobs
from kvfold.server.errors import APIError
from kvfold.server.protocol import ChatBody, CompletionBody, StreamOptions
from kvfold.server.service import Choices, Echo, Service
from kvfold.server.token_texts import Offsets, TokenTexts, utf8
from kvfold.utils.tokens import leading_tokens

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
        self.status: int | None = None  # of HTTP, as if known before the answer began; None: open
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

    async def whole(self) -> bytes:
        """JSON, made beside the event loop: it may be of many megabytes."""
        found: list[list[StepOutput]] = [[] for _ in self.choices.requests]
        async for number, output in self.choices:
            found[number].append(output)
            self.num_outputs[number] += len(output.token_ids)
        content = await asyncio.to_thread(self._whole, found)
        self.status = 200
        return content

    def _whole(self, outputs: list[list[StepOutput]]) -> bytes:
        choices = [
            msgspec.Raw(_json(self.choice(number, _joined(one), whole=True)))
            for number, one in enumerate(outputs)  # one after another: texts are short, dicts not
        ]
        return _json({**self.head, "object": self.kind, "choices": choices, "usage": self.usage})

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events; what fails is told in one, before the last."""
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield _event({**self.head, "object": self.chunk_kind, **chunk})
            self.status = 200
        except APIError as error:
            self.status = error.status
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
            told = output.token_ids if self.body.return_token_ids else output.logprobs
            if not (output.text or told or output.finish_reason):
                continue  # held back, until it is known how it reads
            if output.prompt_logprobs:
                choice = await asyncio.to_thread(self.choice, number, output, whole=False)
            else:
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
    """echoed: of every prompt; or none."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def __init__(
        self, service: Service, body: CompletionBody, choices: Choices, echoed: list[Echo]
    ) -> None:
        super().__init__(service, body, choices)
        self._echoed = [echo for echo in echoed for _ in range(body.choices)]
        self._shown: set[int] = set()  # choices whose prompt was
        self._offsets: dict[int, Offsets] = {}  # of outputs

    def content(self, number: int, text: str, *, whole: bool) -> Json:
        if self._echoed and number not in self._shown:
            self._shown.add(number)
            text = self._echoed[number].text + text
        return {"text": text}

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
        if self._echoed and output.prompt_logprobs is not None:
            scores = (None, *output.prompt_logprobs)
            tokens = zip(self._prompt(number), self._prompt_offsets(number), scores, strict=True)
            for token, offset, scored in tokens:
                self._add(found, token, offset, scored)
        offsets = self._output_offsets(number)
        for token, logprobs in _pairs(output):
            self._add(found, token, offsets.add(token), logprobs)
        return found

    def _prompt_offsets(self, number: int) -> Iterator[int]:
        """Where the tokens of a prompt begin in its text. Those that the tokenizer put in front of
        a text are no part of it, and no special token is one of a text of token ids."""
        echo, prompt = self._echoed[number], self._prompt(number)
        tokenizer = self.service.tokenizer
        first = len(leading_tokens(tokenizer)) if echo.typed else 0
        offsets = Offsets(decoder_of(tokenizer, skip_special_tokens=not echo.typed))
        for index, token in enumerate(prompt):
            yield min(offsets.add(token) if index >= first else 0, len(echo.text))

    def _output_offsets(self, number: int) -> Offsets:
        if number not in self._offsets:
            begun = len(self._echoed[number].text) if self._echoed else 0
            decode = decoder_of(self.service.tokenizer, self.body.skip_special_tokens is not False)
            self._offsets[number] = Offsets(decode, self._prompt(number), begun)
        return self._offsets[number]

    def _add(self, found: Json, token: int, offset: int, of: TokenLogprobs | None) -> None:
        """A token, of which None is known where nothing came before it."""
        text = self.texts.of(token)
        found["tokens"].append(text)
        found["text_offset"].append(offset)
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


_json = msgspec.json.encode


def _event(content: Json) -> bytes:
    content_bytes = _json(content)
    for line_end in ("\x85", "\u2028", "\u2029"):  # as some clients have it
        content_bytes = content_bytes.replace(line_end.encode(), b"\\u%04x" % ord(line_end))
    return b"data: " + content_bytes + b"\n\n"
