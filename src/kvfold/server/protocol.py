"""Request bodies of the HTTP API, and the engine parameters made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Raw, Struct, field

from kvfold.engine.requests.request import CacheParams, SamplingParams
from kvfold.server.errors import UNKNOWN, APIError, at_most, invalid
from kvfold.server.limits import Limits
from kvfold.server.schemas import MAX_PATTERN, MAX_SCHEMA, check_schema
from kvfold.server.tools.base import regex_format, schema_format
from kvfold.server.tools.request import (
    MAX_TOOLS_BYTES,
    Choice,
    FunctionName,
    Json,
    ToolUse,
    read_tools,
    tool_use,
    tools_for_template,
)
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

MAX_MESSAGES = 4096  # in a conversation; also the parts of one message
MAX_STOP_LENGTH = 1024  # characters of a stop string
MAX_SALT = 1024  # characters
MAX_LISTED_TOKENS = 1024  # entries of logit_bias, stop_token_ids and bad_words
MAX_ALLOWED_TOKENS = 2**18  # the size of the largest vocabularies
MAX_BAD_WORDS = 2**14  # characters of all bad words
MAX_TEMPERATURE = 2  # as in OpenAI's API
MAX_TEMPLATE_VARIABLES = 2**16  # bytes of chat_template_kwargs
ANY_OBJECT = {"type": "object"}
DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API
MAX_NAME = 256  # characters of a message's name

B = TypeVar("B", bound="Body")
TokenIds = list[int]
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Pattern = Annotated[str, Meta(max_length=MAX_PATTERN)]
Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT)]


def decode(body_type: type[B], content: bytes) -> B:
    """Parse a request body as `body_type`. Raises APIError.

    Parsing stops at the first error, and no objects are created for unsupported fields.
    """
    try:
        body = msgspec.json.decode(content, type=with_unsupported_fields(body_type))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if name := UNKNOWN.fullmatch(str(error)):
            raise unknown(name[1], body_type.__struct_fields__) from None
        raise invalid(error) from None
    drop_extras(body, body_type.unsupported)
    return body


@cache
def with_unsupported_fields(body_type: type[B]) -> type[B]:
    """`body_type` with the fields that clients may send but that are not supported."""
    return cast(type[B], with_extras(body_type, body_type.unsupported))


def decode_field(name: str, type_: Any, content: Raw) -> Any:
    """Parse a field that was left as raw JSON. Raises APIError."""
    try:
        return msgspec.json.decode(content, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(error, param=name) from None


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies. Unknown fields are refused, null means left out, and strings are not
    converted to numbers.

    unsupported: fields of other servers that change answers, with their neutral values.
    """

    unsupported: ClassVar[Mapping[str, Values]] = {}

    model: str | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_obfuscation (OpenAI's padding against traffic analysis) is accepted and ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Struct, forbid_unknown_fields=True):
    """name, description and strict are ignored: output always follows the schema."""

    definition: Raw = field(name="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_for_output(self) -> dict[str, Any] | bool | None:
        """The JSON schema that the output must follow, if any. Raises APIError if it is missing or
        too large."""
        if self.type != "json_schema":
            return ANY_OBJECT if self.type == "json_object" else None
        if self.json_schema is None:
            raise APIError(
                400,
                "response_format: 'json_schema' needs json_schema={\"schema\": ...}",
                param="response_format",
            )
        content = self.json_schema.definition
        at_most("response_format", len(bytes(content)), MAX_SCHEMA, "bytes of a schema")
        schema: dict[str, Any] | bool = decode_field(
            "response_format", dict[str, Any] | bool, content
        )
        check_schema("response_format", schema)
        return schema


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's structured_outputs, of which only regex is supported."""

    regex: Pattern


class GenerationBody(Body, kw_only=True):
    """Fields that completions and chats share: OpenAI's, then vLLM's, then the cache's."""

    n: Positive | None = None
    best_of: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None  # OpenAI's newer name; it takes precedence
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
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
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
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def requested_tokens(self) -> int | None:
        """Output tokens that the client asks for; None if it leaves the number open."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def max_output_tokens(self) -> int | None:
        return self.requested_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives reported per output token; None: no logprobs."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives reported per prompt token; None: no logprobs."""
        return None

    @property
    def schema(self) -> Json | bool | None:
        """The JSON schema that the text must follow, if any. Raises APIError."""
        return None if self.response_format is None else self.response_format.schema_for_output

    @property
    def regex(self) -> str | None:
        """The regular expression that the text must follow, if any."""
        return None if self.structured_outputs is None else self.structured_outputs.regex

    @property
    def cache(self) -> CacheParams:
        values = {name: getattr(self, name) for name in CACHE_FIELDS}
        return CacheParams(**{name: x for name, x in values.items() if x is not None})

    def sampling(self, limits: Limits, **changes: Any) -> list[SamplingParams]:
        """Sampling parameters of every choice. With a seed, choices have consecutive seeds.
        changes: settings that the body does not have.

        Raises APIError for what this server refuses, and ValueError for what the engine refuses.
        """
        self._check(limits)
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values |= {
            "max_new_tokens": self.max_output_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": self.top_k if (self.top_k or 0) > 0 else None,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
            "json_schema": self.schema,
            "regex": self.regex,
            **changes,
        }
        params = {name: value for name, value in values.items() if value is not None}
        with renamed(**CLIENT_NAMES):
            first = SamplingParams(**params)
        if first.seed is None:
            return [first] * self.num_choices
        return [first.changed(seed=(first.seed + i) % 2**63) for i in range(self.num_choices)]

    def release(self) -> None:
        """Drop the fields that hold the body's bytes and texts, once they have been read."""
        self.response_format = self.bad_words = self.logit_bias = self.allowed_token_ids = None
        self.structured_outputs = None

    def _check(self, limits: Limits) -> None:
        if self.best_of not in (None, self.num_choices):
            raise APIError(
                400,
                f"best_of={self.best_of} is not supported by this server: leave it out, or set it "
                "to n",
                param="best_of",
            )
        if self.schema is not None and self.regex is not None:
            raise APIError(
                400,
                "response_format and structured_outputs both say what the text is: give one",
                param="response_format",
            )
        at_most("temperature", self.temperature or 0, MAX_TEMPERATURE)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        at_most("n", self.num_choices, limits.max_choices)
        at_most("logprobs", self.num_logprobs or 0, limits.max_logprobs)
        at_most("stop", len(stops), limits.max_stops, "strings")
        at_most("stop", max(map(len, stops), default=0), MAX_STOP_LENGTH, "characters")
        at_most("logit_bias", len(self.logit_bias or ()), MAX_LISTED_TOKENS, "tokens")
        at_most("stop_token_ids", len(self.stop_token_ids or ()), MAX_LISTED_TOKENS, "tokens")
        at_most("bad_words", len(self.bad_words or ()), MAX_LISTED_TOKENS, "words")
        at_most(
            "allowed_token_ids", len(self.allowed_token_ids or ()), MAX_ALLOWED_TOKENS, "tokens"
        )
        at_most("bad_words", sum(map(len, self.bad_words or ())), MAX_BAD_WORDS, "characters")


# Settings of the engine that are fields of a request with the same name.
SAMPLING_FIELDS, CACHE_FIELDS = (
    [x.name for x in fields(params) if x.name in GenerationBody.__struct_fields__]
    for params in (SamplingParams, CacheParams)
)
CLIENT_NAMES = {  # setting of the engine: name of the field in a request
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "structural_tag": "tools",
}


class CompletionBody(GenerationBody, kw_only=True):
    unsupported = UNSUPPORTED_COMPLETION

    prompt: Raw  # a text, token ids, or a list of either
    prompt_logprobs: Count | None = None
    context: str | None = None  # name of a packed context
    logprobs: Count | None = None
    echo: bool | None = None

    @property
    def max_output_tokens(self) -> int | None:
        return super().max_output_tokens or DEFAULT_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """At least as many as for outputs, if the prompt is echoed."""
        echoed = self.logprobs if self.echo else None
        return echoed if self.prompt_logprobs is None else max(self.prompt_logprobs, echoed or 0)

    def prompts(self, limits: Limits) -> Sequence[str | TokenIds]:
        """The prompts. Raises APIError."""
        content = bytes(self.prompt)
        type_ = _prompt_type(content)
        if type_ == list[TokenIds]:  # it holds no strings, so every bracket begins a list
            at_most("prompt", content.count(b"[") - 1, limits.max_choices, "prompts")
        value = decode_field("prompt", type_, self.prompt)
        if not value:
            raise APIError(400, "prompt must hold at least 1 prompt; got none", param="prompt")
        prompts = [value] if type_ in (str, TokenIds) else value
        at_most("prompt", len(prompts) * self.num_choices, limits.max_choices, "choices")
        return prompts

    def release(self) -> None:
        super().release()
        self.prompt = EMPTY

    def _check(self, limits: Limits) -> None:
        super()._check(limits)
        at_most("prompt_logprobs", self.prompt_logprobs or 0, limits.max_logprobs)
        if self.stream and self.prompt_logprobs is not None:
            raise APIError(
                400,
                "prompt_logprobs is not supported with stream: leave stream out",
                param="prompt_logprobs",
            )


def _prompt_type(content: bytes) -> Any:
    """The type of a prompt, by the first characters of its JSON."""
    first, second = content[:1], content[1:].lstrip()[:1]
    if first != b"[":
        return str
    return {b"[": list[TokenIds], b'"': list[str]}.get(second, TokenIds)


class ContentPart(Struct, gc=False):
    type: str
    text: str | None = None


EmptyList = Annotated[list[Raw], Meta(max_length=0)] | None


class CalledFunction(Struct, gc=False):
    """arguments: a JSON object as text."""

    name: FunctionName
    arguments: str | None = None


class MessageCall(Struct, gc=False):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"

    @property
    def for_template(self) -> Json:
        """The call as chat templates read it. Raises APIError for arguments that are not JSON."""
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}", type=Json)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            raise APIError(
                400,
                f"messages: the arguments of a call of {self.function.name!r:.100} are no JSON "
                f"object: {error}; leave the call out if an answer was cut",
                param="messages",
            ) from None
        function = {"name": self.function.name, "arguments": arguments}
        call: Json = {"type": self.type, "function": function}
        return call if self.id is None else {"id": self.id} | call


