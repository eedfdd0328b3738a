"""The pages of timings are made from results alone, and say what lost and what was left out."""

import json

import pytest

pytest.importorskip("matplotlib", reason="Matplotlib is not installed")

import performance_page as page_tool


def row(variant, batch, tokens, us, kind="variant", bar=10.0):
    return {
        "variant": variant,
        "kind": kind,
        "shape": "llama-3.1-8b",
        "batch": batch,
        "tokens": tokens,
        "distinct_layers": 32,
        "us": us,
        "us_p10": us - 1,
        "us_p90": us + 1,
        "repeat_us": us,
        "bytes": 4e6,
        "tb_per_s": 4 / us,
        "ceiling_fraction": 1 / us,
        "fastest_baseline": bar and "sdpa-cudnn",
        "fastest_baseline_us": bar,
        "speedup_vs_fastest": bar and bar / us,
    }


VERSIONS = {
    "device": "NVIDIA H200",
    "torch": "2.11",
    "triton": "3.6",
    "kvfold": "0.1",
    "commit": "abcdef0123456789",
}


def report(rows):
    return {
        "benchmark": "attention",
        "settings": {
            "shape": "llama-3.1-8b",
            "cases": [[1, 1024], [64, 8192]],
            "variants": ["bf16-half", "int4-half"],
            "baselines": ["sdpa-cudnn"],
            "layers": 32,
            "rounds": 30,
        },
        "versions": VERSIONS,
        "ceiling": {
            "read_tb_per_s": 4.5,
            "read_by": "triton",
            "copy_tb_per_s": 4.2,
            "num_bytes": 1,
        },
        "rows": rows,
        "skipped": [
            {"name": "flashinfer", "batch": b, "tokens": t, "reason": "not installed"}
            for b, t in ((1, 1024), (64, 8192))
        ],
    }


ROWS = [
    row("sdpa-cudnn", 1, 1024, 10.0, kind="baseline"),
    row("bf16-half", 1, 1024, 20.0),
    row("int4-half", 1, 1024, 5.0),
    row("sdpa-cudnn", 64, 8192, 10.0, kind="baseline"),
    row("bf16-half", 64, 8192, 5.5),
    row("int4-half", 64, 8192, 2.5),
]


def made(benchmark, settings, rows, **more):
    settings = {"shape": "llama-3.1-8b", **settings}
    found = {"benchmark": benchmark, "settings": settings, "versions": VERSIONS}
    return {**found, "rows": rows, "skipped": [], **more}


def step(variant, batch, tokens, ms):
    case = {"shape": "llama-3.1-8b", "variant": variant, "batch": batch, "tokens": tokens}
    times = {"ms": ms, "ms_p10": ms - 1, "ms_p90": ms + 1, "tokens_per_s": 1e3 * batch / ms}
    return {**case, **times, "cache_bytes": 1e9, "peak_bytes": 3e9, "predicted_bytes": 2e9}


def write_page(tmp_path, *found):
    results = tmp_path / "results"
    results.mkdir(exist_ok=True)
    for number, each in enumerate(found):
        (results / f"{number}.json").write_text(json.dumps(each))
    (results / "quality.json").write_text(json.dumps({"model": "m", "rows": []}))
    page_tool.main(["--results", str(results), "--output", str(tmp_path)])
    return "".join(page.read_text() for page in sorted(tmp_path.glob("timings-*.md")))


def test_the_page_says_what_where_and_which_lost(tmp_path):
    text = write_page(tmp_path, report(ROWS))
    assert "## Decode attention, llama-3.1-8b, NVIDIA H200" in text and "`abcdef0123`" in text
    assert (
        "python benchmarks/bench_attention.py --batch 1,64 --tokens 1024,8192 --shape llama-3.1-8b"
        in text
    )
    assert "|  | 1 x 1024 | 64 x 8192 |" in text and "| `sdpa-cudnn` | 10.0 * | 10.0 * |" in text
    assert "| `bf16-half` | 20.0 0.50× | 5.5 **1.82×** |" in text
    assert "Slower than the fastest baseline: `bf16-half` 1 x 1024.\n" in text
    assert "- `flashinfer` at 1 x 1024, 64 x 8192: not installed" in text
    for name in ("speedup", "ceiling"):
        picture = f"timings/attention-llama-3.1-8b-nvidia-h200-{name}.svg"
        assert f"]({picture})" in text and "bf16-half" in (tmp_path / picture).read_text()


def test_pages_are_as_the_results_say(tmp_path):
    page_tool.main(["--output", str(tmp_path)])
    pages = [page_tool.ROOT / "docs/lab" / page.name for page in tmp_path.glob("timings-*.md")]
    assert len(pages) == len(page_tool.SECTIONS)
    for page in pages:
        assert page.read_text() == (tmp_path / page.name).read_text(), "run the tool"


def test_files_of_a_shape_are_one_section(tmp_path):
    text = write_page(tmp_path, report(ROWS[:3]), report(ROWS[3:]))
    assert text.count("## Decode attention") == 1
    assert "| `int4-half` | 5.0 **2.00×** | 2.5 **4.00×** |" in text


