"""kvfold bench throughput: rates of compression beside none, in a pool that is short."""

import json
from pathlib import Path

import pytest

from commands import refused
from kvfold.bench.serve_throughput import kept
from kvfold.cli.main import main


def test_tokens_that_are_kept() -> None:
    assert kept(6000, 1) is None
    assert (kept(6000, 8), kept(500, 2), kept(500, 64)) == (750, 250, 128)


def test_more_decode_together_where_less_is_kept(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    path, figure = tmp_path / "found.json", tmp_path / "figure.png"
    how = "--tokens 400,9000 --rates 1,4 --requests 6 --outputs 8 --kv-bytes 500000 --device cpu"
    call = ["bench", "throughput", "random:tiny", *how.split()]
    assert main([*call, "--json", str(path), "--plot", str(figure)]) == 0
    found = json.loads(path.read_text())
    whole, less = found["rows"]
    assert (whole["kept"], less["kept"]) == (None, 128)
    assert less["largest_batch"] > whole["largest_batch"] >= 1
    assert less["compressions"] >= 6 and whole["compressions"] == 0
    for row in (whole, less):
        assert row["tokens_per_s"] == pytest.approx(6 * 8 / row["seconds"])
        assert row["total_per_s"] == pytest.approx(6 * 408 / row["seconds"])
        assert 0 < row["used_bytes"] <= row["pool_bytes"] == 499_968
    assert [(x["tokens"], x["rate"]) for x in found["skipped"]] == [(9000, 1), (9000, 4)]
    out = capsys.readouterr().out
    assert "9000 tokens at rate 4: SettingError: kv_bytes: a pool of 499968 bytes" in out
    assert figure.stat().st_size > 10_000


def test_what_cannot_be_measured(capsys) -> None:
    call = ("bench", "throughput", "random:tiny", "--device", "cpu")
    assert "--requests must be at least 1, got 0" in refused(capsys, *call, "--requests", 0)
    assert "--evict must be one of" in refused(capsys, *call, "--evict", "luck")
    words = refused(capsys, "bench", "throughput", "random:large")
    assert (
        "MODEL: 'large' is none of llama-3.1-8b, llama-3.1-70b, llama-2-7b, qwen2.5-1.5b, tiny"
        in words
    )
