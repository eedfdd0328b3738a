"""LongEval (Li et al. 2023): numbers to retrieve from a long record of lines."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvfold.evaluation.suites.base import LineSuite, Message, Question, Verdict
from kvfold.utils.progress import Report

QUESTION = "Now the record is over."  # the rest of the prompt follows the lines


class LongEval(LineSuite):
    """Asks for the number of one line of a long record, in the words of the file. Right if the last
    number of the answer is that of the line."""

    title = "LongEval lines"
    keys = ("prompt", "expected_number")
    texts = ("prompt",)
    files = ("longeval-*-lines.jsonl", "*_lines.jsonl")
    max_new_tokens = 100
    has_context = True
    example: ClassVar = {
        "prompt": "Below is a record of lines I want you to remember. Now the record start:\n\n"
        "line quiet-river: REGISTER_CONTENT is <48213>\nline old-lamp: REGISTER_CONTENT is <721>\n"
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line quiet-river? I "
        "need the number. ",
        "expected_number": 48213,
    }
    right_answer = "The <REGISTER_CONTENT> in line quiet-river is <48213>."

    def question(self, fields: Mapping[str, Any], line: int) -> Question:
        if type(fields["expected_number"]) is not int:
            raise ValueError(
                f"expected_number is {fields['expected_number']!r:.60}; it must be a whole number"
            )
        if not fields["prompt"].partition(QUESTION)[1]:
            raise ValueError(f'prompt must have "{QUESTION}" between the lines and the question')
        return Question(id=f"line {line}", fields=fields)

    def message(self, question: Question, chat: bool) -> Message:
        context, words, rest = question.fields["prompt"].rpartition(QUESTION)
        return Message(context=context, question=words + rest)

    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        pairs = zip(questions, answers, strict=True)
        return [_verdict(question.fields["expected_number"], answer) for question, answer in pairs]


def _verdict(expected: int, answer: str) -> Verdict:
    numbers = re.findall(r"\d+", answer)
    if not numbers:
        return Verdict(0.0, "no number")
    right = int(numbers[-1][:20]) == expected
    return Verdict(float(right), "right" if right else "wrong", numbers[-1])