def test_the_page_is_the_same_every_time(tmp_path):
    found = []
    for _ in range(2):
        text = write_page(tmp_path, report(ROWS))
        plots = sorted((tmp_path / "timings").iterdir())
        found.append([text, *(plot.read_text() for plot in plots)])
    assert found[0] == found[1]


def test_a_variant_that_always_loses_is_said_to():
    rows = [row("bf16-full", 1, 1024, 11.0), row("bf16-full", 2, 1024, 12.0)]
    assert page_tool.losses(rows) == "Slower than the fastest baseline: `bf16-full` everywhere."
    won = [row("int4-half", 1, 1024, 5.0)]
    assert page_tool.losses(won) == "Slower than the fastest baseline: none."


def test_the_page_does_without_baselines(tmp_path):
    rows = [row("bf16-half", 1, 1024, 5.0, bar=None)]
    text = write_page(tmp_path, report(rows))
    assert "Nothing was compared" in text and "| `bf16-half` | 5.0 |" in text


def test_ablations_and_rates(tmp_path):
    rows = [row("bf16-half", 1, 1024, 5.0), row("bf16-half-whole", 1, 1024, 8.0)]
    rows += [
        row(name, 1, 1024, 9.0) | {"rank": r, "tflops": 321.0}
        for name, r in (("small-10", 192), ("small-25", 512))
    ]
    text = write_page(tmp_path, report(rows))
    assert "| KE: whole heads, a program each | 1 | 1024 | 8 | 5 | 60 % |" in text
    assert "| OE" not in text
    picture = tmp_path / "timings" / "attention-llama-3.1-8b-nvidia-h200-rank.svg"
    assert "small-10, 321 TFLOP/s" in picture.read_text() and "| 321 |" in text


def test_steps_and_first_tokens(tmp_path):
    rows = [step("bf16-half", b, t, 5.0 * b) for b in (1, 8) for t in (4096, 8192)]
    rows += [step("transformers", 1, 4096, 20.0)]
    first = {"shape": "s", "variant": "bf16-half", "tokens": 4096, "chunk": 512, "ms": 300.4}
    first |= {"ms_low": 299, "ms_high": 302, "runs": 5, "tokens_per_s": 13635, "peak_bytes": 2e10}
    left = [{"variant": "bf16-full", "batch": 8, "tokens": 8192, "reason": "its cache takes 9 GB"}]
    settings = {"batch": [1, 8], "tokens": [4096, 8192], "steps": 12, "prefill": True}
    slower = {"variant": "bf16-half-online", "ms": 330.44}
    both = [first, first | slower]
    found = made("decode", settings, rows, first_tokens=both) | {"skipped": left}
    text = write_page(tmp_path, found)
    assert "|  | 1 x 4096 | 1 x 8192 | 8 x 4096 | 8 x 8192 |" in text
    assert "| `transformers` | 20.00 | – | – | – |" in text
    assert "| `bf16-half` | 300 |" in text and "- `bf16-full` at 8 x 8192: its cache" in text
    assert "| OE: values mapped back beside W_O | 1 | 4096 | 330.4 | 300.4 | 10 % |" in text
    assert "| `bf16-half-online` | 330 |" not in text
    assert "--batch 1,8 --tokens 4096,8192" in text and "--steps 12 --prefill" in text
    old = made("decode", {"steps": 12}, rows[:1])
    assert "--batch 1 --tokens 4096 --variants bf16-half" in page_tool.command(old)


def test_prefill_and_compression(tmp_path):
    rows = [row("half", 1, 8192, 5.0) | {"chunk": 512, "tflops": 400.0}]
    rows += [row("sdpa-cudnn", 1, 8192, 10.0, kind="baseline") | {"chunk": 512, "tflops": 200.0}]
    prefill = made("prefill", {"cases": [[1, 8192, 512], [1, 8192, 8192]]}, rows)
    case = {"shape": "s", "variant": "int4-half", "policy": "kv-compress", "batch": 64}
    case |= {"tokens": 8192}
    times = {"compress_ms": 90.2, "compress_ms_low": 89, "compress_ms_high": 95, "decode_ms": 13.5}
    evicted = case | times | {"keep": 0.5, "bytes_before": 9e9, "bytes_after": 4.5e9}
    shares = case | {"step_ms": 13.5, "kernel_ms": 12.25, "shares": {"plan": 0.02, "other": 0.98}}
    compress = made("compress", {"batch": 64, "keep": [0.5]}, [evicted], shares=[shares])
    text = write_page(tmp_path, prefill, compress)
    assert "python benchmarks/bench_prefill.py --batch 1 --tokens 8192 --chunk 512,8192" in text
    assert "|  | 1 x 8192, chunk 512 |" in text and "| `half` | 5.0 **2.00×** |" in text
    assert "| kv-compress | 0.5 | 90 (89–95) | 13.50 | 9.0 → 4.5 |" in text
    assert "| kv-compress | 12.25 | 2.0 % | 98.0 % |" in text


def test_without_results_there_is_no_page(tmp_path, capsys):
    with pytest.raises(SystemExit):
        page_tool.main(["--results", str(tmp_path), "--output", str(tmp_path)])
    assert "holds no file" in capsys.readouterr().err and not list(tmp_path.iterdir())
