"""Normalise the arguments of `LLM.generate`: one list of prompts, and settings for each."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvfold.engine.requests.request import CacheParams, SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int]


def spread(
    name: str, value: T | Sequence[T] | None, prompts: Sequence[Prompt]
) -> Sequence[T | None]:
    """One setting per prompt, from a single setting or one for each. Raises ValueError."""
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValueError(
            f"{name} must be one for all prompts, or one each; got {len(value)} for {len(prompts)}"
        )
    return value


def check_params(sampling: Any, cache: Any) -> None:
    """Raises ValueError if these are not SamplingParams and CacheParams, or None."""
    for name, value, kind in (
        ("sampling", sampling, SamplingParams),
        ("cache", cache, CacheParams),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}; got {value!r:.100}")


def as_list(prompts: Any) -> Sequence[Prompt]:
    """A list of prompts, from one prompt (text or token ids) or several. Raises ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not hasattr(prompts, "__getitem__"):
        raise ValueError(
            f"prompts must be a text, token ids or a list of these; got {prompts!r:.100}"
        )
    items = list(prompts)
    return [items] if items and all(map(_is_number, items)) else items


def _is_number(item: Any) -> bool:
    return not isinstance(item, str | Sequence | Mapping) and getattr(item, "ndim", 0) == 0
