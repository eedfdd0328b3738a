"""A kind of task and all it says of its rows: keys, prompts, and scores of a model's answers.

Other keys than its own, which many data sets carry along, are ignored.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids of a context, of `endings` that are weighed after it, and how many new tokens are
    wanted after it and a `question`, which comes when the context was compressed. A context that
    does not fit the model's positions loses tokens on its left."""

    context: list[int]
    question: Sequence[int] = ()
    endings: Sequence[list[int]] = ()
    num_new: int = 0

    @property
    def room(self) -> int:
        """Most tokens that follow the context."""
        return max([len(self.question) + self.num_new, *map(len, self.endings)])


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Log-likelihood in nats of a prompt's endings; greedy tokens, without end of text."""

    log_likelihoods: Sequence[float]
    tokens: Sequence[int]


class Task(ABC):
    """One row of a file. legal: its keys, for errors; scores: what it gives, the main one first."""

    legal: ClassVar[str]
    scores: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def fits(cls, keys: set[str]) -> bool:
        """Whether a row with these keys is of this kind."""

    @classmethod
    @abstractmethod
    def parse(cls, row: Mapping[str, Any], where: str) -> Self:
        """Raises ValueError naming `where` and the key whose value is not legal."""

    @abstractmethod
    def prompts(self, tokenizer: Any) -> list[Prompt]:
        """Questions to a model."""

    @abstractmethod
    def score(self, tokenizer: Any, answers: Sequence[Answer]) -> dict[str, float]:
        """Every one of `scores`, from the answers to `prompts`."""


def require(ok: bool, where: str, key: str, value: Any, legal: str) -> None:
    """Raises ValueError for a value that is not legal."""
    if not ok:
        raise ValueError(f"task {where}: {key} is {str(value)[:60]!r}; it must be {legal}")


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """A model's text, as scores compare it."""
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()
