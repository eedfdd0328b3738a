"""Benchmarks of attention time what is right, and report what they timed."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from bench_cases import CPU, TINY, owned_pages, stored_rows
from commands import without_progress
from kvfold.bench import attention, baselines, common, timing, variants, workload
from kvfold.bench.common import TOLERANCE, check_outputs
from kvfold.cli.main import main
from kvfold.ops.decode.reference import decode


def build(name, *, batch=3, tokens=90, num_layers=2, seed=0):
    return workload.build_workload(
        TINY,
        variants.VARIANTS[name],
        batch=batch,
        tokens=tokens,
        num_layers=num_layers,
        device=CPU,
        seed=seed,
    )


def job(**changes):
    settings = {"shape": "tiny", "cases": ((2, 64),), "variants": ("bf16-full", "int4-half")}
    settings |= {"baselines": tuple(baselines.BASELINES), "layers": 2, "rounds": 2}
    return common.KernelJob(**{**settings, **changes})


def measure(job, batch=2, tokens=64, kernel=decode):
    return attention.measure_case(job, batch, tokens, kernel, CPU)


# -- timing ----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock in microseconds that only moves when told to."""
    now = SimpleNamespace(us=0.0)
    fake = SimpleNamespace(perf_counter=lambda: now.us / 1e6)
    monkeypatch.setattr(timing, "time", fake)
    return now


def test_times_are_a_layers_and_percentiles_over_rounds(clock):
    passes = []

    def fast(layer):
        clock.us += 3

    def growing(layer):
        if layer == 0:
            passes.append(None)
        clock.us += len(passes)

    steps = {"fast": fast, "growing": growing}
    found = timing.time_steps(steps, layers=4, rounds=11, device=CPU)
    numbers = [getattr(found["fast"], x) for x in ("us", "us_p10", "us_p90", "repeat_us")]
    assert numbers == pytest.approx([3, 3, 3, 3])
    first = 1 + timing.WARM_UP + 1  # of the 11 passes that are counted
    numbers = [getattr(found["growing"], x) for x in ("us", "us_p10", "us_p90", "repeat_us")]
    assert numbers == pytest.approx([first + 5, first + 1, first + 9, first + 16])
    assert len(passes) == 1 + timing.WARM_UP + 2 * 11


def test_steps_take_turns_over_all_layers():
    seen = []
    steps = {name: lambda layer, name=name: seen.append((name, layer)) for name in "abc"}
    timing.time_steps(steps, layers=2, rounds=5, device=CPU)
    assert seen[::2] == [(name, 0) for name, _ in seen[::2]]
    assert seen[1::2] == [(name, 1) for name, _ in seen[::2]]
    turns = [name for name, _ in seen[::2]]
    rounds = ["".join(turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert rounds[-5:] == ["abc", "bca", "cab", "abc", "bca"]


# -- workload --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_pages_have_one_owner_and_lie_in_the_arena(name):
    work = build(name)
    pages = owned_pages(work)
    assert pages[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(pages))
    assert pages[-1][1] * 64 == work.arena.numel()


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_numbers_are_sane_and_layers_differ(name):
    work = build(name)
    seen = []
    for number in range(3):
        rows = stored_rows(work, number)
        stored = rows[rows != 0].float()
        assert stored.isfinite().all() and 0.5 < stored.std() < 4
        seen.append(rows)
    assert seen[0].shape != seen[1].shape or not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    again = build(name)
    assert torch.equal(stored_rows(again, 0), seen[0]) and torch.equal(again.q, work.q)


def test_pages_are_shuffled():
    tables = build("bf16-full", batch=2, tokens=640).tables
    steps = (tables[..., 1:] - tables[..., :-1]).flatten()
    assert (steps < 0).any() and steps.unique().numel() > 3


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("bf16-full", 64), ("bf16-half", 32), ("int8-full", 36), ("int4-half", 12)],
)
def test_bytes_are_what_rows_store(name, numbers):
    """Of a row: 2 x 16 numbers or half of them, and two fp16 scales where quantised."""
    assert build(name, batch=3, tokens=90).row_bytes == 3 * 90 * 2 * numbers


