"""Bodies of requests, and what they ask of the engine."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Raw, Struct, field

from kvfold.engine.requests.request import CacheParams, SamplingParams
from kvfold.server.errors import UNKNOWN, APIError, invalid
from kvfold.server.limits import Limits
from kvfold.server.unsupported_fields import (
    EMPTY,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_TOKENIZE,
    Values,
    drop_extras,
    unknown,
    with_extras,
)
from kvfold.utils.errors import renamed

MOST_MESSAGES = 4096  # of a conversation, and parts of a message
MOST_STOP = 1024  # characters of a stop string
MOST_SALT = 1024  # characters
MOST_TOKENS = 1024  # of lists of them, and of bad words
MOST_ALLOWED = 2**18  # tokens: as many as the largest vocabularies have
MOST_WORDS = 2**14  # characters of all bad words
MOST_TEMPERATURE = 2  # as OpenAI's
MOST_VARIABLES = 2**16  # bytes of variables of a chat template
# Longer or deeper ones take xgrammar long to compile.
MOST_SCHEMA, MOST_PATTERN, MOST_DEPTH = 2**16, 1024, 64  # bytes, characters, levels
ANY_OBJECT = {"type": "object"}
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
MOST_NAME = 256  # characters of who speaks in a message

B = TypeVar("B", bound="Body")
Ids = list[int]
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Pattern = Annotated[str, Meta(max_length=MOST_PATTERN)]
Salt = Annotated[str, Meta(min_length=1, max_length=MOST_SALT)]


def decode(kind: type[B], content: bytes) -> B:
    """A body of a kind. Reads no further than the first error, and makes objects of nothing that
    the kind does not name. Raises APIError."""
    try:
        body = msgspec.json.decode(content, type=whole(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if name := UNKNOWN.fullmatch(str(error)):
            raise unknown(name[1], kind.__struct_fields__) from None
        raise invalid(error) from None
    drop_extras(body, kind.unsupported)
    return body


@cache
def whole(kind: type[B]) -> type[B]:
    """A kind of body with the fields that clients send and nobody reads."""
    return cast(type[B], with_extras(kind, kind.unsupported))


def decode_field(name: str, kind: Any, content: Raw) -> Any:
    """A field that was left as it came until now. Raises APIError."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(error, param=name) from None


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are refused, null is as if left out, and "1" is no number. unsupported: fields
    of other servers that change answers, and the values of them that do not."""

    unsupported: ClassVar[Mapping[str, Values]] = {}

    model: str | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_obfuscation: OpenAI's padding against readers of a connection; not done."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Struct, forbid_unknown_fields=True):
    """name, description and strict change nothing: every schema is kept to."""

    definition: Raw = field(name="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
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
        content = self.json_schema.definition
        _at_most("response_format", len(bytes(content)), MOST_SCHEMA, "bytes of a schema")
        schema: dict[str, Any] | bool = decode_field(
            "response_format", dict[str, Any] | bool, content
        )
        _check_schema(schema)
        return schema


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's, of which this server has one."""

    regex: Pattern


class Sampled(Body, kw_only=True):
    """What completions and chats share: OpenAI's fields, vLLM's beside them, and the cache's."""

    n: Positive | None = None
    best_of: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None  # OpenAI's newer name, which goes first
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None

    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: no limit
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
    cache_salt: Salt | None = None

    response_format: ResponseFormat | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

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
        wanted = {name: getattr(self, name) for name in OF_CACHE}
        return CacheParams(**{name: x for name, x in wanted.items() if x is not None})

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
        return [first.changed(seed=(first.seed + i) % 2**63) for i in range(self.choices)]

    def release(self) -> None:
        """Let go of what held the body's bytes and texts, once they were read."""
        self.response_format = self.bad_words = self.logit_bias = self.allowed_token_ids = None

    def _check(self, limits: Limits) -> None:
        if self.best_of not in (None, self.choices):
            raise APIError(
                400,
                f"best_of={self.best_of} is not supported by this server: leave it out, or give "
                "what n is",
                param="best_of",
            )
        _at_most("temperature", self.temperature or 0, MOST_TEMPERATURE)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        _at_most("n", self.choices, limits.max_choices)
        _at_most("logprobs", self.num_logprobs or 0, limits.max_logprobs)
        _at_most("stop", len(stops), limits.max_stops, "strings")
        _at_most("stop", max(map(len, stops), default=0), MOST_STOP, "characters")
        _at_most("logit_bias", len(self.logit_bias or ()), MOST_TOKENS, "tokens")
        _at_most("stop_token_ids", len(self.stop_token_ids or ()), MOST_TOKENS, "tokens")
        _at_most("bad_words", len(self.bad_words or ()), MOST_TOKENS, "words")
        _at_most("allowed_token_ids", len(self.allowed_token_ids or ()), MOST_ALLOWED, "tokens")
        _at_most("bad_words", sum(map(len, self.bad_words or ())), MOST_WORDS, "characters")


