"""kvfold generate: continue a prompt."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common
from kvfold.cli.options import PLACE, STORAGE, Model, Place, Storage

if TYPE_CHECKING:
    from kvfold.config import CacheConfig


def generate(
    model: Model,
    /,
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Continue a prompt; the text goes to stdout as it is made.

    Parameters
    ----------
    prompt
        Text to continue.
    prompt_file
        A file with that text.
    max_new_tokens
        Most tokens to add.
    temperature
        Sample at this temperature; greedy without it.
    top_k
        Sample from the K likeliest tokens only.
    top_p
        Sample from the likeliest tokens that hold this probability only.
    seed
        Of the sampling.
    """
    text = read_prompt(prompt, prompt_file)
    sampling = parse_sampling(temperature, top_k, top_p)
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    loaded, tokenizer = common.load(model, place)
    cache = common.cache_config(loaded, storage)
    if cache is None:
        stream(loaded, tokenizer, text, max_new_tokens, sampling, seed)
    else:
        stream_paged(loaded, tokenizer, text, max_new_tokens, sampling, seed, cache)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give one of --prompt TEXT and --prompt-file FILE")
    if prompt_file is None:
        return prompt or ""
    from kvfold.text import read_text

    return read_text(prompt_file)


def parse_sampling(
    temperature: float | None, top_k: int | None, top_p: float | None
) -> dict[str, Any]:
    """Arguments of `model.generate`."""
    if temperature is None:
        if top_k is not None or top_p is not None:
            raise ValueError("--top-k and --top-p choose what is sampled; give --temperature too")
        return {"do_sample": False}
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"--temperature must be above 0, got {temperature}; leave it out for greedy"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"--top-k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be in (0, 1], got {top_p}")
    return {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1}


def stream(
    model: Any, tokenizer: Any, text: str, max_new_tokens: int, sampling: dict[str, Any], seed: int
) -> None:
    """Print the continuation of `text`. Raises ValueError if it does not fit the model."""
    import torch
    from transformers import TextStreamer

    ids = encode(model, tokenizer, text, max_new_tokens)
    torch.manual_seed(seed)
    prompt = torch.tensor([ids], device=model.device)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )


def stream_paged(
    model: Any,
    tokenizer: Any,
    text: str,
    max_new_tokens: int,
    sampling: dict[str, Any],
    seed: int,
    cache: "CacheConfig",
) -> None:
    """The same through the engine's paged cache; what it fits goes to stderr."""
    import dataclasses
    import sys

    from kvfold.engine.llm import LLM
    from kvfold.engine.request import SamplingParams

    ids = encode(model, tokenizer, text, max_new_tokens)
    settings = dataclasses.asdict(cache)
    total = len(ids) + max_new_tokens
    llm = LLM(model, tokenizer=tokenizer, max_sequences=1, max_tokens=total, **settings)
    for name, value in llm.summary():
        print(f"{name}: {value}", file=sys.stderr)
    wanted = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=sampling.get("temperature", 0.0),
        top_k=sampling.get("top_k") or None,
        top_p=sampling.get("top_p") or 1.0,
        seed=seed,
    )
    for output in llm.stream(ids, wanted):
        print(output.text, end="", flush=True)
        if output.error:
            raise ValueError(f"generation failed: {output.error}")
    print()


def encode(model: Any, tokenizer: Any, text: str, max_new_tokens: int) -> list[int]:
    """Token ids of the prompt. Raises ValueError if they and the new ones do not fit the model."""
    from kvfold.evaluation.perplexity import max_positions
    from kvfold.text import encode_prompt

    ids = encode_prompt(tokenizer, text)
    if not ids:
        raise ValueError("the prompt is empty and the tokenizer has no BOS token; give some text")
    limit = max_positions(model)
    if limit is not None and len(ids) + max_new_tokens > limit:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, which with {max_new_tokens} new ones exceed the"
            f" model's {limit} positions; shorten it or lower --max-new-tokens"
        )
    return ids
