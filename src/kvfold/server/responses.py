"""JSON responses in OpenAI's format, whole or as server-sent events."""

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
from kvfold.server.reasoning import Phase
from kvfold.server.service import ChoiceStream, EchoedPrompt, Service
from kvfold.server.token_texts import Offsets, TokenTexts, utf8
from kvfold.server.tools.message import MessageReader
from kvfold.server.tools.request import ToolUse
from kvfold.utils.tokens import leading_tokens

Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
FINISH_REASONS: Mapping[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "pool": "length",
    "cancelled": "abort",
}


class GenerationResponse:
    """The response to one request for text. Subclasses format a choice for completions or chats."""

    prefix: str
    object_type: str
    chunk_type: str

    def __init__(
        self, service: Service, body: CompletionBody | ChatBody, choices: ChoiceStream
    ) -> None:
        self.service, self.body, self.choices = service, body, choices
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self.head |= {"model": service.name}
        self.num_outputs = [0] * len(choices.requests)
        # HTTP status that the response would have if its end were known at its start; None: open.
        self.status: int | None = None
        self._texts: TokenTexts | None = None

    @property
    def texts(self) -> TokenTexts:
        self._texts = self._texts or self.service.token_texts
        return self._texts

    @property
    def usage(self) -> Json:
        """Token counts so far. A prompt counts once, however many choices it has."""
        requests = self.choices.requests
        prompt = sum(x.num_prompt for x in requests[:: self.body.num_choices])
        cached = sum(x.num_cached for x in requests[:: self.body.num_choices])
        outputs = sum(self.num_outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": outputs,
            "total_tokens": prompt + outputs,
            "prompt_tokens_details": {"cached_tokens": cached},
            "evicted_tokens": round(sum(x.num_evicted for x in requests)),
        }

    async def json_body(self) -> bytes:
        """The whole response as JSON, encoded in another thread because it may have many
        megabytes."""
        outputs: list[list[StepOutput]] = [[] for _ in self.choices.requests]
        async for index, output in self.choices:
            outputs[index].append(output)
            self.count(index, output)
        content = await asyncio.to_thread(self._encode_body, outputs)
        self.status = 200
        return content

    def _encode_body(self, outputs: list[list[StepOutput]]) -> bytes:
        choices = [
            # Encoded one by one: a choice's dict takes far more memory than its text.
            msgspec.Raw(_json(self.choice(index, _join_outputs(choice_outputs), streamed=False)))
            for index, choice_outputs in enumerate(outputs)
        ]
        return _json(
            {**self.head, "object": self.object_type, "choices": choices, "usage": self.usage}
        )

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events. An error is sent as the last event before [DONE]."""
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield _event({**self.head, "object": self.chunk_type, **chunk})
            self.status = 200
        except APIError as error:
            self.status = error.status
            yield _event(error.body)
        finally:
            self.choices.close()
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncGenerator[Json, None]:
        options = self.body.stream_options or StreamOptions()
        with_usage = options.include_usage and options.continuous_usage_stats
        for choice in self.opening_choices():
            yield {"choices": [choice]}
        async for index, output in self.choices:
            self.count(index, output)
            content = output.token_ids if self.body.return_token_ids else output.logprobs
            if not (output.text or content or output.finish_reason):
                continue  # incomplete characters, or text that may be part of a stop string
            if output.prompt_logprobs:
                choice = await asyncio.to_thread(self.choice, index, output, streamed=True)
            else:
                choice = self.choice(index, output, streamed=True)
            if choice.get("delta") == {} and not (content or output.finish_reason):
                continue  # text that may be part of a tool call
            yield {"choices": [choice], **({"usage": self.usage} if with_usage else {})}
        if options.include_usage:
            yield {"choices": [], "usage": self.usage}

    def count(self, index: int, output: StepOutput) -> None:
        """Count a choice's new tokens."""
        self.num_outputs[index] += len(output.token_ids)

    def opening_choices(self) -> list[Json]:
        """Choices of the first chunk, before any token."""
        return []

    def choice(self, index: int, output: StepOutput, *, streamed: bool) -> Json:
        """One choice of the response, or of a chunk of the stream."""
        reason = output.finish_reason
        choice = {
            "index": index,
            **self.content(index, output, streamed=streamed),
            "logprobs": None if output.logprobs is None else self.logprobs(index, output),
            "finish_reason": None if reason is None else self.finish_reason(index, reason),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice

    def content(self, index: int, output: StepOutput, *, streamed: bool) -> Json:
        """The fields of a choice that hold its text."""
        raise NotImplementedError

    def finish_reason(self, index: int, reason: FinishReason) -> str:
        return FINISH_REASONS[reason]

    def logprobs(self, index: int, output: StepOutput) -> Json:
        raise NotImplementedError


class CompletionResponse(GenerationResponse):
    """echoed: the text of every prompt, if the client wants it echoed; otherwise empty."""

    prefix, object_type, chunk_type = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        choices: ChoiceStream,
        echoed: list[EchoedPrompt],
    ) -> None:
        super().__init__(service, body, choices)
        self._echoed = [echo for echo in echoed for _ in range(body.num_choices)]
        self._shown: set[int] = set()  # choices whose prompt has been sent
        self._offsets: dict[int, Offsets] = {}  # of each choice's output tokens

    def content(self, index: int, output: StepOutput, *, streamed: bool) -> Json:
        text = output.text
        if self._echoed and index not in self._shown:
            self._shown.add(index)
            text = self._echoed[index].text + text
        return {"text": text}

    def choice(self, index: int, output: StepOutput, *, streamed: bool) -> Json:
        choice = super().choice(index, output, streamed=streamed)
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(index, output)
        return choice

    def _prompt_logprobs(self, index: int, output: StepOutput) -> list[dict[int, Json] | None]:
        """Log-probabilities of the prompt's tokens in vLLM's format; None for the first one."""
        num_top = self.body.prompt_logprobs
        _, *tokens = self._prompt_tokens(index)
        entries: list[dict[int, Json] | None] = [None]
        for token, logprobs in zip(tokens, output.prompt_logprobs or (), strict=True):
            top = {
                id: self._prompt_logprob(id, value, rank)
                for rank, (id, value) in enumerate(logprobs.top[:num_top], 1)
            }
            chosen = self._prompt_logprob(token, logprobs.chosen, logprobs.rank)
            entries.append(top | {token: chosen})
        return entries

    def _prompt_logprob(self, token: int, logprob: float, rank: int | None) -> Json:
        text = self.texts.of(token)
        return {"logprob": _clamp(logprob), "rank": rank, "decoded_token": text}

    def _prompt_tokens(self, index: int) -> list[int]:
        request = self.choices.requests[index]
        return request.token_ids[: request.num_prompt]

    def logprobs(self, index: int, output: StepOutput) -> Json:
        columns: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if self._echoed and output.prompt_logprobs is not None:
            prompt_logprobs = (None, *output.prompt_logprobs)
            tokens = zip(
                self._prompt_tokens(index),
                self._prompt_offsets(index),
                prompt_logprobs,
                strict=True,
            )
            for token, offset, token_logprobs in tokens:
                self._add_token(columns, token, offset, token_logprobs)
        offsets = self._output_offsets(index)
        for token, logprobs in _tokens_with_logprobs(output):
            self._add_token(columns, token, offsets.add(token), logprobs)
        return columns

    def _prompt_offsets(self, index: int) -> Iterator[int]:
        """Offsets of a prompt's tokens in its text.

        Special tokens that the tokenizer added in front of a text are not part of that text. If the
        client sent token ids, the text leaves out special tokens.
        """
        echo, prompt = self._echoed[index], self._prompt_tokens(index)
        tokenizer = self.service.tokenizer
        first = len(leading_tokens(tokenizer)) if echo.from_text else 0
        offsets = Offsets(decoder_of(tokenizer, skip_special_tokens=not echo.from_text))
        for position, token in enumerate(prompt):
            yield min(offsets.add(token) if position >= first else 0, len(echo.text))

    def _output_offsets(self, index: int) -> Offsets:
        if index not in self._offsets:
            start_offset = len(self._echoed[index].text) if self._echoed else 0
            decode = decoder_of(self.service.tokenizer, self.body.skip_special_tokens is not False)
            self._offsets[index] = Offsets(decode, self._prompt_tokens(index), start_offset)
        return self._offsets[index]

    def _add_token(
        self, columns: Json, token: int, offset: int, logprobs: TokenLogprobs | None
    ) -> None:
        """Append a token to the columns of `logprobs`. logprobs: None for a prompt's first
        token."""
        text = self.texts.of(token)
        columns["tokens"].append(text)
        columns["text_offset"].append(offset)
        if logprobs is None:
            columns["token_logprobs"].append(None)
            columns["top_logprobs"].append(None)
            return
        columns["token_logprobs"].append(_clamp(logprobs.chosen))
        top = {self.texts.of(id): _clamp(value) for id, value in logprobs.top[: self.body.logprobs]}
        columns["top_logprobs"].append({text: _clamp(logprobs.chosen)} | top)


