"""The lab's decoders: transformers' static cache, ablations, and cost of compression."""

import json
from dataclasses import replace

import pytest
import torch

from bench_compress import compress
from bench_decode import decode as command
from commands import without_progress
from kvfold.bench import decode
from kvfold.bench import synthetic_engine as served
from kvfold.bench.common import Unavailable
from kvfold.bench.variants import SHAPES
from kvfold.engine.requests.request import CacheParams
from lab import ablations, compression, decoders, tracked
from lab.command import run as run_script
from lab.variants import SERVED, VARIANTS, is_ablation

CPU = torch.device("cpu")
COMMANDS = {"decode": command, "compress": compress}


def run(tmp_path, name, *options):
    target = tmp_path / "decode.json"
    few = ["--shape", "tiny", "--steps", "2", "--json", str(target)]
    few += [] if "--tokens" in options else ["--tokens", "40"]
    assert run_script(COMMANDS[name], [*few, *options]) == 0
    return json.loads(target.read_text())


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr(decode, "free_bytes", lambda device: decode.SPARE + 17_000_000)


def test_decoders_of_the_lab_alone(tmp_path):
    names = ["transformers-static", "bf16-half-online"]
    found = run(tmp_path, "decode", "--batch", "1,3", "--prefill", "--variants", ",".join(names))
    assert not found["skipped"]
    rows = {(row["variant"], row["batch"]): row for row in found["rows"]}
    assert set(rows) == {(name, batch) for name in names for batch in (1, 3)}
    assert {x["variant"] for x in found["first_tokens"]} == set(names)


def test_rows_are_numbered_where_they_are_tracked():
    variant = replace(VARIANTS["int4-half"], evict=2)
    model = served.random_model("tiny", variant, CPU)
    engine = served.build_engine(model, "tiny", variant, batch=2, longest=80, evict="h2o")
    tracked.fill(engine, 2, 70, 5, CacheParams(keep_tokens=0.5))
    runner = served.runner_of(engine)
    for slot in (0, 1):
        metrics, positions, valid = runner.eviction.tracked(slot)
        assert valid.sum() == 4 * 69 and metrics[valid].isfinite().all()
        assert torch.equal(positions[valid].view(4, -1), torch.arange(69).int().expand(4, -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["decode", "--variants", "bf16-half-pareto"], "'bf16-half-pareto' is none of"),
        (["compress", "--keep", "2"], "--keep: '2' has numbers that are not in (0, 1]"),
        (["compress", "--variants", "transformers"], "'transformers' is none of"),
        (["compress", "--batch", "0"], "--batch must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_one_line(capsys, options, message):
    assert run_script(COMMANDS[options[0]], options[1:]) == 2
    lines = without_progress(capsys.readouterr().err)
    assert len(lines) == 1 and message in lines[0]


def test_first_tokens_with_other_tiles(monkeypatch):
    """ZACK/KE in prefill, in a whole engine: the same kernel, other cuts; none without kernels."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvfold.ops.prefill import triton as kernel

    rows = [(16, 0, 64), (32, 32, 128)]  # of a quarter and of three quarters of a head
    ours = kernel.cut_for
    for name, pairs in (("fixed", [64, 64]), ("zack", [128, 64]), ("", [64, 128])):
        label = "-".join(filter(None, ("bf16-half-uneven", name)))
        variant = VARIANTS[label]
        assert label in SERVED and is_ablation(variant) == bool(name)
        monkeypatch.setattr(ablations, "use_triton", lambda _: True)
        with ablations.tiles_of(variant, SHAPES["llama-3.1-8b"], "cpu"):
            assert [kernel.cut_for(x, False).pairs for x in rows] == pairs
        assert kernel.cut_for is ours
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="no kernel to cut"):
        decoders.build_decoder("tiny", "bf16-half-uneven-zack", CPU).first_token(20)()


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
