"""benchmarks/answer_divergence.py: nothing is lost without compression, and less with more bits."""

from argparse import Namespace
from itertools import pairwise

import torch

import answer_divergence
from kvfold.hub.loading import load


def test_what_answers_lose_grows_with_fewer_bits() -> None:
    model = load("reference:gqa", dtype="float32")
    prompts = [list(range(40, 90)), list(range(100, 170))]
    answers = answer_divergence.answered(model, prompts, 8)
    assert answers.logp.shape[:2] == (8, 2)
    given = Namespace(folder=None, model="reference:gqa")
    names = ["original", "bits-8", "bits-4", "bits-2"]
    found = [answer_divergence.Setting(x, given).measured(model, answers) for x in names]
    lost = [x["all"]["kl"][0] for x in found]
    assert abs(lost[0]) < 1e-5
    assert found[0]["all"]["flips"] == [0.0, 0.0]
    assert all(less < more for less, more in pairwise(lost)), lost
    kept = answer_divergence.Setting("bits-2+96", given).measured(model, answers)
    assert kept["all"]["kl"][0] < 0.01 * lost[-1], "all tokens are still in 16 bits"


def test_positions_are_in_quarters() -> None:
    lost = torch.arange(8.0)[:, None].expand(8, 2)
    found = answer_divergence.summary(lost, torch.zeros(8, 2))
    assert [found[x]["kl"][0] for x in ("1 to 2", "3 to 4", "5 to 6", "7 to 8")] == [
        0.5,
        2.5,
        4.5,
        6.5,
    ]
    assert found["worst"] == 7


def test_a_question_stands_after_solved_ones() -> None:
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(3)]
    turns = answer_divergence.chat(rows[2], rows[:2])
    assert [x["content"] for x in turns] == ["q0", "a0", "q1", "a1", "q2"]
    assert [x["role"] for x in turns][::4] == ["user", "user"]
