"""kvfold generate: continues a prompt."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common
from kvfold.cli.options import (
    PLACE,
    SAMPLING,
    STORAGE,
    Flag,
    MapsName,
    ModelOrMaps,
    Place,
    Sampling,
    Storage,
)
from kvfold.utils.errors import SettingError

if TYPE_CHECKING:
    from kvfold.config import CacheConfig
    from kvfold.engine.requests.packed import PackedContext
    from kvfold.maps.sidecar import Sidecar


def generate(
    model: ModelOrMaps,
    /,
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    chat: Flag = False,
    maps: MapsName = None,
    context: Path | None = None,
    sampling: Sampling = SAMPLING,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Continue a prompt, and stream the text to stdout.

    Parameters
    ----------
    prompt
        Text to continue.
    prompt_file
        File with the text to continue.
    chat
        Treat the text as a user's message, and apply the model's chat template.
    context
        A compressed text that `kvfold pack` wrote, to continue from. The settings of the cache are
        stored in it.
    """
    text = read_prompt(prompt, prompt_file)
    model, maps = common.base_and_maps(model, maps)
    common.check_context(maps, context)
    packed = None if context is None else read_context(context, storage, chat)
    sidecar = common.load_maps(maps)
    config, tokenizer = common.load_config(model, sidecar), common.load_tokenizer(model)
    if packed is not None:
        loaded = common.load(model, place)
        stream_paged(loaded, tokenizer, text, sampling, *packed)
        return
    cache = common.cache_config(config, storage, place, maps=sidecar)
    ids = encode(config, tokenizer, text, sampling.max_new_tokens, chat)
    loaded = common.load(model, place)
    cache = common.with_policy(loaded, tokenizer, cache)
    if cache is not None:
        stream_paged(loaded, tokenizer, ids, sampling, cache, maps=sidecar)
        return
    if sidecar is not None:
        from kvfold.maps.attach import attach

        attach(loaded, sidecar)
    stream(loaded, tokenizer, ids, sampling)


def read_context(path: Path, storage: Storage, chat: bool) -> "tuple[CacheConfig, PackedContext]":
    """The cache that a packed context needs, and the context."""
    from kvfold.cli.pack import read

    if chat:
        raise SettingError(
            "`chat` starts a conversation, but `context` continues one: leave `chat` out, and write"
            " the chat template's marks into the prompt"
        )
    return read(path, storage)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of one of two options. Raises ValueError unless exactly one is given."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give one of --prompt TEXT and --prompt-file FILE")
    from kvfold.utils.text import read_text
    from kvfold.utils.tokens import check_text

    if prompt_file is not None:
        return read_text(prompt_file)
    check_text("prompt", prompt or "")
    return prompt or ""


def stream(model: Any, tokenizer: Any, ids: list[int], sampling: Sampling) -> None:
    """Print a continuation by transformers' `generate`."""
    import torch
    from transformers import TextStreamer

    from kvfold.engine.requests.params import GREEDY_BELOW

    torch.manual_seed(sampling.seed)
    prompt = torch.tensor([ids], device=model.device)
    limits = {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1}
    drawn = {"do_sample": True, "temperature": sampling.temperature, **limits}
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **(drawn if (sampling.temperature or 0) >= GREEDY_BELOW else {"do_sample": False}),
    )


def stream_paged(
    model: Any,
    tokenizer: Any,
    prompt: str | list[int],
    sampling: Sampling,
    cache: "CacheConfig",
    context: "PackedContext | None" = None,
    maps: "Sidecar | None" = None,
) -> None:
    """Print a continuation by kvfold's engine, and what its cache holds to stderr."""
    import dataclasses
    import sys

    from kvfold.engine.api.llm import LLM
    from kvfold.engine.requests.request import SamplingParams
    from kvfold.utils.tokens import encode as encode_on

    settings = dataclasses.asdict(cache)
    ids = encode_on(tokenizer, prompt) if isinstance(prompt, str) else prompt
    before = 0 if context is None else len(context.token_ids)
    total = before + len(ids) + sampling.max_new_tokens
    settings |= {"max_sequences": 1, "max_tokens": total}
    llm = LLM(model, tokenizer=tokenizer, owned=True, maps=maps, **settings)
    for name, value in llm.summary():
        print(f"{name}: {value}", file=sys.stderr)
    wanted = SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature or 0.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        seed=sampling.seed,
    )
    for output in llm.stream(ids, wanted, context=context):
        print(output.text, end="", flush=True)
        if output.error:
            raise ValueError(f"generation failed: {output.error}")
    print()


def encode(
    config: Any, tokenizer: Any, text: str, max_new_tokens: int, chat: bool = False
) -> list[int]:
    """Token ids of a prompt, or of a chat message. Raises ValueError if they do not fit into the
    model's context together with the new tokens, and for a chat without a chat template."""
    from kvfold.evaluation.perplexity import max_positions, vocabulary
    from kvfold.utils.chat import encode_chat
    from kvfold.utils.tokens import check_ids, encode_prompt, longer

    if chat and not tokenizer.chat_template:
        raise ValueError("this model has no chat template: leave --chat out")
    limit = max_positions(config)
    if limit is not None and longer(tokenizer, text, limit):
        raise ValueError(
            f"the prompt has more tokens than the model's {limit} positions; shorten it"
        )
    ids = encode_chat(tokenizer, text) if chat else encode_prompt(tokenizer, text)
    if not ids:
        raise ValueError("the prompt is empty and the tokenizer adds no BOS token; give some text")
    check_ids(ids, vocabulary(config))
    if limit is not None and len(ids) + max_new_tokens > limit:
        raise ValueError(
            f"the prompt's {len(ids)} tokens and {max_new_tokens} new ones exceed the model's"
            f" {limit} positions; shorten it or lower --max-new-tokens"
        )
    return ids
