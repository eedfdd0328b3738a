"""The prefill benchmark checks results, counts unmasked operations and names what it skips."""

import json
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from bench_prefill import prefill
from kvfold.bench.variants import SHAPES
from kvfold.ops.backend import use_triton
from kvfold.ops.prefill.reference import prefill as prefill_reference
from lab import prefill as bench
from lab.command import run

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def job(**changes):
    settings = {"shape": "tiny", "cases": ((2, 40, 24),), "variants": ("full", "half-ragged")}
    settings |= {"baselines": tuple(bench.BASELINES), "layers": 2, "rounds": 2}
    return bench.Job(**{**settings, **changes})


def build(name, case=(2, 40, 24)):
    return bench.build_work(TINY, bench.KEPT[name], case, 2, CPU)


def test_work_is_what_was_asked_for():
    work = build("half-ragged")
    keys, values = work.sides[1]
    assert (keys.ranks, values.ranks) == ((4, 8), (12, 8)) and work.q.shape == (2, 4, 24, 8)
    assert not work.q[:, :2, :, 4:].any() and work.q[:, :2, :, :4].any(-1).all()
    assert (keys.starts, values.starts) == ((0, 4), (12, 24)) and keys.data.shape == (2, 40, 32)
    assert work.queries.tolist() == 2 * [list(range(16, 40))]
    assert not torch.equal(work.sides[0][0].data, keys.data)
    seen = sum(range(17, 41))
    assert work.flops == 2 * 2 * seen * 2 * (12 + 20)


@pytest.mark.parametrize("name", bench.KEPT)
def test_check_tells_wrong_from_right(name):
    work = build(name)
    out = work.step()(0)
    work.check(name, out)
    for wrong in (out * 1.1, out + torch.nan, work.step()(1), out.roll(1, 2)):
        with pytest.raises(RuntimeError, match="outputs are off"):
            work.check(name, wrong)


def test_rows_add_up():
    rows, skipped = bench.measure_case(job(), (2, 40, 40), CPU)
    assert [row.variant for row in rows] == ["sdpa-flash", "full", "half-ragged"]
    assert [(x.name, x.reason) for x in skipped] == [("sdpa-cudnn", "cuDNN needs a CUDA device")]
    flash = rows[0]
    for row in rows:
        assert (row.batch, row.tokens, row.chunk, row.shape) == (2, 40, 40, "tiny")
        assert 0 < row.us_p10 <= row.us <= row.us_p90 and row.repeat_us > 0
        assert (row.fastest_baseline, row.fastest_baseline_us) == ("sdpa-flash", flash.us)
        assert row.speedup_vs_fastest == flash.us / row.us
    flops = {row.variant: row.tflops * row.us * 1e6 for row in rows}
    assert flops["full"] == pytest.approx(2 * 4 * 820 * 2 * 32)
    assert flops["half-ragged"] == pytest.approx(flops["sdpa-flash"] / 2)


def test_what_is_wrong_is_not_timed(monkeypatch):
    right = bench.variant_step

    def broken(name, work):
        step = right(name, work)
        return (lambda layer: step(layer) * 1.1) if name == "full" else step

    monkeypatch.setattr(bench, "variant_step", broken)
    rows, skipped = bench.measure_case(job(baselines=()), (1, 20, 20), CPU)
    assert [row.variant for row in rows] == ["half-ragged"]
    assert "full: outputs are off" in skipped[0].reason and rows[0].speedup_vs_fastest is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels on a CPU")
def test_kernels_can_be_cut_otherwise(monkeypatch):
    names = ("half-ragged@zack", "half@16x16w4s1", "half")
    _, skipped = bench.measure_case(job(variants=names, baselines=()), (1, 20, 20), CPU)
    assert [x.name for x in skipped] == list(names[:2])  # the reference has nothing to cut
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvfold.ops.prefill import triton as prefill_triton

    monkeypatch.setenv("KVFOLD_BACKEND", "triton")
    use_triton.cache_clear()
    cuts = {}

    def run(*sides, cut, **options):
        cuts[sides[1].ranks] = [cut(w) for w in ((16, 0, 16, 0), (64, 0, 64, 0), (128, 0, 128, 0))]
        return prefill_reference(*sides, **options)

    monkeypatch.setattr(prefill_triton, "prefill", run)
    wide = SHAPES["llama-3.1-8b"]
    for name in ("half@16x32w4s1r99", "full@zack", "half-uneven@zack"):
        work = bench.build_work(wide, bench.KEPT[name.partition("@")[0]], (1, 3, 3), 1, CPU)
        work.check(name, bench.variant_step(name, work)(0))
    use_triton.cache_clear()
    one = prefill_triton.Cut(pairs=16, rows=32, warps=4, stages=1, registers=99)
    assert cuts[(64,) * 8] == 3 * [one]
    assert [cut.pairs for cut in cuts[(128,) * 8]] == [256, 128, 64]
    assert [cut.pairs for cut in cuts[(32, 64, 64, 96) * 2]] == [256, 128, 64]


# -- command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "gpt-9"], "shape: unknown name 'gpt-9'; legal: llama-3.1-8b, "),
        (["--variants", "third"], "variants: unknown name 'third'; legal: full, "),
        (["--variants", "half@big"], "variants: 'big' is no cut"),
        (["--baselines", "eager"], "baselines: unknown name 'eager'; legal: sdpa-flash, "),
        (["--tokens", "64,0"], "tokens must be at least 1, got 0"),
        (["--tokens", "64", "--chunk", "65"], "chunk must be at most tokens, 64; got 65"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--json", "no/such/folder/x.json"], "folder"),
    ],
)
def test_bad_settings_are_one_line(capsys, options, message):
    assert run(prefill, [*options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_bench_prefill_prints_and_writes(tmp_path, capsys):
    target = tmp_path / "prefill.json"
    few = ["--layers", "1", "--rounds", "2", "--variants", "full,quarter", "--json", str(target)]
    sizes = ["--batch", "1,2", "--tokens", "32", "--chunk", "8,32"]
    assert run(prefill, ["--shape", "tiny", *sizes, *few]) == 0
    out = capsys.readouterr().out
    assert "tiny, 2 x the last 8 of 32 tokens" in out and "sdpa-flash *" in out
    assert "sdpa-cudnn at 2 x 8 of 32 not timed: " in out
    report = json.loads(target.read_text())
    assert report["benchmark"] == "prefill" and report["settings"]["cases"][1] == [1, 32, 32]
    assert {"kvfold", "commit", "torch", "triton", "device"} <= report["versions"].keys()
    cases = {(x["batch"], x["tokens"], x["chunk"], x["variant"]) for x in report["rows"]}
    assert {(1, 32, 8, "quarter"), (2, 32, 32, "full")} <= cases
