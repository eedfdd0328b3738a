"""A suite: questions from one published file, how a model is asked them, and what is right."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvfold.utils.progress import Report


@dataclass(frozen=True, kw_only=True)
class Question:
    """One row of a suite's file. id: unique in the file."""

    id: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right. kind: how it was judged, a word or two to count by."""

    right: bool
    kind: str
    detail: str = ""


class Suite(ABC):
    """title: the data set; keys: of its rows, all of them texts; files: names that it is published
    under; max_new_tokens: default length of an answer; stop: strings that end an answer of a model
    without a chat template. Imports no torch, since the command line's help reads it."""

    title: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    files: ClassVar[tuple[str, ...]]
    max_new_tokens: ClassVar[int]
    stop: ClassVar[tuple[str, ...]]

    @abstractmethod
    def question(self, row: Mapping[str, Any], line: int) -> Question:
        """A row that has all `keys`, of this line of the file. Raises ValueError with what is wrong
        with a value."""

    @abstractmethod
    def chat(self, question: Question) -> str:
        """What a user asks a model that chats."""

    @abstractmethod
    def text(self, question: Question) -> str:
        """What a model without a chat template continues."""

    def check_ready(self) -> None:  # noqa: B027
        """Raises ValueError where answers cannot be judged on this machine; asked before they are
        generated."""

    @abstractmethod
    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        """A verdict for each answer, given in a chat or as a continuation."""
