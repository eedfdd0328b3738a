"""The base classes of suites: the questions of a benchmark, how a model is asked them, and how its
answers are judged."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from kvfold.utils.progress import Report
from kvfold.utils.text import json_object, numbered_lines


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a suite. id: unique in the suite. fields: its values by key. group: the task or
    data set that it belongs to, if the suite has several."""

    id: str
    fields: Mapping[str, Any]
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """The words that ask a question. The user's message is `context + question`.

    context: long text that the cache may compress before the model reads `question`; empty if there
    is none. reply: words with which the answer begins. chat: use the chat template, if there is
    one. max_new_tokens: longest answer (None: the suite's).
    """

    context: str = ""
    question: str
    reply: str = ""
    chat: bool = True
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Verdict:
    """How good an answer is. score: in [0, 1]. kind: why, in a word or two, by which verdicts are
    counted."""

    score: float
    kind: str
    detail: str = ""

    @classmethod
    def graded(cls, score: float, detail: str = "") -> Self:
        """The verdict of a score that may be a fraction."""
        kind = "right" if score == 1 else "partly right" if score > 0 else "wrong"
        return cls(score, kind, detail)


class Suite(ABC):
    """Questions of one benchmark, whose answers can be checked.

    The docstring of a subclass says how a model is asked and how an answer is judged, for
    docs/suites.md. The module imports no torch, since help reads it.

    title: the name of the data set. files: names under which it is published, or patterns of them.
    needs_files: whether there are no questions without them. max_new_tokens: default length of an
    answer, the longest one. stop: strings that end an answer of a model without a chat template.
    has_context: whether messages have a context. truncates: cut prompts that are longer than the
    model's positions in their middle. default_length: tokens of a question and its answer, for
    suites that build questions of any length.
    """

    title: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    needs_files: ClassVar[bool] = True
    max_new_tokens: ClassVar[int]
    stop: ClassVar[tuple[str, ...]] = ()
    has_context: ClassVar[bool] = False
    truncates: ClassVar[bool] = False
    default_length: ClassVar[int | None] = None

    def find(self, folder: Path) -> Path:
        """Return the path of the suite's file in a folder. Raises ValueError if there is none, or
        more than one."""
        paths = self.files_in(folder)
        if len(paths) == 1:
            return paths[0]
        names = ", ".join(x.name for x in paths) or f"no {' or '.join(self.files)}"
        raise ValueError(f"{folder} has {names}; name the file")

    def files_in(self, folder: Path) -> list[Path]:
        """The suite's files in a folder, under the first published name that exists."""
        matches = (sorted(x for x in folder.glob(name) if x.is_file()) for name in self.files)
        return next(filter(None, matches), [])

    @abstractmethod
    def read(
        self,
        path: Path | None,
        where: str,
        *,
        rows: int | None = None,
        length: int | None = None,
        tokenizer: Any = None,
        report: Report | None = None,
    ) -> list[Question]:
        """Read or build the questions.

        path: of a file, or of a folder. where: with which errors begin. rows: most questions of
        each group (None: all). length, tokenizer: tokens of a question and its answer, for suites
        that build questions of any length. report: called with (questions built, all). Raises
        ValueError.
        """

    def notes(self, path: Path | None) -> tuple[str, ...]:
        """What differs from the published benchmark with the files at `path`."""
        return ()

    @abstractmethod
    def message(self, question: Question, chat: bool) -> Message:
        """The words that ask a question. chat: whether the model has a chat template."""

    def check_ready(self) -> None:  # noqa: B027
        """Raise ValueError if answers cannot be judged on this machine. Called before any are
        generated."""

    @abstractmethod
    def solution(self, question: Question) -> str:
        """An answer of score 1, for tests."""

    @abstractmethod
    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        """Judge each answer, a reply in a chat or a continuation. report: called with (answers
        judged, all)."""


class LineSuite(Suite):
    """A suite whose questions are the lines of a JSONL file.

    keys: of each line. texts: the keys whose values are texts that are not blank (default: all).
    example: a line of the file, and right_answer: an answer of score 1 to it, both for tests.
    """

    keys: ClassVar[tuple[str, ...]]
    texts: ClassVar[tuple[str, ...] | None] = None
    example: ClassVar[Mapping[str, Any]]
    right_answer: ClassVar[str]

    def solution(self, question: Question) -> str:
        return self.right_answer

    @abstractmethod
    def question(self, fields: Mapping[str, Any], line: int) -> Question:
        """Build the question from a line that has all `keys`. line: its number in the file. Raises
        ValueError that says what is wrong with a value."""

    def read(
        self,
        path: Path | None,
        where: str,
        *,
        rows: int | None = None,
        length: int | None = None,
        tokenizer: Any = None,
        report: Report | None = None,
    ) -> list[Question]:
        """Read the first `rows` lines of a .jsonl, .jsonl.gz or .jsonl.xz file."""
        assert path is not None
        lines = numbered_lines(path)
        questions = [self._parse(text, f"{where} line {i}", i) for i, text in lines]
        (id, count), *_ = Counter(x.id for x in questions).most_common(1)
        if count > 1:
            raise ValueError(f"{where}: {id} is on {count} lines; ids must be unique")
        return questions[:rows]

    def _parse(self, text: str, where: str, number: int) -> Question:
        legal = f"a line of {self.title} has the keys {', '.join(self.keys)}"
        try:
            fields = json_object(text)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; {legal}") from None
        if not fields.keys() >= set(self.keys):
            raise ValueError(f"{where}: keys {', '.join(fields) or 'none'}; {legal}")
        for key in self.keys if self.texts is None else self.texts:
            if not isinstance(fields[key], str) or not fields[key].strip():
                raise ValueError(
                    f"{where}: {key} is {fields[key]!r:.60}; it must be a text that is not blank"
                )
        try:
            return self.question(fields, number)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
