"""HumanEval (Chen et al. 2021): Python functions to write from their docstrings, judged by running
their tests."""

import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from kvfold.evaluation.suites.base import LineSuite, Message, Question, Verdict
from kvfold.evaluation.suites.sandbox import check_runs, run_programs
from kvfold.utils.progress import Report

FENCED = re.compile(r"(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^(?:import |from |def |async def |class |@)", re.MULTILINE)


class HumanEval(LineSuite):
    """Asks for the whole function in a Python code block; without a chat template the model
    continues the function's beginning, up to the next top-level line. Right if the function passes
    the tests of its question."""

    title = "HumanEval"
    keys = ("task_id", "prompt", "entry_point", "test")
    files = ("HumanEval.jsonl.gz", "HumanEval.jsonl")
    max_new_tokens = 512
    stop = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```")  # Chen et al., and a fence
    example: ClassVar = {
        "task_id": "HumanEval/0",
        "prompt": 'def twice(x: int) -> int:\n    """Return 2 x."""\n',
        "entry_point": "twice",
        "test": "def check(candidate):\n    assert candidate(3) == 6\n",
    }
    right_answer = "```python\ndef twice(x: int) -> int:\n    return 2 * x\n```"

    def question(self, fields: Mapping[str, Any], line: int) -> Question:
        name = fields["entry_point"]
        if not name.isidentifier() or definition(name).search(fields["prompt"]) is None:
            raise ValueError("prompt must define the function that entry_point names")
        if "def check(" not in fields["test"]:
            raise ValueError("test must define the function check")
        return Question(id=fields["task_id"], fields=fields)

    def message(self, question: Question, chat: bool) -> Message:
        prompt = question.fields["prompt"]
        if not chat:
            return Message(question=prompt)
        return Message(
            question="Complete this Python function. Answer with the whole function in one Python "
            f"code block.\n\n```python\n{prompt.strip()}\n```"
        )

    def check_ready(self) -> None:
        check_runs()

    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        programs = [program(x.fields, y) for x, y in zip(questions, answers, strict=True)]
        return [
            Verdict(float(x.kind == "passed"), x.kind, x.detail)
            for x in run_programs(programs, report=report)
        ]


def definition(name: str) -> re.Pattern[str]:
    """A pattern for the line where a function begins."""
    return re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", re.MULTILINE)


def program(fields: Mapping[str, Any], answer: str) -> str:
    """Build a program from the function in an answer, the imports of the prompt and the tests."""
    prompt, name = fields["prompt"], fields["entry_point"]
    code = code_of(answer, name)
    begin = definition(name).search(prompt)
    assert begin is not None
    if definition(name).search(code):  # a whole function, after the prompt's imports
        solution = f"{prompt[: begin.start()]}\n{code}"
    else:
        solution = _first_valid(prompt + body for body in _bodies(code))
    return f"{solution}\n\n{fields['test']}\n\ncheck({name})\n"


def code_of(answer: str, name: str) -> str:
    """Return the code of an answer: its first code block that defines the function, else its first
    code block, else all of it without the prose around the function."""
    blocks = [textwrap.dedent(block) for _, block in FENCED.findall(answer)]
    for block in blocks:
        if definition(name).search(block):
            return block
    if blocks:
        return blocks[0]
    if definition(name).search(answer) is None:
        return answer
    begin = CODE.search(answer)
    lines = (answer if begin is None else answer[begin.start() :]).split("\n")
    return _first_valid("\n".join(lines[:end]) for end in range(len(lines), 0, -1))


def _bodies(code: str) -> Iterator[str]:
    """Yield readings of a function's body: indented already, indented but for its first line, or
    not indented."""
    code = code.strip("\n")
    yield f"{code}\n"
    yield f"    {code.lstrip()}\n"
    yield textwrap.indent(textwrap.dedent(code), "    ") + "\n"


def _first_valid(candidates: Iterator[str]) -> str:
    """Return the first candidate that compiles; the first of all if none does."""
    first = None
    for candidate in candidates:
        if is_program(candidate):
            return candidate
        first = candidate if first is None else first
    assert first is not None
    return first


def is_program(text: str) -> bool:
    """Whether Python can compile a text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(text, "answer.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