def test_a_layer_takes_about_the_bytes_that_it_is_thought_to():
    for name, variant in variants.VARIANTS.items():
        bytes_per_layer = build(name, batch=4, tokens=640).arena.numel() / 2
        guess = workload.layer_bytes(TINY, variant, 4, 640)
        assert bytes_per_layer <= guess <= 2 * bytes_per_layer, name


# -- right before fast -----------------------------------------------------------------------------


def test_check_tells_wrong_from_rounded():
    expected = torch.randn(4, 8)
    padded = torch.nn.functional.pad(expected, (0, 4))
    check_outputs("kernel", padded.bfloat16(), expected)
    for wrong in (padded * (1 + 2 * TOLERANCE), padded + torch.nan, padded + 0.1):
        with pytest.raises(RuntimeError, match="kernel: outputs are off"):
            check_outputs("kernel", wrong, expected)


@pytest.mark.parametrize("name", baselines.BASELINES)
@pytest.mark.parametrize("shape", ["grouped", "one each"])
def test_baselines_are_right_or_say_why_not(name, shape):
    geometry = TINY if shape == "grouped" else replace(TINY, num_kv_heads=4)
    cache = baselines.build_full_cache(geometry, batch=2, tokens=48, num_layers=2, device=CPU)
    if "cudnn" in name:
        with pytest.raises(common.Unavailable):
            baselines.BASELINES[name](cache)
        return
    built = baselines.BASELINES[name](cache)
    assert torch.equal(built.k, cache.k[0, 0]) and torch.equal(built.v, cache.v[0, 0])
    for layer in (0, 1, 2):
        read = replace(built, k=cache.k[layer % 2, 0], v=cache.v[layer % 2, 0])
        expected = baselines.expected_outputs(cache, read)
        q, k, v = cache.q[:1, :, None].float(), read.k[None].float(), read.v[None].float()
        sdpa = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=cache.scale, enable_gqa=True
        )
        torch.testing.assert_close(expected, sdpa[0, :, 0])
        check_outputs(name, built.step(layer)[0].reshape(expected.shape), expected)


# -- a case ----------------------------------------------------------------------------------------


def test_rows_add_up():
    rows, skipped = measure(job())
    names = ["sdpa-flash", "bf16-full", "int4-half"]
    assert [row.variant for row in rows] == names
    assert {x.name for x in skipped} == {"sdpa-cudnn"}
    theirs = [row for row in rows if row.kind == "baseline"]
    fastest = min(theirs, key=lambda row: row.us)
    for row in rows:
        assert (row.shape, row.batch, row.tokens, row.distinct_layers) == ("tiny", 2, 64, 2)
        assert 0 < row.us_p10 <= row.us <= row.us_p90 and row.repeat_us > 0
        assert row.tb_per_s == pytest.approx(row.bytes / row.us * 1e-6)
        assert (row.fastest_baseline, row.fastest_baseline_us) == (fastest.variant, fastest.us)
        assert row.speedup_vs_fastest == fastest.us / row.us
    assert {row.variant: row.bytes for row in rows} == {
        **dict.fromkeys(names[:2], 2 * 64 * 128),
        "int4-half": 2 * 64 * 24,
    }


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    wrong = lambda *place, plan=None: (decode(*place)[0] * 1.1, None)  # noqa: E731
    rows, skipped = measure(job(), kernel=wrong)
    assert {row.kind for row in rows} == {"baseline"}
    assert "outputs are off by" in {x.name: x.reason for x in skipped}["bf16-full"]

    def broken(*place, plan=None):
        raise KeyError("no such\n  kernel")

    rows, skipped = measure(job(), kernel=broken)
    assert {x.name: x.reason for x in skipped}["int4-half"] == "KeyError: 'no such\\n kernel'"
    flash = baselines.BASELINES["sdpa-flash"]

    def broken(at):
        built = flash(at)
        return replace(built, k=-built.k)

    monkeypatch.setitem(baselines.BASELINES, "sdpa-flash", broken)
    rows, skipped = measure(job())
    assert "sdpa-flash" not in [row.variant for row in rows]
    assert "off by" in {x.name: x.reason for x in skipped}["sdpa-flash"]


