"""The questions of benchmarks/asked_after.py, for models that chat and others."""

import sys
from pathlib import Path

from kvfold.loading import load_tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import asked_after

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}[assistant]"


def test_questions_continue_their_context() -> None:
    rows = list(asked_after.questions(load_tokenizer("reference:gqa"), 512, 2, 3))
    assert [row.context for row in rows] == [rows[0].context] * 3 + [rows[3].context] * 3
    assert rows[0].context != rows[3].context
    for row in rows:
        key = row.question.partition("number for ")[2].partition(" mentioned")[0]
        assert f"numbers for {key} is:{row.answer}." in row.context


def test_a_chat_ends_the_users_turn_before_the_answer_begins() -> None:
    tokenizer = load_tokenizer("reference:gqa")
    (plain,) = asked_after.questions(tokenizer, 512, 1, 1)
    tokenizer.chat_template = CHAT
    (row,) = asked_after.questions(tokenizer, 512, 1, 1)
    asked, mark, begun = plain.question.partition(asked_after.MARK)
    said = [{"role": "user", "content": plain.context + asked.rstrip()}]
    turn = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert row.context + row.question == turn + mark + begun
    assert row.context == "[user]" + plain.context
