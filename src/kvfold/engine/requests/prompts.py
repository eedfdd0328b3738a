"""What `LLM.generate` is called with, as one list of prompts with settings each."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvfold.engine.requests.request import CacheParams, SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int]


def spread(
    name: str, value: T | Sequence[T] | None, prompts: Sequence[Prompt]
) -> Sequence[T | None]:
    """A setting for every prompt."""
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValueError(
            f"{name} must be one for all prompts, or one each; got {len(value)} for {len(prompts)}"
        )
    return value


def check_params(sampling: Any, cache: Any) -> None:
    for name, value, kind in (
        ("sampling", sampling, SamplingParams),
        ("cache", cache, CacheParams),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}; got {value!r:.100}")


def as_list(prompts: Any) -> Sequence[Prompt]:
    """Prompts, of which a text or token ids are one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not hasattr(prompts, "__getitem__"):
        raise ValueError(
            f"prompts must be a text, token ids or a list of these; got {prompts!r:.100}"
        )
    found = list(prompts)
    return [found] if found and all(map(_is_number, found)) else found


def _is_number(item: Any) -> bool:
    return not isinstance(item, str | Sequence | Mapping) and getattr(item, "ndim", 0) == 0
