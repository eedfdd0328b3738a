"""Whole engines on random weights: every row is written, whatever another one meets."""

import json
from dataclasses import replace

import pytest
import torch

from bench_compress import compress
from commands import without_progress
from kvfold.bench import ablations, contenders, decode
from kvfold.bench import synthetic_engine as served
from kvfold.bench.baselines import Unavailable
from kvfold.bench.variants import SHAPES, VARIANTS
from kvfold.cli.main import main
from kvfold.engine.requests.request import CacheParams
from lab import compression
from lab.command import run as run_script

CPU = torch.device("cpu")


def call(name, *options):
    """Exit code of `kvfold bench decode`, or of the script beside it."""
    words = list(options)
    return run_script(compress, words) if name == "compress" else main(["bench", name, *words])


def run(tmp_path, *options):
    target = tmp_path / "decode.json"
    few = ["--shape", "tiny", "--steps", "2", "--json", str(target)]
    few += [] if "--tokens" in options else ["--tokens", "40"]
    assert call(options[0], *few, *options[1:]) == 0
    return json.loads(target.read_text())


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr(decode, "free_bytes", lambda device: decode.SPARE + 17_000_000)


def test_all_cases_of_every_cache(tmp_path, capsys):
    names = ["transformers", "transformers-static", "bf16-full", "int4-half", "bf16-half-online"]
    found = run(tmp_path, "decode", "--batch", "1,3", "--prefill", "--variants", ",".join(names))
    assert not found["skipped"]
    rows = {(row["variant"], row["batch"]): row for row in found["rows"]}
    assert set(rows) == {(name, batch) for name in names for batch in (1, 3)}
    for row in rows.values():
        assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"] and row["repeat_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["predicted_bytes"] > row["cache_bytes"]
    # 2 layers x 2 pages of 32 rows x 2 heads x (32 numbers, or 16 of 4 bits and two scales).
    assert rows["bf16-full", 3]["cache_bytes"] == 3 * 2 * 2 * 32 * 2 * 64
    assert rows["int4-half", 1]["cache_bytes"] == 2 * 2 * 2 * 32 * 12
    first = {row["variant"]: row for row in found["first_tokens"]}
    assert set(first) == set(names) and first["bf16-full"]["chunk"] == 512
    assert all(x["ms_low"] <= x["ms"] <= x["ms_high"] for x in first.values())
    assert first["transformers"]["runs"] == decode.RUNS and first["transformers"]["chunk"] is None
    output = capsys.readouterr()
    assert "bf16-full, 40 tokens:" in output.err and "ms to the first token" in output.out
    assert found["settings"]["batch"] == [1, 3] and found["settings"]["steps"] == 2


def test_what_fails_or_does_not_fit_is_named(tmp_path, free, monkeypatch):
    build = contenders.contender

    def broken(shape, name, device):
        if name == "int8-half":
            raise torch.OutOfMemoryError("no memory\nat all")
        found = build(shape, name, device)
        if name == "int4-half":
            found.model.lm_head.weight.data.fill_(torch.nan)
        return found

    monkeypatch.setattr(contenders, "contender", broken)
    names = "int8-half,int4-half,bf16-half"
    found = run(tmp_path, "decode", "--batch", "1,64", "--variants", names)
    assert [(row["variant"], row["batch"]) for row in found["rows"]] == [("bf16-half", 1)]
    reasons = {(x["variant"], x["batch"]): x["reason"] for x in found["skipped"]}
    assert reasons["int8-half", "all"] == "no memory at all"
    assert "logits are not finite" in reasons["int4-half", 1]
    assert "its cache takes" in reasons["bf16-half", 64] and "are free" in reasons["bf16-half", 64]


def test_a_step_decodes_what_was_read():
    """From the first step on all sequences decode, at their own positions."""
    of = contenders.Ours("tiny", "bf16-half", CPU)
    engine = served.build_engine(of.model, "tiny", of.variant, batch=3, longest=50)
    served.fill(engine, 3, 40, 10, CacheParams())
    seen = []
    runner = served.runner_of(engine)
    step = runner.run
    runner.run = lambda batch, tokens: seen.append(batch) or step(batch, tokens)
    assert len(served.step(engine)) == 3
    pieces = seen[0].chunks
    assert all(x.is_decode and x.wants_logits and x.start == 39 for x in pieces)
    assert set(runner.pool.host_lengths.flatten()) == {40}
    runner.pool.check_integrity()


def test_code_compiled_for_one_contender_is_not_the_next_ones():
    made = []
    double = torch.compile(lambda x: 2 * x, backend=lambda graph, _: made.append(1) or graph)
    for expected in (1, 2):
        contenders.contender("tiny", "bf16-half", CPU)
        double(torch.ones(3))
        assert len(made) == expected


