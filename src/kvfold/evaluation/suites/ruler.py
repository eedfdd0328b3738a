"""RULER (Hsieh et al. 2024): thirteen tasks of any length."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfold.evaluation.haystack import split_sentences
from kvfold.evaluation.ruler.tasks import (
    TASKS,
    DocumentQuestion,
    Example,
    Sources,
    check_length,
    examples,
    score,
)
from kvfold.evaluation.suites.base import Message, Question, Suite, Verdict
from kvfold.evaluation.suites.prompts import Encoder
from kvfold.utils.progress import Report
from kvfold.utils.text import read_text

LENGTH, ROWS = 4096, 500  # defaults, as published
TRIED = 20  # examples of a task, to find what length it needs
ESSAYS = "PaulGrahamEssays.json"
DOCUMENTS = {"qa_1": "squad.json", "qa_2": "hotpotqa.json"}


class RULER(Suite):
    """Builds 500 questions of each of the thirteen tasks, with the published prompts, and asks for
    the continuation of the answer that they begin. The score is the share of the expected texts
    that the answer contains; in `qa_1` and `qa_2` one of them is enough. It needs no files, but
    these two tasks are left out without theirs, and kvfold's prose takes the place of the
    essays."""

    title = "RULER"
    files = (ESSAYS, *DOCUMENTS.values())
    needs_files = False
    max_new_tokens = max(task.max_new_tokens for task in TASKS.values())
    has_context = True
    default_length = LENGTH

    def find(self, folder: Path) -> Path:
        return folder

    def notes(self, path: Path | None) -> tuple[str, ...]:
        if path is not None and not path.is_dir():  # `read` refuses it
            return ()
        missing = [x for x in self.files if path is None or not (path / x).is_file()]
        essays = (f"the prose of kvfold is the haystack ({ESSAYS} is not given)",)
        left_out = tuple(
            f"without {task} ({file} is not given)"
            for task, file in DOCUMENTS.items()
            if file in missing
        )
        return (essays if ESSAYS in missing else ()) + left_out

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
        """Build the first `rows` examples of each task. path: a folder with some of `files`."""
        if path is not None and not path.is_dir():
            raise ValueError(f"{where} is no folder; give the folder of {', '.join(self.files)}")
        if tokenizer is None:
            raise ValueError(f"{where}: questions of a length need the model's tokenizer")
        sources, length, encoder = read_sources(path, where), length or LENGTH, Encoder(tokenizer)

        def count(example: Example) -> int:
            return encoder.count(_message(example, encoder.chat))

        numbers = {
            name: min(rows or ROWS, len(sources.questions.get(name, ())) or ROWS)
            for name in TASKS
            if name not in DOCUMENTS or name in sources.questions
        }
        questions: list[Question] = []
        tried = min(TRIED, *numbers.values())
        try:
            check_length([*numbers], sources, length=length, rows=tried, count=count)
            for name, most in numbers.items():
                built = examples(name, sources, length=length, rows=most, count=count)
                for i, example in enumerate(built):
                    id, fields = f"{name} {length} {i}", {"example": example}
                    questions.append(Question(id=id, fields=fields, group=name))
                    if report is not None:
                        report(len(questions), sum(numbers.values()))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return questions

    def message(self, question: Question, chat: bool) -> Message:
        limit = TASKS[question.group].max_new_tokens
        return _message(question.fields["example"], chat, max_new_tokens=limit)

    def solution(self, question: Question) -> str:
        return ", ".join(question.fields["example"].answers)

    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        return [
            Verdict.graded(score(x.group, x.fields["example"].answers, answer))
            for x, answer in zip(questions, answers, strict=True)
        ]


def _message(example: Example, chat: bool, max_new_tokens: int | None = None) -> Message:
    """In a chat, the answer begins without the space that follows the question elsewhere."""
    return Message(
        context=example.context,
        question=example.question,
        reply=example.reply.lstrip() if chat else example.reply,
        max_new_tokens=max_new_tokens,
    )


def read_sources(folder: Path | None, where: str) -> Sources:
    """Read those of a suite's files that a folder has. Raises ValueError for other contents than
    the published ones."""
    contents: dict[str, Any] = {}
    for file, parse in _PARSERS.items():
        if folder is None or not (path := folder / file).is_file():
            continue
        try:
            contents[file] = parse(json.loads(read_text(path)))
        except json.JSONDecodeError:
            raise ValueError(f"{where}/{file}: not JSON; give the published file") from None
        except (KeyError, TypeError, IndexError, AttributeError):
            raise ValueError(
                f"{where}/{file}: not the JSON of {_PUBLISHED[file]}; give the published file"
            ) from None
    tasks = {task: contents[file] for task, file in DOCUMENTS.items() if file in contents}
    return Sources(
        **({"essays": contents[ESSAYS]} if ESSAYS in contents else {}),
        documents={task: texts for task, (texts, _) in tasks.items()},
        questions={task: queries for task, (_, queries) in tasks.items()},
    )


def _essays(content: Any) -> list[str]:
    return split_sentences(" ".join(content["text"].split()))


Documents = tuple[list[str], list[DocumentQuestion]]


def _squad(content: Any) -> Documents:
    """The paragraphs of SQuAD, and its questions that have answers. Related are the paragraphs of
    the same article."""
    articles = [article["paragraphs"] for article in content["data"]]
    texts = sorted({x["context"] for paragraphs in articles for x in paragraphs})
    index = {text: i for i, text in enumerate(texts)}
    queries = []
    for paragraphs in articles:
        article = dict.fromkeys(index[x["context"]] for x in paragraphs)
        for paragraph in paragraphs:
            needed = index[paragraph["context"]]
            queries += [
                DocumentQuestion(
                    question=x["question"],
                    answers=tuple(answer["text"] for answer in x["answers"]),
                    needed=(needed,),
                    related=tuple(i for i in article if i != needed),
                )
                for x in paragraph["qas"]
                if x["answers"]
            ]
    return texts, queries


def _hotpotqa(content: Any) -> Documents:
    """The passages of HotpotQA, and its questions, which need ten of them each."""
    passages = [[f"{title}\n{''.join(x)}" for title, x in row["context"]] for row in content]
    texts = sorted({text for some in passages for text in some})
    index = {text: i for i, text in enumerate(texts)}
    queries = [
        DocumentQuestion(
            question=row["question"],
            answers=(row["answer"],),
            needed=tuple(dict.fromkeys(index[text] for text in some)),
        )
        for row, some in zip(content, passages, strict=True)
    ]
    return texts, queries


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    ESSAYS: _essays,
    DOCUMENTS["qa_1"]: _squad,
    DOCUMENTS["qa_2"]: _hotpotqa,
}
_PUBLISHED = {
    ESSAYS: 'RULER, {"text": ...}',
    DOCUMENTS["qa_1"]: "SQuAD 2.0",
    DOCUMENTS["qa_2"]: "HotpotQA's distractor setting",
}
