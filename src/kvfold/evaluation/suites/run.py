"""Runs a suite: prompts, answers and verdicts, and what changed from another model."""

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from kvfold.config import check
from kvfold.evaluation.perplexity import mean_and_se
from kvfold.evaluation.suites import SUITES
from kvfold.evaluation.suites.base import Question, Verdict
from kvfold.evaluation.suites.prompts import prompts_of
from kvfold.evaluation.tasks.run import Score
from kvfold.utils.progress import Progress, stage

if TYPE_CHECKING:
    from kvfold.evaluation.suites.engines import Answering, Reply


@dataclass(frozen=True, kw_only=True)
class SuiteAnswer:
    """The answer to a question. group: of the question. score, kind, detail: of its verdict.
    num_tokens: generated, with the end token. error: why the request failed; the score is 0
    then."""

    id: str
    group: str
    score: float
    kind: str
    detail: str
    text: str
    num_tokens: int
    finish_reason: str
    error: str | None


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """All answers to a suite.

    chat: whether the model has a chat template. length: tokens above which prompts were truncated,
    and truncated: how many were. seconds: of generation. judge_seconds: of judging.
    """

    suite: str
    engine: str
    chat: bool
    max_new_tokens: int
    length: int | None
    truncated: int
    seconds: float
    judge_seconds: float
    answers: tuple[SuiteAnswer, ...]

    @property
    def right(self) -> int:
        """The number of answers of score 1."""
        return sum(x.score == 1 for x in self.answers)

    @property
    def groups(self) -> dict[str, Score]:
        """The mean score of each group."""
        return _by_group([(x.group, x.score) for x in self.answers])

    @property
    def score(self) -> Score:
        """The mean over groups of their mean scores."""
        return _mean_of(self.groups)

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
            "score": self.score.mean,
            "score_se": self.score.error,
            "groups": {name: asdict(x) for name, x in self.groups.items() if name},
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
    """What changed between two results of the same questions.

    difference: mean change of the score, over groups of their means, and difference_se: its
    standard error, of paired questions. groups: the same for each group. right_before, right:
    numbers of answers of score 1. worse, better: ids of questions whose score changed. same_texts:
    number of equal answers.
    """

    difference: float
    difference_se: float
    groups: dict[str, Score]
    right_before: int
    right: int
    worse: tuple[str, ...]
    better: tuple[str, ...]
    same_texts: int


def _by_group(scores: Sequence[tuple[str, float]]) -> dict[str, Score]:
    groups: dict[str, list[float]] = {}
    for group, score in scores:
        groups.setdefault(group, []).append(score)
    return {name: Score(*mean_and_se(x), len(x)) for name, x in groups.items()}


def _mean_of(groups: Mapping[str, Score]) -> Score:
    """The mean of the groups' means, with its standard error."""
    means, errors = zip(*((x.mean, x.error) for x in groups.values()), strict=True)
    num = sum(x.num_examples for x in groups.values())
    return Score(math.fsum(means) / len(groups), math.hypot(*errors) / len(groups), num)


def run_suite(
    name: str,
    questions: Sequence[Question],
    engine: "Answering",
    *,
    max_new_tokens: int | None = None,
    length: int | None = None,
    progress: Progress | None = None,
) -> SuiteResult:
    """Generate greedy answers to the questions of `read_suite`, and judge them.

    name: of SUITES. max_new_tokens: of an answer; None: the suite's. length: tokens of a prompt and
    its answer above which a suite that truncates does so. A request that fails and a program that
    misbehaves count as wrong answers, and do not stop the rest. Raises ValueError if answers cannot
    be judged on this machine.
    """
    suite = SUITES[name]
    suite.check_ready()
    limits = {"max_new_tokens": max_new_tokens, "length": length}
    prompts = prompts_of(suite, questions, engine.tokenizer, **limits)
    begin = time.perf_counter()
    replies = engine.answer(prompts, stage(progress, f"{name} answers"))
    answered = time.perf_counter()
    texts = [reply.text for reply in replies]
    verdicts = suite.judge(questions, texts, stage(progress, f"{name} verdicts"))
    return SuiteResult(
        suite=name,
        engine=engine.name,
        chat=bool(engine.tokenizer.chat_template),
        max_new_tokens=max_new_tokens or suite.max_new_tokens,
        length=length if suite.truncates else None,
        truncated=sum(prompt.truncated for prompt in prompts),
        seconds=answered - begin,
        judge_seconds=time.perf_counter() - answered,
        answers=tuple(map(_answer, questions, replies, verdicts)),
    )


def _answer(question: Question, reply: "Reply", verdict: Verdict) -> SuiteAnswer:
    if reply.error is not None:
        verdict = Verdict(0.0, "error", reply.error)
    return SuiteAnswer(
        id=question.id,
        group=question.group,
        score=verdict.score,
        kind=verdict.kind,
        detail=verdict.detail,
        text=reply.text,
        num_tokens=len(reply.token_ids),
        finish_reason=reply.finish_reason,
        error=reply.error,
    )


def check_alike(before: SuiteResult, ids: Sequence[str], **settings: Any) -> None:
    """Raise ValueError if the results of an earlier run are not of the questions with these ids and
    these settings: suite, chat, max_new_tokens and length. Called before answers are generated."""
    for what, new in settings.items():
        if (old := getattr(before, what)) != new:
            raise ValueError(f"these results differ in {what} ({old} and {new}); run both alike")
    if [x.id for x in before.answers] != list(ids):
        raise ValueError(
            f"these results answer different questions of suite {before.suite}: "
            f"{len(before.answers)} before and {len(ids)} now; run both alike"
        )


def settings_of(result: SuiteResult) -> dict[str, Any]:
    """The settings in which results that are compared must be equal."""
    return {name: getattr(result, name) for name in ("suite", "chat", "max_new_tokens", "length")}


def changes(before: SuiteResult, after: SuiteResult) -> Changes:
    """Compare two results. Raises ValueError if questions or settings differ."""
    check_alike(before, [x.id for x in after.answers], **settings_of(after))
    pairs = list(zip(before.answers, after.answers, strict=True))
    groups = _by_group([(y.group, y.score - x.score) for x, y in pairs])
    total = _mean_of(groups)
    return Changes(
        difference=total.mean,
        difference_se=total.error,
        groups={name: x for name, x in groups.items() if name},
        right_before=before.right,
        right=after.right,
        worse=tuple(y.id for x, y in pairs if y.score < x.score),
        better=tuple(y.id for x, y in pairs if y.score > x.score),
        same_texts=sum(x.text == y.text for x, y in pairs),
    )