class ChatResponse(GenerationResponse):
    prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        choices: ChoiceStream,
        tools: ToolUse | None,
        phase: Phase,
    ) -> None:
        super().__init__(service, body, choices)
        self._readers = [MessageReader(tools, phase) for _ in choices.requests]
        self._hides_eos = service.shows_special_tokens(tools)
        self._reasoning_end = service.reasoning_end if phase != "after" else None
        self._num_reasoning = [0] * len(choices.requests)  # tokens up to the end of reasoning
        self._open = [self._reasoning_end is not None] * len(choices.requests)

    def count(self, index: int, output: StepOutput) -> None:
        super().count(index, output)
        for token in output.token_ids if self._open[index] else ():
            self._num_reasoning[index] += 1
            if token == self._reasoning_end:
                self._open[index] = False
                break

    @property
    def usage(self) -> Json:
        """Also the tokens of the reasoning, if one token ends it."""
        if self._reasoning_end is None:
            return super().usage
        counts = zip(self._readers, self._num_reasoning, strict=True)
        count = sum(number for reader, number in counts if reader.has_reasoned)
        return super().usage | {"completion_tokens_details": {"reasoning_tokens": count}}

    def opening_choices(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for i in range(len(self.choices.requests))
        ]

    def content(self, index: int, output: StepOutput, *, streamed: bool) -> Json:
        reader, text = self._readers[index], self._without_eos(output)
        if streamed:
            return {"delta": reader.delta(text, last=output.finish_reason is not None)}
        return {"message": reader.message(text)}

    def finish_reason(self, index: int, reason: FinishReason) -> str:
        """A caller may run the calls of an answer that ends with tool_calls."""
        if reason in ("eos", "stop") and self._readers[index].has_calls:
            return "tool_calls"
        return super().finish_reason(index, reason)

    def _without_eos(self, output: StepOutput) -> str:
        """The text, without the end token that is in it because special tokens are."""
        if not (self._hides_eos and output.finish_reason == "eos" and output.token_ids):
            return output.text
        return output.text.removesuffix(self.service.token_texts.of(output.token_ids[-1]))

    def logprobs(self, index: int, output: StepOutput) -> Json:
        return {
            "content": [
                self._entry(token, logprobs.chosen)
                | {"top_logprobs": [self._entry(*pair) for pair in logprobs.top]}
                for token, logprobs in _tokens_with_logprobs(output)
            ]
        }

    def _entry(self, token: int, logprob: float) -> Json:
        text = self.texts.of(token)
        return {"token": text, "logprob": _clamp(logprob), "bytes": utf8(text)}


def _tokens_with_logprobs(output: StepOutput) -> "zip[tuple[int, TokenLogprobs]]":
    return zip(output.token_ids, output.logprobs or (), strict=True)


def _join_outputs(outputs: list[StepOutput]) -> StepOutput:
    done = completion_of(outputs)
    return StepOutput(
        id=outputs[-1].id,
        token_ids=done.token_ids,
        text=done.text,
        logprobs=done.logprobs,
        finish_reason=done.finish_reason,
        prompt_logprobs=done.prompt_logprobs,
    )


def _clamp(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


_json = msgspec.json.encode


def _event(content: Json) -> bytes:
    content_bytes = _json(content)
    for line_end in ("\x85", "\u2028", "\u2029"):  # some clients split lines at these, too
        content_bytes = content_bytes.replace(line_end.encode(), b"\\u%04x" % ord(line_end))
    return b"data: " + content_bytes + b"\n\n"
