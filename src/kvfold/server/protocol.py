"""Bodies of requests, and what they ask of the engine."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvfold.engine.request import CacheParams, SamplingParams
from kvfold.errors import renamed
from kvfold.server.errors import APIError
from kvfold.server.limits import Limits

MOST_STOP = 1024  # characters of a stop string
MOST_SALT = 1024  # characters
MOST_TOKENS = 1024  # of lists of them, and of bad words
# Longer or deeper ones may take xgrammar minutes to compile.
MOST_SCHEMA, MOST_PATTERN, MOST_DEPTH = 2**16, 1024, 64  # characters, characters, levels
ANY_OBJECT = {"type": "object"}
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's

TokenId = Annotated[int, Field(strict=False)]  # a key of JSON is a string
Ids = list[int]


class Body(BaseModel):
    """Fields that are not known are ignored, null is as if left out, and "1" is no number."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)

    model: str | None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel):
    definition: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_text(self) -> dict[str, Any] | bool | None:
        """What a text keeps to. Raises APIError where it is missing or too much."""
        if self.type != "json_schema":
            return ANY_OBJECT if self.type == "json_object" else None
        if self.json_schema is None:
            raise APIError(
                400,
                "response_format: 'json_schema' needs json_schema={\"schema\": ...}",
                param="response_format",
            )
        found = self.json_schema.definition
        _check_schema(found)
        length = len(json.dumps(found))
        _at_most("response_format", length, MOST_SCHEMA, "characters of a schema")
        return found


class StructuredOutputs(BaseModel):
    """vLLM's, of which this server has one."""

    model_config = ConfigDict(extra="forbid")

    regex: str = Field(max_length=MOST_PATTERN)


class Sampled(Body):
    """What completions and chats share: OpenAI's fields, vLLM's beside them, and the cache's."""

    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    user: str | None = None

    top_k: int | None = Field(None, ge=-1)  # -1 and 0: no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None

    keep_tokens: float | None = None
    max_cache_tokens: int | None = None
    protected: int | None = None
    every: int | None = None
    prefix_caching: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MOST_SALT)

    response_format: ResponseFormat | None = None
    # Known, and refused: to leave them out would change what the client gets.
    best_of: Any = None
    suffix: Any = None
    tools: Any = None
    functions: Any = None
    use_beam_search: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Of the likeliest tokens; None: no logprobs at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        return None

    @property
    def cache(self) -> CacheParams:
        return CacheParams(**self.model_dump(include=OF_CACHE, exclude_none=True))

    def sampling(self, limits: Limits) -> list[SamplingParams]:
        """Of every choice: with a seed they have seeds one after the other. Raises APIError for
        what this server refuses, ValueError for what no engine takes."""
        self._check(limits)
        given = {name: getattr(self, name) for name in SAME}
        given |= {
            "max_new_tokens": self.most_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": self.top_k if (self.top_k or 0) > 0 else None,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
            "json_schema": self.response_format and self.response_format.schema_of_text,
            "regex": self.structured_outputs and self.structured_outputs.regex,
        }
        known = {name: value for name, value in given.items() if value is not None}
        with renamed(**OURS):
            first = SamplingParams(**known)
        if first.seed is None:
            return [first] * self.choices
        seeds = ((first.seed + i) % 2**63 for i in range(self.choices))
        return [SamplingParams(**known | {"seed": seed}) for seed in seeds]

    def _check(self, limits: Limits) -> None:
        for name in REFUSED:
            if getattr(self, name, None) not in (None, False, 0, [], {}, ""):
                raise APIError(
                    400, f"{name} is not supported by this server; leave it out", param=name
                )
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        _at_most("n", self.choices, limits.max_choices)
        _at_most("logprobs", self.num_logprobs or 0, limits.max_logprobs)
        _at_most("stop", len(stops), limits.max_stops, "strings")
        _at_most("stop", max(map(len, stops), default=0), MOST_STOP, "characters")
        _at_most("logit_bias", len(self.logit_bias or ()), MOST_TOKENS, "tokens")
        _at_most("stop_token_ids", len(self.stop_token_ids or ()), MOST_TOKENS, "tokens")
        _at_most("bad_words", len(self.bad_words or ()), MOST_TOKENS, "words")
        longest = max(map(len, self.bad_words or ()), default=0)
        _at_most("bad_words", longest, MOST_STOP, "characters")