SAME = (  # fields that are called as in SamplingParams
    *("top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "min_p"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("allowed_token_ids", "bad_words"),
)
OF_CACHE = ("keep_tokens", "max_cache_tokens", "protected", "every", "prefix_caching", "cache_salt")
OURS = {  # fields that a client knows by another name
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format",
    "regex": "structured_outputs",
}


def _at_most(name: str, value: float, most: int, unit: str = "") -> None:
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


class CompletionBody(Sampled, kw_only=True):
    unsupported = UNSUPPORTED_COMPLETION

    prompt: Raw  # a text, token ids, or a list of either
    prompt_logprobs: Count | None = None
    context: str | None = None  # a packed one's name
    logprobs: Count | None = None
    echo: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        return super().most_tokens or DEFAULT_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Where the prompt is echoed, as many as of outputs."""
        echoed = self.logprobs if self.echo else None
        return echoed if self.prompt_logprobs is None else max(self.prompt_logprobs, echoed or 0)

    def prompts(self, limits: Limits) -> Sequence[str | Ids]:
        """One or several. Raises APIError."""
        content = bytes(self.prompt)
        kind = _kind_of_prompt(content)
        if kind == list[Ids]:  # which holds no strings: a list begins at every bracket
            _at_most("prompt", content.count(b"[") - 1, limits.max_choices, "prompts")
        value = decode_field("prompt", kind, self.prompt)
        if not value:
            raise APIError(400, "prompt must hold at least 1 prompt; got none", param="prompt")
        prompts = [value] if kind in (str, Ids) else value
        _at_most("prompt", len(prompts) * self.choices, limits.max_choices, "choices")
        return prompts

    def release(self) -> None:
        super().release()
        self.prompt = EMPTY

    def _check(self, limits: Limits) -> None:
        super()._check(limits)
        _at_most("prompt_logprobs", self.prompt_logprobs or 0, limits.max_logprobs)
        if self.stream and self.prompt_logprobs is not None:
            raise APIError(
                400,
                "prompt_logprobs come with a whole answer: leave stream out",
                param="prompt_logprobs",
            )


def _kind_of_prompt(content: bytes) -> Any:
    """By the first characters of its JSON."""
    first, second = content[:1], content[1:].lstrip()[:1]
    if first != b"[":
        return str
    return {b"[": list[Ids], b'"': list[str]}.get(second, Ids)


class Part(Struct, gc=False):
    type: str
    text: str | None = None


Nothing = Annotated[list[Raw], Meta(max_length=0)] | None


class Message(Struct, gc=False, forbid_unknown_fields=True):
    """Fields that are Nothing come back with an answer of OpenAI's client; kvfold's are empty."""

    role: str
    content: str | list[Part] | None = None
    name: Annotated[str, Meta(max_length=MOST_NAME)] | None = None
    tool_calls: Nothing = None
    tool_call_id: Nothing = None
    function_call: Nothing = None
    refusal: Nothing = None
    annotations: Nothing = None
    audio: Nothing = None
    reasoning: Nothing = None
    reasoning_content: Nothing = None

    @property
    def turn(self) -> dict[str, str]:
        """As chat templates take it, which know no developer. Raises APIError."""
        role = "system" if self.role == "developer" else self.role
        name = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.text} | name

    @property
    def text(self) -> str:
        """Raises APIError for parts that are no text."""
        if not isinstance(self.content, list):
            return self.content or ""
        _at_most("messages", len(self.content), MOST_MESSAGES, "parts of a message")
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise APIError(
                    400,
                    f"messages: a part of type {part.type!r:.100} is not supported, as this model "
                    'reads text alone: send {"type": "text", "text": ...}',
                    param="messages",
                )
        return "".join(part.text or "" for part in self.content)


class Conversation:
    """What is read of a conversation's fields, which are its subclasses' own."""

    __slots__ = ()

    messages: list[Message] | None
    chat_template_kwargs: Raw
    add_generation_prompt: bool | None
    continue_final_message: bool | None

    @property
    def turns(self) -> list[dict[str, str]]:
        """Raises APIError."""
        messages = self.messages or ()
        if not messages:
            raise APIError(400, "messages must hold at least 1; got none", param="messages")
        _at_most("messages", len(messages), MOST_MESSAGES, "messages")
        return [x.turn for x in messages]

    @property
    def variables(self) -> dict[str, Any]:
        """Of the chat template. Raises APIError."""
        content, name = bytes(self.chat_template_kwargs), "chat_template_kwargs"
        _at_most(name, len(content), MOST_VARIABLES, "bytes")
        known = decode_field(name, dict[str, Any] | None, self.chat_template_kwargs or NULL) or {}
        begun, ended = self.continue_final_message, self.add_generation_prompt
        if begun and ended:
            raise APIError(
                400,
                "continue_final_message goes on with the last message and add_generation_prompt "
                "begins another one: give one of them",
                param="continue_final_message",
            )
        how = {"continue_final_message": begun, "add_generation_prompt": False if begun else ended}
        return known | {name: x for name, x in how.items() if x is not None}


NULL = Raw(b"null")


class ChatBody(Sampled, Conversation, kw_only=True):
    unsupported = UNSUPPORTED_CHAT

    messages: list[Message]
    chat_template_kwargs: Raw = field(default_factory=Raw)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    prompt_logprobs: Raw = field(default_factory=Raw)
    context: Raw = field(default_factory=Raw)

    @property
    def most_tokens(self) -> int:
        """By default as many as there are positions: an engine ends there."""
        return super().most_tokens or 2**31

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def release(self) -> None:
        super().release()
        self.messages = []
        self.chat_template_kwargs = self.prompt_logprobs = self.context = EMPTY

    def _check(self, limits: Limits) -> None:
        super()._check(limits)
        if bytes(self.prompt_logprobs) not in NOTHING:
            raise APIError(400, "prompt_logprobs are of /v1/completions", param="prompt_logprobs")
        if bytes(self.context) not in NOTHING:
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


NOTHING = (b"", b"null")


class TokenizeBody(Body, Conversation, kw_only=True):
    """add_special_tokens: of a prompt; a chat template writes its own."""

    unsupported = UNSUPPORTED_TOKENIZE

    messages: list[Message] | None = None
    chat_template_kwargs: Raw = field(default_factory=Raw)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    tokens: Ids
