"""The metrics of LongBench, on values worked out by hand."""

import pytest

from kvfold.evaluation.suites import longbench_metrics as metrics

CLASSES = ("city", "other city", "number")


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "score"),
    [
        ("word_f1", "The cat sat on a mat.", "a cat sat", 4 / 6),
        ("word_f1", "CAT, cat", "cat", 2 / 3),  # a word counts as often as both have it
        ("word_f1", "Theatre", "a theatre", 1),
        ("word_f1", "the", "an", 0),
        ("rouge_l", "the cat sat", "the cat ran", 2 / 3),
        ("rouge_l", "b a", "a b", 1 / 2),
        ("rouge_l", "a a b", "a b", 1),  # of different words
        ("rouge_l", "x y. z", "z.x\n y", 1),  # in any order of sentences
        ("rouge_l", "", "a", 0),
        ("rouge_l", "...", "a", 0),
        ("class_named", "other city", "other city", 1),  # "city" is part of it
        ("class_named", "a number or a city", "city", 1 / 2),
        ("class_named", "a number", "city", 0),
        ("share_of_numbers", "There are 3 of 12, so 3.", "3", 2 / 3),
        ("share_of_numbers", "13", "3", 0),
        ("share_of_numbers", "three", "3", 0),
        ("share_of_paragraphs", "Paragraph 5", "Paragraph 5", 1),
        ("share_of_paragraphs", "5, not 6", "Paragraph 6", 1 / 2),
        ("code_similarity", "\n# a comment\n```\nx = 1\ny = 2", "x = 1", 1),
        ("code_similarity", "abcd", "abce", 0.75),
        ("code_similarity", "# none", "x", 0),
    ],
)
def test_scores(metric: str, answer: str, expected: str, score: float) -> None:
    found = getattr(metrics, metric)(answer, expected, CLASSES)
    assert found == pytest.approx(score, abs=1e-7)


def test_a_common_subsequence_keeps_the_order() -> None:
    assert metrics.common_subsequence("abcbdab", "bdcaba") in ([*"bcba"], [*"bdab"], [*"bcab"])
    assert metrics.common_subsequence("ab", "ba") == ["b"]
