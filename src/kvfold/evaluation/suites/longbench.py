"""LongBench (Bai et al. 2024): questions about long texts, summaries, classes, counts and code."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvfold.evaluation.suites import longbench_metrics as metrics
from kvfold.evaluation.suites.base import LineSuite, Message, Question, Verdict
from kvfold.utils.progress import Report


@dataclass(frozen=True)
class DataSet:
    """One data set, as published.

    context, question: the two parts of the prompt, with the fields {context} and {input}.
    metric: of an answer. max_new_tokens: longest answer. chat: use a chat template. first_line:
    only the first line of an answer counts.
    """

    context: str
    question: str
    metric: Callable[[str, str, metrics.Classes], float]
    max_new_tokens: int
    chat: bool = True
    first_line: bool = False


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
)
_SHORT = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide '
    "any explanation."
)
_ANSWER = "Question: {input}\nAnswer:"
_HOPS = DataSet(_PASSAGES, _ANSWER, metrics.word_f1, 32)
# The prompts (with "asconcisely"), lengths and metrics of the released `dataset2prompt.json`,
# `dataset2maxlen.json` and `eval.py`.
DATA_SETS = {
    "narrativeqa": DataSet(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question asconcisely as you can, using a single phrase if possible. Do not "
        "provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the "
        "story asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\n",
        "Question: {input}\n\nAnswer:",
        metrics.word_f1,
        128,
    ),
    "qasper": DataSet(
        "You are given a scientific article and a question. Answer the question "
        f"{_SHORT}\n\nArticle: {{context}}\n\n Answer the question based on the above article "
        f"{_SHORT}\n\n",
        "Question: {input}\n\nAnswer:",
        metrics.word_f1,
        128,
    ),
    "multifieldqa_en": DataSet(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\n",
        _ANSWER,
        metrics.word_f1,
        64,
    ),
    "hotpotqa": _HOPS,
    "2wikimqa": _HOPS,
    "musique": _HOPS,
    "gov_report": DataSet(
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\n",
        "Now, write a one-page summary of the report.\n\nSummary:",
        metrics.rouge_l,
        512,
    ),
    "qmsum": DataSet(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n",
        "Query: {input}\nAnswer:",
        metrics.rouge_l,
        512,
    ),
    "multi_news": DataSet(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\n",
        "Now, write a one-page summary of all the news.\n\nSummary:",
        metrics.rouge_l,
        512,
    ),
    "trec": DataSet(
        "Please determine the type of the question below. Here are some examples of questions."
        "\n\n{context}\n",
        "{input}",
        metrics.class_named,
        64,
        chat=False,
        first_line=True,
    ),
    "triviaqa": DataSet(
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.\n\n{context}\n\n",
        "{input}",
        metrics.word_f1,
        32,
        chat=False,
        first_line=True,
    ),
    "samsum": DataSet(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n",
        "{input}",
        metrics.rouge_l,
        128,
        chat=False,
        first_line=True,
    ),
    "passage_count": DataSet(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are "
        "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\n",
        "Please enter the final count of unique paragraphs after removing duplicates. The output "
        "format should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer "
        "is: ",
        metrics.share_of_numbers,
        32,
    ),
    "passage_retrieval_en": DataSet(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\n",
        "The following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that "
        'the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", '
        "etc.\n\nThe answer is: ",
        metrics.share_of_paragraphs,
        32,
    ),
    "lcc": DataSet(
        "Please complete the code given below. \n{context}",
        "Next line of code:\n",
        metrics.code_similarity,
        64,
        chat=False,
    ),
    "repobench-p": DataSet(
        "Please complete the code given below. \n{context}",
        "{input}Next line of code:\n",
        metrics.code_similarity,
        64,
        chat=False,
    ),
}
_FILES = ", ".join(f"{name}.jsonl" for name in DATA_SETS)
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")


class LongBench(LineSuite):
    """Asks with the published prompt of each data set, and cuts the middle of prompts that are too
    long. The 16 data sets in English and code; those in Chinese are refused. The published metrics,
    between 0 and 1: F1 of words, ROUGE-L, classes, counts, paragraphs, similarity of code."""

    title = "LongBench"
    keys = ("input", "context", "answers", "dataset", "all_classes")
    texts = ("context", "dataset")
    files = ("*.jsonl", "longbench-*.jsonl")  # * is a data set
    max_new_tokens = max(x.max_new_tokens for x in DATA_SETS.values())
    has_context = truncates = True
    example: ClassVar = {
        "input": "What is the capital of Ruritania?",
        "context": "Passage 1:\nStrelsau is the capital of Ruritania.",
        "answers": ["Strelsau", "the city of Strelsau"],
        "dataset": "hotpotqa",
        "all_classes": None,
    }
    right_answer = "Strelsau"

    def find(self, folder: Path) -> Path:
        if not self.files_in(folder):
            raise ValueError(f"{folder} has none of {_FILES}; name the file")
        return folder

    def files_in(self, folder: Path) -> list[Path]:
        names = (file.replace("*", name) for name in DATA_SETS for file in self.files)
        return [folder / name for name in names if (folder / name).is_file()]

    def read(
        self, path: Path | None, where: str, *, rows: int | None = None, **built: Any
    ) -> list[Question]:
        """Read the first `rows` lines of one data set, or of each in a folder."""
        assert path is not None
        if not path.is_dir():
            return super().read(path, where, rows=rows)
        if not (files := self.files_in(path)):
            raise ValueError(f"{where} has none of {_FILES}; name the file")
        questions: list[Question] = []
        for file in files:
            questions += super().read(file, f"{where}/{file.name}", rows=rows)
        return questions

    def question(self, fields: Mapping[str, Any], line: int) -> Question:
        name = fields["dataset"]
        if name in CHINESE:
            raise ValueError(
                f"dataset {name} is in Chinese, and its metric needs a program that finds words; "
                f"legal data sets: {', '.join(DATA_SETS)}"
            )
        if name not in DATA_SETS:
            raise ValueError(f"dataset is {name!r:.60}; it must be one of {', '.join(DATA_SETS)}")
        required = "{input}" in DATA_SETS[name].question
        if not isinstance(fields["input"], str) or (required and not fields["input"].strip()):
            raise ValueError(
                f"input is {fields['input']!r:.60}; it must be a text"
                + required * " that is not blank"
            )
        _check_texts("answers", fields["answers"])
        if DATA_SETS[name].metric is metrics.class_named:
            _check_texts("all_classes", fields["all_classes"])
        return Question(id=f"{name} line {line}", fields=fields, group=name)

    def message(self, question: Question, chat: bool) -> Message:
        fields, data_set = question.fields, DATA_SETS[question.group]
        return Message(
            context=data_set.context.replace("{context}", fields["context"]),
            question=data_set.question.replace("{input}", fields["input"]),
            chat=data_set.chat,
            max_new_tokens=data_set.max_new_tokens,
        )

    def judge(
        self, questions: Sequence[Question], answers: Sequence[str], report: Report | None = None
    ) -> list[Verdict]:
        verdicts = []
        for question, answer in zip(questions, answers, strict=True):
            verdicts.append(_verdict(question, answer))
            if report is not None:
                report(len(verdicts), len(questions))
        return verdicts


def _check_texts(key: str, value: Any) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise ValueError(f"{key} is {value!r:.60}; it must be a list of texts")


def _verdict(question: Question, answer: str) -> Verdict:
    """The best score over the expected answers."""
    fields, data_set = question.fields, DATA_SETS[question.group]
    if data_set.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    classes = fields["all_classes"] or ()
    return Verdict.graded(max(data_set.metric(answer, x, classes) for x in fields["answers"]))
