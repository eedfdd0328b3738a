"""The base class of suites: the questions of a published file, how a model is asked them, and how
its answers are judged."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvfold.utils.progress import Report


@dataclass(frozen=True, kw_only=True)
class Question:
    """A line of a suite's file. id: unique in the file. fields: the values of the line by key."""

    id: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right. kind: why, in a word or two, by which verdicts are counted."""

    right: bool
    kind: str
    detail: str = ""


class Suite(ABC):
    """Questions from one published file, whose answers can be checked.

    The docstring of a subclass says how a model is asked and when an answer is right, for
    docs/suites.md. The module imports no torch, since help reads it.

    title: the name of the data set. keys: of each line of its file; all values are texts. files:
    names under which the file is published. max_new_tokens: default length of an answer. stop:
    strings that end an answer of a model without a chat template. example: a line of the file, and
    right_answer: an answer to it, both for tests.
    """

    title: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    files: ClassVar[tuple[str, ...]]
    max_new_tokens: ClassVar[int]
    stop: ClassVar[tuple[str, ...]]
    example: ClassVar[Mapping[str, str]]
    right_answer: ClassVar[str]

    @abstractmethod
    def question(self, fields: Mapping[str, Any], line: int) -> Question:
        """Build the question from a line that has all `keys`. line: its number in the file. Raises
        ValueError that says what is wrong with a value."""

    @abstractmethod
    def chat(self, question: Question) -> str:
        """The user's message to a model with a chat template."""

    @abstractmethod
    def text(self, question: Question) -> str:
        """The text that a model without a chat template continues."""

    def check_ready(self) -> None:  # noqa: B027
        """Raise ValueError if answers cannot be judged on this machine. Called before any are
        generated."""

    @abstractmethod
    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        """Judge each answer, a reply in a chat or a continuation. report: called with (answers
        judged, all)."""
