"""The throughput benchmark: rates of compression beside none, in a pool that is short."""

import json
from pathlib import Path

import pytest

from bench_throughput import throughput
from lab.command import run
from lab.serve_throughput import kept


def test_tokens_that_are_kept() -> None:
    assert kept(6000, 1) is None
    assert (kept(6000, 8), kept(500, 2), kept(500, 64)) == (750, 250, 128)


def test_more_decode_together_where_less_is_kept(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    path, figure = tmp_path / "found.json", tmp_path / "figure.png"
    how = "--tokens 400,9000 --rates 1,4 --requests 6 --outputs 8 --kv-bytes 500000 --device cpu"
    call = ["random:tiny", *how.split()]
    assert run(throughput, [*call, "--json", str(path), "--plot", str(figure)]) == 0
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("random:tiny --requests 0", "--requests must be at least 1, got 0"),
        ("random:tiny --rates .5", "--rates must be at least 1, got 0.5"),
        ("random:tiny --evict luck", "--evict must be one of"),
        ("random:large", "MODEL: 'large' is none of llama-3.1-8b, llama-3.1-70b, llama-2-7b, "),
    ],
)
def test_bad_settings_are_one_line(capsys, options: str, message: str) -> None:
    assert run(throughput, [*options.split(), "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