def test_a_case_that_cannot_be_timed_is_named(monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(common, "time_steps", fails)
    rows, skipped = measure(job())
    reasons = {x.name: x.reason for x in skipped}
    assert not rows and reasons["int4-half"] == "with all others: none left"
    assert len(reasons) == 4


def test_without_a_baseline_nothing_is_compared():
    rows, _ = measure(job(baselines=("sdpa-cudnn",)), 1)
    assert {row.speedup_vs_fastest for row in rows} == {None}


def test_what_does_not_fit_is_named(monkeypatch):
    monkeypatch.setattr(attention, "HOST_BYTES", 3 * 20000)
    rows, skipped = measure(job())
    assert {row.variant: row.distinct_layers for row in rows} == {
        "sdpa-flash": 1,
        "int4-half": 2,
    }
    reason = {x.name: x.reason for x in skipped}["bf16-full"]
    assert (
        reason == "a layer takes 24576 bytes, its share of the memory is 20000: name fewer variants"
    )


def test_layers_go_round_only_where_the_cache_forgets_them(monkeypatch):
    monkeypatch.setattr(attention, "cold_bytes", lambda device: 1000)
    distinct = [
        attention.distinct_layers(size, 32, 2000, CPU) for size in (10, 100, 600, 900, 1500, 2001)
    ]
    assert distinct == [32, 20, 3, 2, 1, 0]
    assert attention.distinct_layers(990, 32, 999, CPU) == 0


# -- command ---------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr("kvfold.ops.decode.decode", decode)


def run(*options):
    few = ["--layers", "2", "--rounds", "2", "--variants", "bf16-full,int4-half"]
    return main(["bench", "attention", "--shape", "tiny", *few, *map(str, options)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "gpt-9"], "shape: unknown name 'gpt-9'; legal: llama-3.1-8b, "),
        (["--variants", "int5"], "variants: unknown name 'int5'; legal: bf16-full, "),
        (["--variants", "bf16-half-pareto"], "unknown name 'bf16-half-pareto'"),
        (["--baselines", "flex"], "baselines: unknown name 'flex'"),
        (["--baselines", "eager"], "baselines: unknown name 'eager'; legal: sdpa-flash, "),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--tokens", "64,-1"], "tokens must be at least 1, got -1"),
        (["--tokens", "many"], "--tokens: 'many' is not"),
        (["--layers", "0"], "layers must be at least 1"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--json", "no/such/folder/x.json"], "folder"),
        (["--speed", "1"], "--speed"),
    ],
)
def test_bad_settings_are_one_line(capsys, options, message):
    assert main(["bench", "attention", *options]) == 2
    lines = without_progress(capsys.readouterr().err)
    assert len(lines) == 1 and message in lines[0]


def test_bench_attention_prints_and_writes(kernel, tmp_path, capsys):
    target = tmp_path / "attention.json"
    assert run("--batch", "1,2", "--tokens", "32", "--json", target) == 0
    out = capsys.readouterr().out
    assert "tiny, 2 x 32 tokens" in out and "int4-half" in out
    assert out.count("sdpa-flash *") == 2
    assert "sdpa-cudnn at 1 x 32, 2 x 32 not timed: cuDNN needs a CUDA device" in out
    report = json.loads(target.read_text())
    assert report["benchmark"] == "attention" and report["settings"]["cases"] == [[1, 32], [2, 32]]
    assert {"kvfold", "commit", "torch", "triton", "device"} <= report["versions"].keys()
    assert {(row["batch"], row["variant"]) for row in report["rows"]} >= {
        (1, "bf16-full"),
        (2, "int4-half"),
    }


def test_help_names_all_that_can_be_timed(capsys):
    """The lists are written out in the help, which must not import torch."""
    texts = []
    for more in (["--help"], ["--set", "help"]):
        assert main(["bench", "attention", *more]) == 0
        texts += capsys.readouterr().out.replace("│", " ").split()
    words = {word.strip(".,:") for word in texts}
    legal = {*variants.VARIANTS, *variants.SHAPES, *baselines.BASELINES}
    assert not legal - words
