"""benchmarks/suite_table.py: commands are run once, and what fails does not stop the rest."""

import json
import subprocess
from pathlib import Path

import pytest

import suite_table
from kvfold.evaluation.suites.run import SuiteAnswer, SuiteResult


def result(scores: list[float]) -> SuiteResult:
    about = {"group": "", "kind": "", "detail": "", "num_tokens": 1, "finish_reason": "eos"}
    answers = [
        SuiteAnswer(id=f"q{i}", score=x, text=str(x), error=None, **about)
        for i, x in enumerate(scores)
    ]
    size = {"max_new_tokens": 8, "length": None, "truncated": 0}
    took = {"seconds": 1.0, "judge_seconds": 0.0}
    made = {"suite": "math", "engine": "kvfold", "chat": False}
    return SuiteResult(**made, **size, **took, answers=tuple(answers))


def test_a_row_has_what_changed() -> None:
    row = suite_table.row(result([1.0, 0.0, 1.0]), result([0.0, 1.0, 1.0]))
    assert (row["worse"], row["better"], row["right"]) == (["q0"], ["q1"], 2)
    assert row["difference"] == 0


@pytest.mark.parametrize("failing", ["none", "zack"])
def test_each_setting_is_compressed_and_asked_once(tmp_path, monkeypatch, capsys, failing) -> None:
    calls, devices = [], []

    def call(command, stdout, stderr, env):
        words = list(command[3:])
        calls.append(words)
        devices.append(env["CUDA_VISIBLE_DEVICES"])
        if failing in words:
            stdout.write(b"first\nno such thing\n")
            return 2
        if words[0] == "compress":
            (tmp_path / words[words.index("--output") + 1]).mkdir()
        else:
            record = result([1.0, 0.0]).record()
            data = {"suites": {"math": record}, "versions": {"kvfold": "0"}}
            Path(words[words.index("--json") + 1]).write_text(json.dumps(data))
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    names = ["original", "bits-4", "swift-4x", "kvquant-3", "oscar-2", "fp8", "zack"]
    file = tmp_path / "rows.json"
    argv = ["suite_table.py", "model", "--folder", str(tmp_path / "made"), "--settings", *names[1:]]
    argv += ["--suites", "math=file", "--set", "suite-rows=2", "kv-bytes=5", "--json", str(file)]
    argv += ["--devices", "1,3"]
    monkeypatch.setattr("sys.argv", argv)
    suite_table.main()
    done = [x for x in names if x != failing]
    rows = json.loads(file.read_text())
    assert [x["setting"] for x in rows["rows"]] == done
    assert rows["failed"] == ({} if failing == "none" else {"zack": "no such thing"})
    evals = {tuple(x[1:3]) for x in calls if x[0] == "eval"}
    assert ("model", "--suite") in evals
    asked = next(x for x in calls if x[0] == "eval" and "--maps" in x)
    assert asked[asked.index("--maps") + 1].endswith("swift-4x")
    assert all("suite-rows=2" in x for x in calls if x[0] != "compress")
    fp8, simulated = sorted(x for x in calls if x[0] not in ("compress", "eval"))
    assert fp8[:2] == ["--kv-cache-dtype", "fp8"] and not any("kv-bytes" in x for x in fp8)
    assert simulated[:6] == ["--quantiser", "oscar-2", "--recent", "256", "--first", "64"]
    assert simulated[6:10] == ["--suites", "math=file", "--set", "suite-rows=2"]
    (asked,) = (x for x in calls if x[0] == "eval" and x[1].endswith("kvquant-3"))
    assert asked[-6:-2] == ["--bits", "3", "--set", "format=kvquant"]
    assert set(devices) == {"1", "3"}
    before = len(calls)
    suite_table.main()  # nothing is made or asked again
    assert len(calls) - before == (failing == "zack")
