"""The picture of benchmarks/asked_after.py."""

from dataclasses import asdict

import pytest

import asked_after
from kvfold.evaluation.perplexity import PerplexityResult


def row(evict: str | None, keep: float | None, right: int, nll: float, repair=False) -> dict:
    windows = (nll - 0.1, nll + 0.1)
    text = PerplexityResult(
        nll=nll,
        nll_se=0.1,
        perplexity=1,
        perplexity_se=0,
        tokens=256,
        window_nll=windows,
        cache_bytes_allocated=1,
        cached_tokens=1,
    )
    return {
        "name": asked_after.Case(evict=evict, keep=keep, repair=repair).name,
        "evict": evict,
        "keep": keep,
        "repair": repair,
        "tokens": 512,
        "cache_bytes": 2**20 * (keep or 1),
        "answers": {"keys": {"right": right, "asked": 100}},
        "texts": {"wiki": asdict(text)},
    }


ROWS = (
    [row(None, None, 90, 3.0)]
    + [
        row(evict, keep, round(90 * keep**power), 3.0 + power * 0.01 / keep)
        for evict, power in (("kvzip", 0.1), ("h2o", 1.0))
        for keep in (0.5, 0.25, 0.125)
    ]
    + [row("kvzip", 0.5, 85, 3.01, repair=True)]
)


def test_losses_are_paired_with_the_originals() -> None:
    mean, error = asked_after.losses(ROWS[-2], ROWS[0])["wiki"]
    assert mean == pytest.approx(0.08) and error == pytest.approx(0)


def test_every_policy_is_in_the_picture(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "asked.svg"
    asked_after.draw({x["name"]: x for x in ROWS}, path)
    drawn = path.read_text()
    for words in ("all rows", "kvzip", "kvzip, repaired", "h2o", "KiB of pages after 512 tokens"):
        assert f"<!-- {words} -->" in drawn
