"""Loss against size: which points are the best, where the knee is, and what makes them."""

import json
from dataclasses import replace

import pytest

from cli_cases import plain, printed, text  # noqa: F401
from kvfold.cli.frontier import command
from kvfold.cli.main import main
from kvfold.evaluation.compare import Row
from kvfold.evaluation.frontier import fastest, frontier, knee, loss

ORIGINAL = Row(
    recipe="original",
    keep=1.0,
    kept_fraction=1.0,
    bytes_per_token=128,
    baseline_bytes_per_token=128,
    cache_bytes_allocated=1,
    perplexity={},
    delta_nll={},
)


def row(recipe: str, kept: float, *lost: float) -> Row:
    deltas = {str(i): (x, 0.01) for i, x in enumerate(lost)}
    return replace(ORIGINAL, recipe=recipe, keep=kept, kept_fraction=kept, delta_nll=deltas)


def test_loss_is_the_mean_over_texts_and_a_gain_is_none() -> None:
    assert loss(row("a", 0.5, 0.1, 0.3)) == pytest.approx(0.2)
    assert loss(row("a", 0.5, -0.1)) == loss(ORIGINAL) == 0


def test_the_best_lose_less_than_every_smaller_one() -> None:
    small, lean, worse = row("small", 0.2, 0.05), row("lean", 0.5, 0.01), row("zack", 0.5, 0.4)
    as_good = row("int8", 0.6, 0.01)
    assert frontier([ORIGINAL, worse, lean, as_good, small]) == [small, lean, ORIGINAL]
    free = row("free", 0.4, -0.2)
    assert frontier([ORIGINAL, free, lean, small]) == [small, free]  # nothing larger is better


def test_the_fastest_lose_less_than_every_faster_one() -> None:
    slow, fast, worse = (
        replace(row(name, kept, lost), step_ms=ms)
        for name, kept, lost, ms in (
            ("slow", 0.1, 0.01, 3.0),
            ("fast", 0.3, 0.02, 1.0),
            ("worse", 0.2, 0.03, 2.0),
        )
    )
    untimed = row("untimed", 0.05, 0.0)
    assert fastest([slow, worse, untimed, fast]) == [fast, slow]


def test_the_knee_is_where_size_and_loss_cost_least_together() -> None:
    points = [row("a", 0.1, 0.05), row("b", 0.2, 0.01), row("c", 0.5, 0.001), ORIGINAL]
    assert knee(points).recipe == "b"
    assert knee([*points, row("d", 0.05, 5.0)]).recipe == "b"  # however far the rows go


@pytest.mark.parametrize(
    ("recipe", "keep", "made"),
    [
        ("original", 1.0, "kvfold generate 'my model'"),
        ("int4", 0.25, "kvfold generate 'my model' --bits 4"),
        (
            "small",
            1 / 6,
            "kvfold compress --fold 'my model' --recipe small --factor 6 --set levels=8,4 --seed 1 "
            "--output small-6x",
        ),
        (
            "swift for speed",
            1 / 4,
            "kvfold compress --fold 'my model' --recipe swift --factor 4 --set prefer=speed"
            " --seed 1 --output swift-speed-4x",
        ),
        (
            "zack",
            1 / 3,
            "kvfold compress --fold 'my model' --recipe zack --set keep=0.333333 --set align=1"
            " --seed 1 --output zack-3x",
        ),
    ],
)
def test_a_command_makes_its_point(recipe: str, keep: float, made: str) -> None:
    assert command("my model", row(recipe, keep), ["--seed 1"], "8,4") == made


def test_the_command_measures_and_says_what_makes_the_best(plain, text, tmp_path, capsys):
    target, html = tmp_path / "rows.json", tmp_path / "rows.html"
    options = ["--recipes", "zack,lean", "--factors", "2,4", "--bits", "4", "--text", text]
    options += ["--calib-tokens", 1024, "--levels", "8,4", "--json", target, "--html", html]
    out = printed(capsys, "frontier", plain, *options)
    found = json.loads(target.read_text())
    names = [(x["recipe"], x["keep"]) for x in found["rows"]]
    sizes = [(recipe, keep) for recipe in ("zack", "lean") for keep in (0.5, 0.25)]
    assert names == [("original", 1.0), ("int4", 0.25), *sizes]
    planned = [x for x in found["rows"] if x["recipe"] == "lean"]
    assert all(0 < x["kept_fraction"] <= x["keep"] for x in planned)
    best = found["frontier"]
    assert sum(x["knee"] for x in best) == 1 and all(x["step_ms"] > 0 for x in best)
    assert all(x["best_of_size"] or x["best_of_speed"] for x in best)
    assert found["settings"]["step"] == {"batch": 64, "context": 128}
    assert "Loss against the time of a step" in html.read_text()
    assert "knee: kvfold" in out and "The best of every size" in html.read_text()
    made = next((x["command"] for x in best if x["recipe"] == "lean"), None)
    if made is not None:
        output = tmp_path / "made"
        words = made.removeprefix("kvfold ").split()
        assert main([*words[:-1], str(output)]) == 0
        assert (output / "config.json").exists()
