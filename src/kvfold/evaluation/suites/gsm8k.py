"""GSM8K (Cobbe et al. 2021): grade-school mathematics with numbers as answers."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, ClassVar

from kvfold.evaluation.suites.base import LineSuite, Message, Question, Verdict
from kvfold.utils.progress import Report

NUMBER = r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w)])-)?(?<!\d)\.\d+"
# "The answer is \(N\)" or "#### N", where N is not a term of a calculation.
ANSWER = rf"(?:answer is|####)[^\w\n]*?({NUMBER})(?![\d.,]*\d)(?!\s*(?:[-+/=×÷]|\*(?!\*)))"


def number_of(text: str) -> Decimal | None:
    """Return the number after the last "answer is" or "####" of an answer, or else its last
    number."""
    numbers = re.findall(ANSWER, text, re.IGNORECASE) or re.findall(NUMBER, text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


class GSM8K(LineSuite):
    """Asks to think step by step and end with "The answer is N."; without a chat template the model
    continues "Question: ... Answer: Let's think step by step.". Right if the number after "answer
    is" or "####", or else the last number, is equal."""

    title = "GSM8K"
    keys = ("question", "answer")
    files = ("gsm8k-test.jsonl", "gsm8k.jsonl", "test.jsonl")
    max_new_tokens = 400
    stop = ("\nQuestion:",)
    example: ClassVar = {
        "question": "A farmer has 3 hens, and each lays 2 eggs. How many eggs are there?",
        "answer": "3 * 2 = 6\n#### 6",
    }
    right_answer = "3 hens lay 3 * 2 = 6 eggs. The answer is 6."

    def question(self, fields: Mapping[str, Any], line: int) -> Question:
        _, mark, answer = fields["answer"].rpartition("####")
        if not mark or re.fullmatch(NUMBER, answer.strip()) is None:
            raise ValueError('answer must end with "#### " and a number')
        return Question(id=f"line {line}", fields=fields)

    def message(self, question: Question, chat: bool) -> Message:
        text = question.fields["question"].strip()
        how = "Think step by step and end with 'The answer is N.', where N is a number."
        if chat:
            return Message(question=f"{text}\n\n{how}")
        return Message(question=f"Question: {text}\nAnswer: Let's think step by step.")

    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        return [_verdict(x.fields["answer"], y) for x, y in zip(questions, answers, strict=True)]


def _verdict(expected: str, answer: str) -> Verdict:
    number = number_of(answer)
    if number is None:
        return Verdict(0.0, "no number")
    right = number == number_of(expected.rpartition("####")[2])
    return Verdict(float(right), "right" if right else "wrong", str(number))
