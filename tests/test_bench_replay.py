"""The benchmark of a second reading, on the tiny shape."""

import json
from dataclasses import replace

import pytest

from kvfold.bench import replay
from kvfold.cache.eviction.policies import get
from kvfold.cli.main import main


@pytest.mark.parametrize("repair", [False, True])
def test_a_second_reading_beside_the_first(tmp_path, repair):
    target = tmp_path / "replay.json"
    how = ["--tokens", "200", "--policies", "kvzip", "--keep", ".5", "--json", str(target)]
    how += ["--repair"] * repair
    assert main(["bench", "replay", "--shape", "tiny", *how]) == 0
    found = json.loads(target.read_text())
    assert not found["skipped"]
    assert [x["whole"] for x in found["rows"]] == [True, False]
    for row in found["rows"]:
        assert min(row["prefill_ms"], row["score_ms"], row["evict_ms"]) > 0
        assert row["prefill_tflop"] < row["score_tflop"]
        assert (row["repair_tflop"] > 0) == row["repair"] == repair


def test_operations_of_a_reading():
    """A piece that is everything: each query sees all rows, and half of the reading."""
    scorer = replace(get("kvzip").scorer, chunk=6)
    first, again = replay.operations("tiny", 6, scorer)
    pair = 2 * 2 * 4 * 16 * 2  # products with a key and a value, of 4 heads of 16, in 2 layers
    assert again - first == pair * (6 * 6 + 6 * 6 / 2)  # all that are seen, and scores once more
    more = replay.operations("tiny", 12, scorer)[1]
    less = replay.operations("tiny", 12, replace(scorer, sees_suffix=False))[1]
    assert more - less == pair * 6 * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "snapkv"], "'snapkv' is none of"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--keep", "0"], "--keep must be in (0, 1], got 0"),
    ],
)
def test_bad_settings_are_one_line(capsys, options, message):
    assert main(["bench", "replay", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
