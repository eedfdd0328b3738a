"""The base class of tasks: how an example is parsed, asked and scored.

Keys of an example that its task does not know are ignored, since many data sets have more.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids to run through the model, and what to compute after them.

    context: is read first, and compressed if the cache compresses. A context that does not fit the
    model's positions is truncated on its left. question: is read after the compression. num_new:
    tokens to generate after context and question. endings: continuations of the context whose
    log-likelihoods are computed.
    """

    context: list[int]
    question: Sequence[int] = ()
    endings: Sequence[list[int]] = ()
    num_new: int = 0

    @property
    def num_following(self) -> int:
        """Most tokens that follow the context."""
        return max([len(self.question) + self.num_new, *map(len, self.endings)])


@dataclass(frozen=True, kw_only=True)
class TaskAnswer:
    """A model's answer to a prompt: the log-likelihood of each ending in nats, and the tokens that
    were generated greedily, without the end of text."""

    log_likelihoods: Sequence[float]
    tokens: Sequence[int]


class Task(ABC):
    """One example of a file, and how a model is asked and scored on it.

    A subclass is a frozen dataclass with the fields of an example. Its docstring says how the model
    is asked and what counts as right: docs/tasks.md shows it. It imports no torch, since help reads
    it.

    legal: the keys of an example, as help and errors show them. example: one such example, for the
    docs and for tests. scores: names of the scores in [0, 1]; the first one is a column of
    `kvfold compare`.
    """

    legal: ClassVar[str]
    example: ClassVar[Mapping[str, Any]]
    scores: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def fits(cls, keys: set[str]) -> bool:
        """Whether an example with these keys is of this kind. No keys may fit two kinds."""

    @classmethod
    @abstractmethod
    def parse(cls, example: Mapping[str, Any], where: str) -> Self:
        """Build the task from an example whose keys fit. Raises ValueError that names `where` and
        the key whose value is not legal."""

    @property
    def guessed(self) -> float:
        """The main score that a random answer has on average."""
        return 0.0

    @abstractmethod
    def prompts(self, tokenizer: Any) -> list[Prompt]:
        """The prompts to run."""

    @abstractmethod
    def score(self, tokenizer: Any, answers: Sequence[TaskAnswer]) -> dict[str, float]:
        """Compute every score in `scores` from the answers to `prompts`."""


def require(ok: bool, where: str, key: str, value: Any, legal: str) -> None:
    """Raise ValueError if the value of a key is not legal."""
    if not ok:
        raise ValueError(f"task {where}: {key} is {str(value)[:60]!r}; it must be {legal}")


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode generated tokens to the text that scores compare."""
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()