class ChatMessage(Struct, gc=False, forbid_unknown_fields=True):
    """A chat message. Fields of type EmptyList are part of the messages that OpenAI's client sends
    back; kvfold never fills them."""

    role: str
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    tool_calls: Raw = field(default_factory=Raw)  # MessageCalls
    tool_call_id: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    function_call: EmptyList = None
    refusal: EmptyList = None
    annotations: EmptyList = None
    audio: EmptyList = None
    reasoning: str | None = None  # vLLM's name of reasoning_content
    reasoning_content: str | None = None

    @property
    def template_message(self) -> Json:
        """The message for the chat template; role developer becomes system. Raises APIError.

        The reasoning of earlier answers has the names that templates read; many leave it out.
        """
        role = "system" if self.role == "developer" else self.role
        message: Json = {"role": role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        calls = decode_field("messages", list[MessageCall] | None, self.tool_calls or NULL)
        if calls:
            self._check_role("tool_calls", "assistant")
            message["tool_calls"] = [x.for_template for x in calls]
        if reasoning := self.reasoning_content or self.reasoning:
            name = "reasoning_content" if self.reasoning_content else "reasoning"
            self._check_role(name, "assistant")
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self.tool_call_id is not None:
            self._check_role("tool_call_id", "tool")
            message["tool_call_id"] = self.tool_call_id
        return message

    def _check_role(self, field: str, role: str) -> None:
        if self.role != role:
            raise APIError(
                400,
                f"messages: {field} belongs to messages of role {role}; got {self.role!r:.100}",
                param="messages",
            )

    @property
    def text(self) -> str:
        """The text of all parts. Raises APIError for a part that is not text."""
        if not isinstance(self.content, list):
            return self.content or ""
        at_most("messages", len(self.content), MAX_MESSAGES, "parts of a message")
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise APIError(
                    400,
                    f"messages: a part of type {part.type!r:.100} is not supported, because this "
                    'model reads only text: send {"type": "text", "text": ...}',
                    param="messages",
                )
        return "".join(part.text or "" for part in self.content)


class ChatFields:
    """What the chat template gets, for bodies with the fields below."""

    __slots__ = ()

    messages: list[ChatMessage] | None
    chat_template_kwargs: Raw
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    tools: Raw

    @property
    def template_tools(self) -> list[Json] | None:
        """The tools for the chat template; None: it has none to show. Raises APIError."""
        tools = self.tool_list
        if tools:
            read_tools(tools)
        return tools_for_template(tools) or None

    @property
    def tool_list(self) -> list[Json]:
        """The tools as the client sent them. Raises APIError."""
        content = bytes(self.tools)
        at_most("tools", len(content), MAX_TOOLS_BYTES, "bytes")
        return decode_field("tools", list[Json] | None, self.tools or NULL) or []

    @property
    def template_messages(self) -> list[Json]:
        """The messages for the chat template. Raises APIError."""
        messages = self.messages or ()
        if not messages:
            raise APIError(400, "messages must hold at least 1; got none", param="messages")
        at_most("messages", len(messages), MAX_MESSAGES, "messages")
        num_calls = sum(bytes(x.tool_calls).count(b'"function"') for x in messages)
        at_most("messages", num_calls, 2 * MAX_MESSAGES, "tool calls")  # each may have it twice
        return [x.template_message for x in messages]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template. Raises APIError."""
        content, name = bytes(self.chat_template_kwargs), "chat_template_kwargs"
        at_most(name, len(content), MAX_TEMPLATE_VARIABLES, "bytes")
        kwargs = decode_field(name, dict[str, Any] | None, self.chat_template_kwargs or NULL) or {}
        if "tools" in kwargs:
            raise APIError(400, f"{name}: send tools beside it, as a field", param=name)
        continues, begins = self.continue_final_message, self.add_generation_prompt
        if continues and begins:
            raise APIError(
                400,
                "continue_final_message continues the last message and add_generation_prompt "
                "starts a new one: send one of them",
                param="continue_final_message",
            )
        flags = {
            "continue_final_message": continues,
            "add_generation_prompt": False if continues else begins,
        }
        variables = kwargs | {name: x for name, x in flags.items() if x is not None}
        tools = self.template_tools
        return variables if tools is None else variables | {"tools": tools}


NULL = Raw(b"null")


class ChatBody(GenerationBody, ChatFields, kw_only=True):
    unsupported = UNSUPPORTED_CHAT

    messages: list[ChatMessage]
    chat_template_kwargs: Raw = field(default_factory=Raw)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Raw = field(default_factory=Raw)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    prompt_logprobs: Raw = field(default_factory=Raw)
    context: Raw = field(default_factory=Raw)

    @property
    def max_output_tokens(self) -> int:
        """By default no limit but the engine's, the number of positions."""
        return super().max_output_tokens or 2**31

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def tool_use(self, template: Any) -> ToolUse | None:
        """How the chat uses its tools; None if the model may not call any. template: the
        tokenizer's chat template. Raises APIError."""
        text = None
        if self.schema is not None:
            text = schema_format(self.schema)
        elif self.regex is not None:
            text = regex_format(self.regex)
        tools, parallel = self.tool_list, self.parallel_tool_calls
        return tool_use(tools, self.tool_choice, parallel, template, text)

    @property
    def grammar_field(self) -> str:
        """The field that an error names if the answer's grammar cannot be followed."""
        fields = {
            "response_format": self.schema is not None,
            "structured_outputs": self.regex is not None,
            "tools": bool(self.tool_list) and self.tool_choice != "none",
        }
        return "` or `".join(name for name, is_set in fields.items() if is_set)

    @property
    def template_tools(self) -> list[Json] | None:
        """The model does not see tools that it may not call."""
        return None if self.tool_choice == "none" else super().template_tools

    def release(self) -> None:
        super().release()
        self.messages, self.tools = [], EMPTY
        self.chat_template_kwargs = self.prompt_logprobs = self.context = EMPTY

    def _check(self, limits: Limits) -> None:
        super()._check(limits)
        if bytes(self.prompt_logprobs) not in ABSENT:
            raise APIError(
                400, "prompt_logprobs: only /v1/completions has it", param="prompt_logprobs"
            )
        if bytes(self.context) not in ABSENT:
            raise APIError(
                400,
                "context: a chat template starts a new sequence and cannot continue a context: "
                "use /v1/completions, with the template's special tokens in the prompt",
                param="context",
            )
        if self.top_logprobs and not self.logprobs:
            raise APIError(
                400, "top_logprobs needs logprobs=true: set it too", param="top_logprobs"
            )


ABSENT = (b"", b"null")


class TokenizeBody(Body, ChatFields, kw_only=True):
    """add_special_tokens applies to a prompt; a chat template adds its own special tokens."""

    unsupported = UNSUPPORTED_TOKENIZE

    messages: list[ChatMessage] | None = None
    chat_template_kwargs: Raw = field(default_factory=Raw)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Raw = field(default_factory=Raw)
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    tokens: TokenIds
