"""Runs a suite: prompts, answers and verdicts, and what changed from another model."""

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
class SuiteAnswer:
    """The answer to a question. kind, detail: of its verdict. num_tokens: generated, with the end
    token. error: why the request failed; such an answer is never right."""

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
    """All answers to a suite. chat: whether a chat template was used. seconds: of generation.
    judge_seconds: of judging."""

    suite: str
    engine: str
    chat: bool
    max_new_tokens: int
    seconds: float
    judge_seconds: float
    answers: tuple[SuiteAnswer, ...]

    @property
    def right(self) -> int:
        return sum(x.right for x in self.answers)

    @property
    def num_tokens(self) -> int:
        return sum(x.num_tokens for x in self.answers)

    @property
    def kinds(self) -> dict[str, int]:
        """The number of verdicts of each kind."""
        return dict(Counter(x.kind for x in self.answers).most_common())

    @property
    def errors(self) -> dict[str, int]:
        """The number of requests by error; numbers in a message become N."""
        counts = Counter(re.sub(r"\d+", "N", x.error) for x in self.answers if x.error is not None)
        return dict(counts.most_common())

    def record(self) -> dict[str, Any]:
        """Convert to plain values, with every answer's text."""
        counted = {
            "questions": len(self.answers),
            "right": self.right,
            "num_tokens": self.num_tokens,
            "kinds": self.kinds,
            "finish_reasons": dict(Counter(x.finish_reason for x in self.answers).most_common()),
            "errors": self.errors,
        }
        values = asdict(self)
        answers = values.pop("answers")
        return {**values, **counted, "answers": list(answers)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read a record. Raises KeyError, TypeError or ValueError for values of another form."""
        values = {name: record[name] for name in cls.__dataclass_fields__}
        result = cls(**{**values, "answers": tuple(SuiteAnswer(**x) for x in values["answers"])})
        for part in (result, *result.answers):
            check(part)
        return result


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What changed between two results of the same questions. to_wrong, to_right: ids of questions
    whose verdict changed. same_texts: number of equal answers."""

    right_before: int
    right: int
    to_wrong: tuple[str, ...]
    to_right: tuple[str, ...]
    same_texts: int


def prompts_of(suite: Suite, questions: Sequence[Question], tokenizer: Any) -> list[list[int]]:
    """Encode every question, with the tokenizer's chat template if it has one."""
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
    """Generate greedy answers to the questions of `read_suite`, and judge them.

    name: of SUITES. max_new_tokens: of an answer; None: the suite's. A request that fails and a
    program that misbehaves count as wrong answers, and do not stop the rest. Raises ValueError if
    answers cannot be judged on this machine.
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


def _answer(question: Question, reply: "Reply", verdict: Verdict) -> SuiteAnswer:
    if reply.error is not None:
        verdict = Verdict(False, "error", reply.error)
    return SuiteAnswer(
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
    """Raise ValueError if the results of an earlier run are not of the questions with these ids and
    these settings. Called before answers are generated."""
    for what, new in {"suite": suite, "chat": chat, "max_new_tokens": max_new_tokens}.items():
        if (old := getattr(before, what)) != new:
            raise ValueError(f"these results differ in {what} ({old} and {new}); run both alike")
    if [x.id for x in before.answers] != list(ids):
        raise ValueError(
            f"these results answer different questions of suite {suite}: "
            f"{len(before.answers)} before and {len(ids)} now; run both alike"
        )


def changes(before: SuiteResult, after: SuiteResult) -> Changes:
    """Compare two results. Raises ValueError if questions or settings differ."""
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