SAME = (  # fields that are called as in SamplingParams
    *("top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "min_p"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("allowed_token_ids", "bad_words"),
)
OF_CACHE = {"keep_tokens", "max_cache_tokens", "protected", "every", "prefix_caching", "cache_salt"}
OURS = {  # fields that a client knows by another name
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format",
    "regex": "structured_outputs",
}
REFUSED = (
    *("best_of", "suffix", "tools", "functions", "use_beam_search"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


def _at_most(name: str, value: int, most: int, unit: str = "") -> None:
    if value > most:
        raise APIError(
            400, f"{name} must be at most {most}{unit and ' '}{unit}; got {value}", param=name
        )


def _check_schema(item: Any, depth: int = 0) -> None:
    """How deep a schema is, and how long the strings in it, which may be patterns."""
    _at_most("response_format", depth, MOST_DEPTH, "levels of a schema")
    if isinstance(item, str):
        _at_most("response_format", len(item), MOST_PATTERN, "characters of a schema's string")
    inside = [*item, *item.values()] if isinstance(item, dict) else item
    for one in inside if isinstance(inside, list) else ():
        _check_schema(one, depth + 1)


class CompletionBody(Sampled):
    prompt: str | Ids | list[str] | list[Ids]
    prompt_logprobs: int | None = Field(None, ge=0)
    context: str | None = None  # a packed one's name
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        return DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Where the prompt is echoed, as many as of outputs."""
        echoed = self.logprobs if self.echo else None
        return echoed if self.prompt_logprobs is None else max(self.prompt_logprobs, echoed or 0)

    @property
    def prompts(self) -> Sequence[str | Ids]:
        """One or several."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return prompt  # type: ignore[return-value]

    def _check(self, limits: Limits) -> None:
        super()._check(limits)
        _at_most("prompt_logprobs", self.prompt_logprobs or 0, limits.max_logprobs)
        if self.stream and self.prompt_logprobs is not None:
            raise APIError(
                400,
                "prompt_logprobs come with a whole answer: leave stream out",
                param="prompt_logprobs",
            )
        if not self.prompts:
            raise APIError(400, "prompt must hold at least 1 prompt; got none", param="prompt")
        _at_most("prompt", len(self.prompts) * self.choices, limits.max_choices, "choices")


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: str
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class Conversation(Body):
    messages: list[Message] | None = Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def turns(self) -> list[dict[str, str]]:
        """As chat templates take them, which know no developer."""
        return [
            {"role": "system" if x.role == "developer" else x.role, "content": x.text}
            for x in self.messages or ()
        ]


class ChatBody(Conversation, Sampled):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: Any = None
    context: Any = None

    @property
    def most_tokens(self) -> int:
        """By default as many as there are positions: an engine ends there."""
        return self.max_completion_tokens or self.max_tokens or 2**31

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _check(self, limits: Limits) -> None:
        super()._check(limits)
        if self.prompt_logprobs is not None:
            raise APIError(400, "prompt_logprobs are of /v1/completions", param="prompt_logprobs")
        if self.context is not None:
            raise APIError(
                400,
                "context: a chat template begins a conversation, and a context has begun already: "
                "ask /v1/completions, with the template's marks in the prompt",
                param="context",
            )
        if self.top_logprobs and not self.logprobs:
            raise APIError(
                400, "top_logprobs needs logprobs=true: set it too", param="top_logprobs"
            )


class TokenizeBody(Conversation):
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: Ids
