"""RULER's thirteen tasks: prompts as published, answers in the text, any length."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from kvfold.evaluation.ruler import tasks
from kvfold.evaluation.ruler.tasks import TASKS, DocumentQuestion, Example, Sources, examples, score
from kvfold.evaluation.suites import SUITES, read_suite
from kvfold.evaluation.suites.ruler import read_sources
from kvfold.hub.loading import load_tokenizer
from kvfold.utils.tokens import encode

LENGTH = 1200
DOCUMENTS = [f"Town {i} has a river that is called {i}{i}." for i in range(40)]
QUESTION = DocumentQuestion(question="Which river?", answers=("77", "the 77"), needed=(7,))
MORE = DocumentQuestion(question="Which?", answers=("3",), needed=tuple(range(10)), related=(12,))
SOURCES = Sources(
    documents={"qa_1": DOCUMENTS, "qa_2": DOCUMENTS},
    questions={"qa_1": [QUESTION], "qa_2": [MORE]},
)
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {article}{i}.",
                    "qas": [
                        {"question": f"Q{i}?", "answers": [{"text": "A"}], "is_impossible": False},
                        {"question": "None?", "answers": [], "is_impossible": True},
                    ],
                }
                for i in range(2)
            ]
        }
        for article in "ab"
    ]
}
HOTPOTQA = [{"question": "Q?", "answer": "A", "context": [["T", ["One.", " Two."]], ["U", ["3"]]]}]


@cache
def count_of() -> tasks.Count:
    tokenizer = load_tokenizer("reference:gqa")
    return lambda example: len(encode(tokenizer, example.text))


def built(name: str, rows: int = 2, length: int = LENGTH) -> list[Example]:
    return list(examples(name, SOURCES, length=length, rows=rows, count=count_of()))


@pytest.mark.parametrize("name", TASKS)
def test_an_example_fits_and_has_its_answers(name: str) -> None:
    first, second = found = built(name)
    assert found == built(name) and first.context != second.context
    for example in found:
        assert not name.startswith("qa") or example.answers == SOURCES.questions[name][0].answers
        tokens = count_of()(example) + TASKS[name].max_new_tokens
        assert 0.85 * LENGTH < tokens <= LENGTH, tokens
        assert score(name, example.answers, ", ".join(example.answers)) == 1
        assert score(name, example.answers, "") == 0
        assert all(x in example.context for x in example.answers[:1])
        assert len(set(example.answers)) == len(example.answers)


def test_words_are_as_published() -> None:
    (example,) = built("niah_single_1", 1)
    (value,), key = example.answers, example.question.split(" mentioned")[0].split()[-1]
    lines = example.context.splitlines()
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        "will quiz you about the number afterwards."
    )
    assert f"One of the special magic numbers for {key} is: {value}." in lines
    assert Counter(lines[1:]).most_common(1)[0][0] == tasks.NOISE and len(value) == 7
    assert example.question + example.reply == (
        f"What is the special magic number for {key} mentioned in the provided text? The special "
        f"magic number for {key} mentioned in the provided text is"
    )
    (several,) = built("niah_multiquery", 1)
    assert re.fullmatch(
        r"What are all the special magic numbers for \S+, \S+, \S+, and \S+ mentioned in the "
        r"provided text\?",
        several.question,
    )


def test_needles_are_among_others() -> None:
    (example,) = built("niah_multikey_3", 1)
    facts = re.findall(r"magic uuids for (\S+) is: (\S+)\.", example.context)
    assert len(dict(facts)) == len(facts) == len(example.context.splitlines()) - 1 > 5
    key = example.question.split("uuid for ")[1].split()[0]
    assert example.answers == (dict(facts)[key],)


def test_a_chain_follows_a_solved_one() -> None:
    (example,) = built("vt", 1)
    solved, _, own = example.context.rpartition(tasks.CHAIN_INTRO)
    assert re.search(r"they are:  (?:[A-Z]{3} ){4}[A-Z]{3}\n\n$", solved)
    value = re.search(r"\d+", example.question)[0]
    told = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", own)
    assert told == list(zip(example.answers, (value, *example.answers[:4]), strict=True))


def test_words_are_counted() -> None:
    (listed,) = built("cwe", 1)
    own = listed.context.rpartition(tasks.LIST_INTRO)[2]
    counts = Counter(re.findall(r"\d+\. (\S+)", own))
    assert {x for x, n in counts.items() if n == 6} == set(listed.answers)
    assert {n for x, n in counts.items() if x not in listed.answers} == {1}
    (coded,) = built("fwe", 1)
    counts = Counter(coded.context.removeprefix(tasks.CODED_INTRO).split())
    assert [x for x, _ in counts.most_common(4)] == ["...", *coded.answers]


def test_documents_that_are_needed_are_there() -> None:
    (one,), (ten,) = built("qa_1", 1), built("qa_2", 1)
    assert f":\n{DOCUMENTS[7]}" in one.context
    assert all(f":\n{DOCUMENTS[i]}\n" in ten.context for i in (*range(10), 12))
    assert one.question.endswith("any other words.\n\nQuestion: Which river?")
    (longest,) = built("qa_1", 1, 10_000)  # which no documents fill
    assert longest.context.count("Document ") == len(DOCUMENTS)


def test_scores() -> None:
    assert score("vt", ("AB", "CD"), "cd, ef") == 0.5
    assert score("qa_1", ("AB", "CD"), "cd") == 1


def test_a_length_that_is_too_short() -> None:
    with pytest.raises(ValueError, match=r"vt of RULER needs at least \d+ tokens, and the length"):
        built("vt", 1, 500)


def test_essays_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Sources(essays=["One two.", "Three."])
    (example,) = examples("niah_single_2", few, length=400, rows=1, count=count_of())
    assert example.context.count("One two. Three.") > 20


def test_published_files_are_read(tmp_path: Path) -> None:
    for name, content in {
        "squad.json": SQUAD,
        "hotpotqa.json": HOTPOTQA,
        "PaulGrahamEssays.json": {"text": "It\nis so.\n\nIs  it?"},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = read_sources(tmp_path, "here")
    assert found.essays == ["It is so.", "Is it?"]
    assert found.documents["qa_1"] == [f"Paragraph {x}." for x in ("a0", "a1", "b0", "b1")]
    assert found.questions["qa_1"][1] == DocumentQuestion(
        question="Q1?", answers=("A",), needed=(1,), related=(0,)
    )
    assert len(found.questions["qa_1"]) == 4  # those that have answers
    assert found.documents["qa_2"] == ["T\nOne. Two.", "U\n3"]
    assert found.questions["qa_2"][0].needed == (0, 1)
    assert SUITES["ruler"].notes(tmp_path) == ()
    assert len(SUITES["ruler"].notes(None)) == 3
    for content in ("[", "[]", '{"data": [1]}'):
        (tmp_path / "squad.json").write_text(content)
        with pytest.raises(ValueError, match=r"here/squad.json: not (JSON|the JSON of SQuAD)"):
            read_sources(tmp_path, "here")


def test_what_a_suite_of_any_length_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="suite ruler: questions of a length need the model's"):
        read_suite("ruler")
