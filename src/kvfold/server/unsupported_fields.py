"""Request fields of OpenAI and vLLM that kvfold does not support.

A field that would change the answer is refused, unless its value is neutral. Others are ignored.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated

from msgspec import Meta, Raw, Struct, defstruct, field

from kvfold.server.errors import APIError

EMPTY = Raw()
Values = tuple[bytes, ...]  # JSON texts of a field's neutral values
UNSET = (b"null", b"false", b"0", b"[]", b"{}", b'""')
ON = (b"null", b"true")

# Identity, billing and caching hints: they do not change the answer.
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "session_id"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
    # Rust tokenizers put no spaces between special tokens.
    *("spaces_between_special_tokens", "stream_interval"),
)
# Fields of both completions and chats, with the values that mean the same as leaving them out.
UNSUPPORTED: Mapping[str, Values] = {
    **dict.fromkeys(
        (
            *("suffix", "functions", "use_beam_search", "early_stopping", "priority"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
            *("guided_decoding_backend", "guided_whitespace_pattern", "grammar", "json_schema"),
            *("truncate_prompt_tokens", "truncation_side", "include_stop_str_in_output"),
            *("prompt_embeds", "logits_processors", "logprob_token_ids", "thinking_token_budget"),
            *("repetition_detection", "watermarking", "return_tokens_as_token_ids", "request_id"),
            *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "mm_processor_kwargs"),
            *("media_io_kwargs", "extra_body", "extra_query", "extra_headers"),
        ),
        UNSET,
    ),
    "length_penalty": (b"null", b"1", b"1.0"),
    "function_call": (b"null", b'"none"', b'"auto"'),
    "typical_p": (b"null", b"1", b"1.0"),
}
UNSUPPORTED_COMPLETION: Mapping[str, Values] = {
    **UNSUPPORTED,
    "add_special_tokens": ON,
    **dict.fromkeys(("top_logprobs", "tools"), UNSET),
    "tool_choice": (b"null", b'"none"', b'"auto"'),
    "parallel_tool_calls": (b"null", b"false", b"true"),
}
TEMPLATE_FIELDS = ("chat_template", "documents", "mm_processor_kwargs", "media_io_kwargs")
UNSUPPORTED_CHAT: Mapping[str, Values] = {
    **UNSUPPORTED,
    **dict.fromkeys((*TEMPLATE_FIELDS, "add_special_tokens", "echo", "audio"), UNSET),
    **dict.fromkeys(("web_search_options", "reasoning_effort", "verbosity"), UNSET),
    "include_reasoning": ON,
    "modalities": (b"null", b'["text"]'),
}
UNSUPPORTED_TOKENIZE: Mapping[str, Values] = dict.fromkeys(TEMPLATE_FIELDS, UNSET)
INSTEAD = {
    "add_special_tokens": "send token ids as the prompt, which nothing is added to",
    "grammar": "send response_format or structured_outputs",
    "json_schema": "send response_format",
    "extra_body": "send what is in it beside the other fields",
    "top_logprobs": "logprobs says how many in /v1/completions",
    "tools": "/v1/chat/completions has it",
    "functions": "send tools",
    "reasoning_effort": "send it in chat_template_kwargs, if the model's template reads it",
    "documents": "send them in a message",
}
INSTEAD |= {x: "send response_format or structured_outputs" for x in UNSUPPORTED if "guided" in x}


def with_extras(body_type: type[Struct], unsupported: Iterable[str]) -> type[Struct]:
    """A subclass of a body type that also accepts the fields `unsupported` and IGNORED,
    unparsed."""
    refused = Annotated[Raw, Meta(description="Not supported.")]
    ignored = Annotated[Raw, Meta(description="Changes nothing.")]
    types = dict.fromkeys(unsupported, refused) | dict.fromkeys(IGNORED, ignored)
    fields = [(name, type_, field(default_factory=Raw)) for name, type_ in types.items()]
    return defstruct(body_type.__name__, fields, bases=(body_type,), kw_only=True)


def drop_extras(body: Struct, unsupported: Mapping[str, Values]) -> None:
    """Empty the unsupported and ignored fields of a body. Raises APIError if an unsupported field
    has a value that is not neutral."""
    for name, neutral in unsupported.items():
        if bytes(getattr(body, name)) not in (b"", *neutral):
            way_out = INSTEAD.get(name, "leave it out")
            raise APIError(400, f"{name} is not supported by this server; {way_out}", param=name)
    for name in (*unsupported, *IGNORED):
        setattr(body, name, EMPTY)


def unknown(name: str, legal: Iterable[str]) -> APIError:
    """The 400 response for a field that is not known at all."""
    similar = get_close_matches(name[:64], legal, n=1)
    hint = f"did you mean {similar[0]}?" if similar else "/docs lists the fields"
    shown = name if name.isidentifier() and len(name) <= 64 else f"{name!r:.100}"
    return APIError(
        400, f"{shown}: no such field; {hint}", param=name[:100], code="unknown_parameter"
    )
