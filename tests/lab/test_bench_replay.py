"""The benchmark of the re-scoring pass, on the tiny shape."""

import json

import pytest

from bench_replay import replay
from lab.command import run


@pytest.mark.parametrize("repair", [False, True])
def test_a_second_reading_beside_the_first(tmp_path, repair):
    target = tmp_path / "replay.json"
    how = ["--tokens", "200", "--policies", "kvzip", "--keep", ".5", "--json", str(target)]
    how += ["--repair"] * repair
    assert run(replay, ["--shape", "tiny", *how]) == 0
    found = json.loads(target.read_text())
    assert not found["skipped"]
    assert [x["whole"] for x in found["rows"]] == [True, False]
    for row in found["rows"]:
        assert min(row["prefill_ms"], row["score_ms"], row["evict_ms"]) > 0
        assert row["prefill_tflop"] < row["score_tflop"]
        assert (row["repair_tflop"] > 0) == row["repair"] == repair


def test_operations_of_a_reading():
    """A piece that is everything: each query sees all rows, and half of the reading."""
