"""RULER's rows, for models that chat and others."""

import json
from dataclasses import asdict

import pytest

from kvfold.evaluation import ruler
from kvfold.evaluation.ruler.tasks import CHAIN_INTRO
from kvfold.evaluation.tasks import read_tasks
from kvfold.evaluation.tasks.base import TaskAnswer
from kvfold.hub.loading import load_tokenizer
from kvfold.utils.tokens import encode

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}[assistant]"


def test_questions_continue_their_context() -> None:
    rows = ruler.examples("keys", load_tokenizer("reference:gqa"), length=512, contexts=2, facts=3)
    assert [row.context for row in rows] == [rows[0].context] * 3 + [rows[3].context] * 3
    assert rows[0].context != rows[3].context
    for row in rows:
        key = row.question.partition("number for ")[2].partition(" mentioned")[0]
        assert f"numbers for {key} is:{row.answer}." in row.context


def test_a_chat_ends_the_users_turn_before_the_answer_begins() -> None:
    tokenizer = load_tokenizer("reference:gqa")
    (plain,) = ruler.examples("keys", tokenizer, length=512, contexts=1, facts=1)
    tokenizer.chat_template = CHAT
    (row,) = ruler.examples("keys", tokenizer, length=512, contexts=1, facts=1)
    asked, mark, begun = plain.question.partition(ruler.KINDS["keys"][1])
    said = [{"role": "user", "content": plain.context + asked.rstrip()}]
    turn = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert row.context + row.question == turn + mark + begun
    assert row.context == "[user]" + plain.context


@pytest.mark.parametrize("kind", ["values", "variables"])
def test_several_answers_are_all_in_the_context_and_fit(kind) -> None:
    tokenizer = load_tokenizer("reference:gqa")
    row, other = ruler.examples(kind, tokenizer, length=512, contexts=2, facts=5)
    assert row.context != other.context and len(set(row.answer)) == 5
    places = [row.context.index(answer.strip()) for answer in row.answer]
    assert kind == "values" or places == sorted(places), "a chain is told from its beginning"
    texts = (row.context, row.question, *row.answer)
    assert 480 < sum(len(encode(tokenizer, text)) for text in texts) <= 512
    assert row.max_new_tokens == sum(len(encode(tokenizer, x)) + 1 for x in row.answer)


def test_a_chain_is_told_as_rulers() -> None:
    (row,) = ruler.examples("variables", load_tokenizer("reference:gqa"), length=512, contexts=1)
    names = [answer.strip() for answer in row.answer]
    value = row.question.partition("the value ")[2].split()[0]
    assert row.context.startswith(CHAIN_INTRO)
    for name, told in zip(names, [value, *(f"VAR {x}" for x in names)], strict=False):
        assert f"VAR {name} = {told}" in row.context


def test_rows_with_several_answers_are_read_from_files_and_count_in_parts(tmp_path) -> None:
    tokenizer, path = load_tokenizer("reference:gqa"), tmp_path / "rows.jsonl"
    (row,) = ruler.examples("values", tokenizer, length=512, contexts=1, facts=4)
    path.write_text(json.dumps(asdict(row)))
    assert read_tasks(path) == [row]
    for text, exact, contains in [
        (", ".join(row.answer), 1, 1),
        (", ".join(row.answer[::-1]), 0, 1),
        (row.answer[2], 0, 0.25),
    ]:
        answer = TaskAnswer(log_likelihoods=(), tokens=encode(tokenizer, text))
        found = row.score(tokenizer, [answer])
        assert found == {"exact_match": exact, "contains": contains}, text


def test_a_kind_that_is_none() -> None:
    with pytest.raises(ValueError, match="kind must be one of keys, values, variables; got 'x'"):
        ruler.examples("x", load_tokenizer("reference:gqa"), length=512, contexts=1)
