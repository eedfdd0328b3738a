"""A suite asked of a model: prompts, answers, verdicts, and what changed against another model."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from kvfold.config import check
from kvfold.evaluation.suites import SUITES
from kvfold.evaluation.suites.base import Question, Suite, Verdict
from kvfold.utils.chat import encode_chat
from kvfold.utils.progress import Progress, stage
from kvfold.utils.tokens import encode_prompt

if TYPE_CHECKING:
    from kvfold.evaluation.suites.engines import Answering, Reply


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question's answer. kind, detail: of its verdict; num_tokens: generated, an end token
    included; error: why its request failed, which is never right."""

    id: str
    right: bool
    kind: str
    detail: str
    text: str
    num_tokens: int
    finish_reason: str
    error: str | None


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """All answers to a suite. chat: whether questions went through a chat template; seconds: of
    generating, without judging; judge_seconds: of judging."""

    suite: str
    engine: str
    chat: bool
    max_new_tokens: int
    seconds: float
    judge_seconds: float
    answers: tuple[Answer, ...]

    @property
    def right(self) -> int:
        return sum(x.right for x in self.answers)

    @property
    def num_tokens(self) -> int:
        return sum(x.num_tokens for x in self.answers)

    @property
    def kinds(self) -> dict[str, int]:
        """How many verdicts of each kind."""
        return dict(Counter(x.kind for x in self.answers).most_common())

    @property
    def errors(self) -> dict[str, int]:
        """How many requests ended for each error; numbers in an error become N."""
        found = Counter(re.sub(r"\d+", "N", x.error) for x in self.answers if x.error is not None)
        return dict(found.most_common())

    def record(self) -> dict[str, Any]:
        """Plain values, with every answer's text."""
        counted = {
            "questions": len(self.answers),
            "right": self.right,
            "num_tokens": self.num_tokens,
            "kinds": self.kinds,
            "finish_reasons": dict(Counter(x.finish_reason for x in self.answers).most_common()),
            "errors": self.errors,
        }
        own = asdict(self)
        answers = own.pop("answers")
        return {**own, **counted, "answers": list(answers)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `record` returned. Raises KeyError, TypeError or ValueError for anything else."""
        own = {name: record[name] for name in cls.__dataclass_fields__}
        found = cls(**{**own, "answers": tuple(Answer(**x) for x in own["answers"])})
        for part in (found, *found.answers):
            check(part)
        return found


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Answers of one result beside another's: ids of questions that were right and are wrong now,
    the other way round, and how many texts are equal."""

    right_before: int
    right: int
    to_wrong: tuple[str, ...]
    to_right: tuple[str, ...]
    same_texts: int


def prompts_of(suite: Suite, questions: Sequence[Question], tokenizer: Any) -> list[list[int]]:
    """Token ids of every question, through the tokenizer's chat template where it has one."""
    if tokenizer.chat_template:
        return [encode_chat(tokenizer, suite.chat(x)) for x in questions]
    return [encode_prompt(tokenizer, suite.text(x)) for x in questions]


def run_suite(
    name: str,
    questions: Sequence[Question],
    engine: "Answering",
    *,
    max_new_tokens: int | None = None,
    progress: Progress | None = None,
) -> SuiteResult:
    """Ask a model, greedily, the questions that `read_suite` read, and judge its answers.

    name: of SUITES; max_new_tokens: most tokens of an answer (default: the suite's); progress:
    told what is done. A request that fails and a program that misbehaves are wrong answers, and end
    nothing else. Raises ValueError where answers cannot be judged on this machine.
    """
    suite = SUITES[name]
    suite.check_ready()
    limit = max_new_tokens or suite.max_new_tokens
    chat = bool(engine.tokenizer.chat_template)
    prompts = prompts_of(suite, questions, engine.tokenizer)
    begin = time.perf_counter()
    replies = engine.answer(
        prompts,
        max_new_tokens=limit,
        stop=() if chat else suite.stop,
        report=stage(progress, f"{name} answers"),
    )
    answered = time.perf_counter()
    texts = [reply.text for reply in replies]
    verdicts = suite.judge(questions, texts, stage(progress, f"{name} verdicts"))
    return SuiteResult(
        suite=name,
        engine=engine.name,
        chat=chat,
        max_new_tokens=limit,
        seconds=answered - begin,
        judge_seconds=time.perf_counter() - answered,
        answers=tuple(map(_answer, questions, replies, verdicts)),
    )


def _answer(question: Question, reply: "Reply", verdict: Verdict) -> Answer:
    if reply.error is not None:
        verdict = Verdict(False, "error", reply.error)
    return Answer(
        id=question.id,
        right=verdict.right,
        kind=verdict.kind,
        detail=verdict.detail,
        text=reply.text,
        num_tokens=len(reply.token_ids),
        finish_reason=reply.finish_reason,
        error=reply.error,
    )


def check_alike(
    before: SuiteResult, ids: Sequence[str], *, suite: str, chat: bool, max_new_tokens: int
) -> None:
    """Raises ValueError for results of an earlier run that are not of the questions with these ids,
    asked in the same way; to be asked before the questions are."""
    for what, new in {"suite": suite, "chat": chat, "max_new_tokens": max_new_tokens}.items():
        if (old := getattr(before, what)) != new:
            raise ValueError(f"these results differ in {what} ({old} and {new}); run both alike")
    if [x.id for x in before.answers] != list(ids):
        raise ValueError(
            f"these results answer different questions of suite {suite}: "
            f"{len(before.answers)} before and {len(ids)} now; run both alike"
        )


def changes(before: SuiteResult, after: SuiteResult) -> Changes:
    """Raises ValueError for results that are not of the same questions, asked in the same way."""
    check_alike(
        before,
        [x.id for x in after.answers],
        suite=after.suite,
        chat=after.chat,
        max_new_tokens=after.max_new_tokens,
    )
    pairs = list(zip(before.answers, after.answers, strict=True))
    return Changes(
        right_before=before.right,
        right=after.right,
        to_wrong=tuple(y.id for x, y in pairs if x.right and not y.right),
        to_right=tuple(y.id for x, y in pairs if y.right and not x.right),
        same_texts=sum(x.text == y.text for x, y in pairs),
    )