def test_rows_are_numbered_where_they_are_tracked():
    variant = replace(VARIANTS["int4-half"], evict=2)
    model = served.random_model("tiny", variant, CPU)
    engine = served.build_engine(model, "tiny", variant, batch=2, longest=80, evict="h2o")
    served.fill(engine, 2, 70, 5, CacheParams(keep_tokens=0.5))
    runner = served.runner_of(engine)
    for slot in (0, 1):
        metrics, positions, valid = runner.eviction.tracked(slot)
        assert valid.sum() == 4 * 69 and metrics[valid].isfinite().all()
        assert torch.equal(positions[valid].view(4, -1), torch.arange(69).int().expand(4, -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["decode", "--variants", "int5"], "--variants: 'int5' is none of transformers, "),
        (["decode", "--variants", "bf16-half-pareto"], "'bf16-half-pareto' is none of"),
        (["decode", "--shape", "gpt-9"], "--shape: 'gpt-9' is none of llama-3.1-8b, "),
        (["decode", "--steps", "1"], "--steps must be at least 2, got 1"),
        (["decode", "--batch", "0"], "--batch is too small"),
        (["decode", "--tokens", "1"], "--tokens is too small"),
        (["compress", "--keep", "2"], "--keep: '2' has numbers that are not in (0, 1]"),
        (["compress", "--variants", "transformers"], "'transformers' is none of"),
        (["compress", "--batch", "0"], "--batch must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_one_line(capsys, options, message):
    assert call(*options) == 2
    lines = without_progress(capsys.readouterr().err)
    assert len(lines) == 1 and message in lines[0]


# -- tiles of queries ---------------------------------------------------------------------------


def test_first_tokens_with_other_tiles(monkeypatch):
    """ZACK/KE in prefill, in a whole engine: the same kernel, other cuts; none without kernels."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvfold.ops.prefill import triton as kernel

    rows = [(16, 0, 64), (32, 32, 128)]  # of a quarter and of three quarters of a head
    ours = kernel.cut_for
    for name, pairs in (("fixed", [64, 64]), ("zack", [128, 64]), ("", [64, 128])):
        variant = VARIANTS["-".join(filter(None, ("bf16-half-uneven", name)))]
        assert variant.served and variant.ablation == bool(name)
        monkeypatch.setattr(ablations, "use_triton", lambda _: True)
        with ablations.tiles_of(variant, SHAPES["llama-3.1-8b"], "cpu"):
            assert [kernel.cut_for(x, False).pairs for x in rows] == pairs
        assert kernel.cut_for is ours
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="no kernel to cut"):
        contenders.Ours("tiny", "bf16-half-uneven-zack", CPU).first_token(20)()


# -- compression --------------------------------------------------------------------------------


def test_compression_beside_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "RUNS", 1)
    options = ["--batch", "2", "--tokens", "256", "--keep", ".5,.25", "--variants", "int4-half"]
    found = run(tmp_path, "compress", *options)
    assert not found["skipped"]
    for row, keep in zip(found["rows"], (0.5, 0.25), strict=True):
        assert row["keep"] == keep and row["policy"] == "kv-compress"
        assert 0 < row["compress_ms_low"] <= row["compress_ms"] <= row["compress_ms_high"]
        assert row["decode_ms"] > 0
        assert row["bytes_after"] == pytest.approx(keep * row["bytes_before"], rel=0.01)
    assert [x["policy"] for x in found["shares"]] == [None, "kv-compress"]
    for row in found["shares"]:
        assert sum(row["shares"].values()) == pytest.approx(1) and row["shares"]["matmul"] > 0
        assert row["kernel_ms"] > 0 and row["top"]


def test_rows_without_a_profiler(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "RUNS", 1)
    monkeypatch.setattr(compression, "PROFILED", 0)
    options = ["--batch", "1", "--tokens", "64", "--keep", ".5", "--variants", "int4-half"]
    found = run(tmp_path, "compress", *options)
    assert len(found["rows"]) == 1 and not found["shares"]
    assert {x["reason"] for x in found["skipped"]} == {"no shares: the profiler saw no kernels"}


def test_compression_that_does_not_fit_is_named(tmp_path, free):
    found = run(tmp_path, "compress", "--batch", "64", "--variants", "bf16-half")
    assert not found["rows"] and "its cache takes" in found["skipped"][0]["reason"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode_kernel", "attention"),
        ("combine_kernel", "combine"),
        ("plan_kernel", "plan"),
        ("append_rows", "append"),
        ("observe_kernel", "metrics"),
        ("observe_weights_kernel", "metrics"),
        ("score_kernel", "attention"),
        ("nvjet_tst_128x64_64x6_1x2_h_bz_TNN", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "matmul"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernels_have_a_kind(name, kind):
    assert compression.kind_of(name) == kind
