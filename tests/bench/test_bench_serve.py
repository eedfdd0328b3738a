"""kvfold bench serve: what it sends, what it measures, and what it makes of servers that fail."""

import json
import random
from itertools import islice, pairwise
from math import inf
from pathlib import Path

import pytest

from commands import refused
from kvfold.bench.serve_load import Goals, Prompts, Traffic, arrivals, read_trace
from kvfold.cli.main import main
from replicas import stub
from serving import serving, small_llm

from kvfold.bench.serve_client import Outcome  # isort: skip
from kvfold.bench.serve_results import agreement, summary, sustained  # isort: skip
from kvfold.bench.vllm_results import vllm_result, write_vllm_result  # isort: skip

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.5000000,30,2
2023-11-16 18:17:03.9799600,20,10
2023-11-16 18:17:04.7500000,20,0
2023-11-16 18:17:05.9799600,500,8
"""


def outcome(**given) -> Outcome:
    return Outcome(**{"at": 1.0, "prompt_tokens": 9, "output_tokens": 4, "sent": 1.0} | given)


def test_arrivals_keep_to_their_rate_and_seed() -> None:
    assert list(islice(arrivals("fixed", 4, random.Random(0)), 3)) == [0, 0.25, 0.5]
    assert list(islice(arrivals("poisson", inf, random.Random(0)), 2)) == [0, 0]
    times = list(islice(arrivals("poisson", 4, random.Random(1)), 4000))
    assert times == list(islice(arrivals("poisson", 4, random.Random(1)), 4000))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.05) and deviation == pytest.approx(0.25, rel=0.1)


def test_a_trace_is_replayed_at_its_times_or_at_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    traffic = Traffic(trace=path, requests=3, speed=2, max_input=100)
    jobs = traffic.timed(None)
    assert [(x.prompt, x.output) for x in jobs] == [(20, 10), (30, 2), (100, 8)]
    assert [x.at for x in jobs] == pytest.approx([0, 0.26002, 1])
    assert [x.at for x in Traffic(trace=path, arrival="fixed").timed(2)] == [0, 0.5, 1]


def test_other_traces(tmp_path: Path) -> None:
    lines = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 2500, "input_length": 7, "output_length": 3, "hash_ids": [1]}
    lines.write_text(json.dumps(row) + "\n")
    (found,) = read_trace(lines)
    assert (found.at, found.prompt, found.output) == (2.5, 7, 3)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n8,2,4\n6,3,2\n")
    assert [x.prompt for x in read_trace(lengths)] == [8, 6]


@pytest.mark.skipif(not TRACES.is_dir(), reason="there are no traces beside this checkout")
def test_published_traces() -> None:
    counts = {path.name: len(read_trace(path)) for path in TRACES.glob("*.csv")}
    assert len(counts) == 3 and min(counts.values()) > 8000


def test_prompts_have_exact_lengths_and_names() -> None:
    prompts = Prompts(list(range(50)), seed=1)
    found = prompts.cut("rate 1 0", 120)
    assert len(found) == 120 and found == prompts.cut("rate 1 0", 120)
    assert found != prompts.cut("rate 1 1", 120) and found[:50] == found[50:100]
    assert Prompts(["a", "b", "c"], seed=0).cut("x", 4).count(" ") == 3


def test_what_is_measured_of_outcomes() -> None:
    """By hand: due at 1, sent at 1.5, text at 2, 2.5 and 3.5, ended at 4."""
    one = outcome(sent=1.5, events=[2.0, 2.5, 3.5], ended=4.0)
    assert (one.ttft, one.gaps, one.jct, one.normalised) == (1.0, [0.5, 1.0], 3.0, 0.75)
    assert one.tpot == 0.5  # four tokens in three pieces
    slow = outcome(at=0.0, events=[4.0], ended=4.0)
    lost = outcome(events=[2.0], ended=5.0, error="HTTP 429")
    row = summary(2.0, [one, slow, lost], Goals(ttft_ms=1500))
    assert (row["completed"], row["errors"], row["seconds"]) == (2, {"HTTP 429": 1}, 5.0)
    assert row["requests_per_s"] == 0.4 and row["goodput_per_s"] == 0.2
    assert row["attained"] == pytest.approx(1 / 3) and row["late_ms"] == 1000
    assert row["ttft_ms"]["mean"] == 2500 and row["tbt_ms"]["p50"] == 750
    assert row["ttft_ms"]["p99"] == pytest.approx(3970)
    nothing = summary(None, [lost], Goals())
    assert nothing["ttft_ms"] is None and "goodput_per_s" not in nothing


def test_a_rate_is_sustained_with_all_below_it() -> None:
    rows = [{"offered_per_s": x, "attained": y} for x, y in ((4, 0.95), (1, 1), (2, 0.5))]
    assert sustained(rows)["offered_per_s"] == 1
    rows[2]["attained"] = 0.9
    assert sustained(rows)["offered_per_s"] == 4
    assert sustained([{"offered_per_s": 1, "attained": 0.89}]) is None


def test_agreement_of_texts() -> None:
    found = agreement(["abcd", "abcd", "xyz"], ["abcd", "ab", "abc"])
    assert found == {"answers": 3, "equal": 1 / 3, "prefix": 0.5}


def bench(*arguments: object) -> int:
    return main(["bench", "serve", *map(str, arguments)])


def test_a_server_is_measured_and_answers_agree(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    one, two, figure = (tmp_path / name for name in ("one.json", "two.json", "figure.svg"))
    how = ["--rate", "40,inf", "--requests", 5, "--input-tokens", 20, "--output-tokens", 6]
    with serving(small_llm()) as served:
        assert bench(served.url, *how, "--spread", 0.5, "--json", one) == 0
        more = ["--json", two, "--beside", one, "--plot", figure, "--label", "again"]
        bounds = ["--ttft-ms", 60_000, "--normalised-ms", 60_000]
        assert bench(f"{served.url}/v1", *how, "--spread", 0.5, *more, *bounds) == 0
        out = capsys.readouterr().out
        assert "small: 100 % of 10 answers are equal" in out
        assert "sustained: 40 requests/s offered" in out
        assert bench(served.url, *how, "--beside", one, "--endpoint", "chat") == 0
    assert "answers are not compared, spread differs" in capsys.readouterr().out
    found = json.loads(one.read_text())
    assert [row["completed"] for row in found["rows"]] == [5, 5]
    jobs = Traffic(requests=5, input_tokens=20, output_tokens=6, spread=0.5).timed(inf)
    wanted = [(job.prompt, job.output) for job in jobs]
    for rate in ("40", "inf"):
        answers = [x for x in found["answers"] if x["rate"] == rate]
        assert [(x["prompt_tokens"], x["output_tokens"]) for x in answers] == wanted
        assert all(x["at"] <= x["sent"] <= x["first"] <= x["ended"] for x in answers)
    assert found["settings"]["prompts"] == "token ids" and found["settings"]["api_key"] is None
    assert figure.read_text().count("goodput") == 1


def test_a_server_that_fails_is_counted(tmp_path: Path, capsys) -> None:
    path = tmp_path / "found.json"
    how = ["--rate", "inf", "--requests", 3, "--json", path, "--warmup", 0]
    with stub(how="full") as server:
        assert bench(server.url, *how) == 0
        assert 'rate inf: 3 of 3 failed: HTTP 429: {"error"' in capsys.readouterr().out
        server.how = "cut"
        assert bench(server.url, *how) == 0
        assert json.loads(path.read_text())["rows"][0]["completed"] == 0
        server.how = "slow"
        assert bench(server.url, *how, "--seconds", 0.3) == 0
        assert "3 of 3 failed: not done after 0.3 s" in capsys.readouterr().out
        server.how = "well"
        assert bench(server.url, *how, "--plain", "--concurrency", 1) == 0
        assert json.loads(path.read_text())["rows"][0]["completed"] == 3
        assert "ignore_eos" not in server.asked[-1] and isinstance(server.asked[-1]["prompt"], str)


def test_questions_about_a_document_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    how = ["--rate", "2", "--requests", 2, "--input-tokens", 100, "--output-tokens", 2]
    with stub() as server:
        assert bench(server.url, *how, "--questions", 3, "--json", path, "--warmup", 0) == 0
    report = json.loads(path.read_text())
    (row,) = report["rows"]
    assert row["completed"] == 6 and row["offered_per_s"] == 6
    for answers in (report["answers"][:3], report["answers"][3:]):
        assert all(a["ended"] <= b["at"] <= b["sent"] for a, b in pairwise(answers))
    prompts = [tuple(x["prompt"].split()) for x in server.asked]
    assert {len(x) for x in prompts} == {100} and len(set(prompts)) == 6
    documents = [x[:50] for x in prompts]  # half of a short prompt is its question
    assert sorted(map(documents.count, set(documents))) == [3, 3]


def test_results_as_vllm_writes_them(tmp_path: Path) -> None:
    """By hand. Times count from when a request was sent, and end with its last text."""
    one = outcome(sent=1.5, events=[2.0, 2.5, 3.5], ended=4.0, text="a b")
    lost = outcome(sent=2.0, ended=5.0, error="HTTP 429")
    result = vllm_result(
        [one, lost], seconds=4.0, goals=Goals(tpot_ms=600), endpoint="completions",
        label="a/b", model="m", request_rate=2.0, concurrency=8,
    )  # fmt: skip
    assert result["ttfts"] == [0.5, 0.0] and result["latencies"] == [2.0, 0.0]
    assert result["itls"] == [[0.5, 1.0], []] and result["errors"] == ["", "HTTP 429"]
    assert (result["completed"], result["failed"], result["num_prompts"]) == (1, 1, 2)
    assert result["mean_ttft_ms"] == 500 and result["p99_e2el_ms"] == 2000
    assert result["mean_tpot_ms"] == 500 and result["median_itl_ms"] == 750
    assert result["request_throughput"] == result["request_goodput"] == 0.25
    assert result["output_throughput"] == 1 and result["total_token_throughput"] == 3.25
    assert result["max_output_tokens_per_s"] == 1 and result["max_concurrent_requests"] == 1
    assert result["median_client_queue_time_ms"] == 500
    write_vllm_result(tmp_path, "a/b-2qps", result)
    assert [x.name for x in tmp_path.iterdir()] == [f"a-b-2qps-{result['date']}.json"]


def test_what_cannot_be_measured(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,4\n")
    words = refused(capsys, "bench", "serve", "http://127.0.0.1:1", "--trace", trace)
    assert "line 2: expected a time and two numbers" in words
    words = refused(capsys, "bench", "serve", "http://127.0.0.1:1", "--rate", "1")
    assert "http://127.0.0.1:1/v1/models cannot be reached" in words
    with stub() as server:
        words = refused(capsys, "bench", "serve", server.url, "--rate", "1", "--model", "large")
        assert "has models stub; name one of them with --set model" in words
