"""GSM8K (Cobbe et al. 2021): grade-school mathematics, whose answers are numbers."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from kvfold.evaluation.suites.base import Question, Suite, Verdict
from kvfold.utils.progress import Report

NUMBER = r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w)])-)?(?<!\d)\.\d+"
# "The answer is \(N\)", "#### N": a number that is no term of a calculation.
ANSWER = rf"(?:answer is|####)[^\w\n]*?({NUMBER})(?![\d.,]*\d)(?!\s*(?:[-+/=×÷]|\*(?!\*)))"


def number_of(text: str) -> Decimal | None:
    """The number that an answer gives: behind its last "answer is" or "####", else the last one."""
    found = re.findall(ANSWER, text, re.IGNORECASE) or re.findall(NUMBER, text)
    return Decimal(found[-1].replace(",", "")) if found else None


class GSM8K(Suite):
    title = "GSM8K"
    keys = ("question", "answer")
    files = ("gsm8k-test.jsonl", "gsm8k.jsonl", "test.jsonl")
    max_new_tokens = 400
    stop = ("\nQuestion:",)

    def question(self, row: Mapping[str, Any], line: int) -> Question:
        _, mark, answer = row["answer"].rpartition("####")
        if not mark or re.fullmatch(NUMBER, answer.strip()) is None:
            raise ValueError('answer must end with "#### " and a number')
        return Question(id=f"line {line}", row=row)

    def chat(self, question: Question) -> str:
        return (
            f"{question.row['question'].strip()}\n\n"
            "Think step by step and end with 'The answer is N.', where N is a number."
        )

    def text(self, question: Question) -> str:
        return f"Question: {question.row['question'].strip()}\nAnswer: Let's think step by step."

    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        return [_verdict(x.row["answer"], y) for x, y in zip(questions, answers, strict=True)]


def _verdict(wanted: str, answer: str) -> Verdict:
    found = number_of(answer)
    if found is None:
        return Verdict(False, "no number")
    right = found == number_of(wanted.rpartition("####")[2])
    return Verdict(right, "right" if right else "wrong", str(found))
