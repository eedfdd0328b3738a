"""The benchmark of composites through the server: what each method stores, and what is written of
it."""

import json
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp", reason='needs pip install "kvfold[load]"')

import results_tables
import serving_composites as script
from kvfold.attention.backend import Task
from kvfold.attention.base import LayerShape
from kvfold.attention.selector import HYBRID, select
from kvfold.attention.selector import PLAIN as PLAIN_BACKENDS
from kvfold.bench.server_process import ServerProcess
from kvfold.bench.synthetic_engine import config_of, random_folded
from kvfold.bench.variants import SHAPES
from kvfold.cache.eviction import policies
from kvfold.cache.eviction.policy import Policy
from kvfold.cli.methods import PUBLISHED
from kvfold.config import CacheConfig
from kvfold.engine.api.llm import LLM
from kvfold.engine.requests.params import SamplingParams
from kvfold.engine.runner.build import layout_of
from kvfold.layout.pages import CacheLayout
from lab.composites import METHODS, PLAIN, TWO_WIDTHS, method_of, spec_of, word_tokenizer

RESULTS = Path(script.__file__).parent / "results"
QUALITY = {x["name"]: x for x in json.loads((RESULTS / "papers-gqa.json").read_text())["rows"]}
STUB = Path(__file__).parents[1] / "helpers" / "engine_stub.py"
SMALL = ["--shape", "tiny", "--device", "cpu", "--requests", "3", "--input", "60", "--output", "6"]


def llm_of(name: str) -> LLM:
    """An engine with a method's cache."""
    model = random_folded("tiny", spec_of(name, "tiny"), torch.device("cpu"))
    stored = method_of(name)[1].config() or CacheConfig()
    settings = asdict(stored) | {"kv_bytes": 2**20}
    tokenizer = word_tokenizer(model.config.vocab_size)
    return LLM(model, owned=True, tokenizer=tokenizer, max_tokens=256, max_sequences=2, **settings)


# Shares of a token's bytes that methods without bits leave.
SHARES = {
    PLAIN: 1.0, "zack .5": 0.5, "zdc .5": 0.5, "H2O": 1.0, "H2O-ZDC": 0.5, "Keyformer": 1.0,
    "Keyformer-Z": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_served_from_its_own_pages(name: str) -> None:
    llm = llm_of(name)
    prompts = [[i % 200 + 3 for i in range(j, j + 150)] for j in (0, 9)]
    answers = llm.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert [len(x.token_ids) for x in answers] == [12, 12]
    assert all(len(x.text.split()) == 12 for x in answers), "every token is a word of the text"
    layout, full = llm.runner.pool.layout, 16 * SHAPES["tiny"].full_numbers
    share = layout.bits_per_token / full
    if name in SHARES:
        assert share == SHARES[name]
    else:
        assert share < (1 if name == TWO_WIDTHS else 0.65)  # scales weigh much in heads of 16
    kept, compressions = method_of(name)[1].keep_tokens, llm.engine.scheduler.compressions
    assert compressions.num_done > 0 if kept or name == TWO_WIDTHS else not compressions.num_done
    if kept:
        assert compressions.num_evicted == pytest.approx(2 * 150 * (1 - kept), abs=32)


@cache
def layout_and_policy(name: str) -> tuple[CacheLayout, Policy | None]:
    """Of Llama-3.1-8B's shape on a GPU."""
    config, spec = config_of("llama-3.1-8b"), spec_of(name, "llama-3.1-8b")
    stored = method_of(name)[1].config() or CacheConfig()
    policy = policies.get(stored.evict) if stored.evict else None
    return layout_of(config, spec, stored, policy, 2, "cuda"), policy


def share_of(name: str) -> float:
    """The share of an uncompressed token's bytes that one takes."""
    return layout_and_policy(name)[0].bits_per_token / 16 / SHAPES["llama-3.1-8b"].full_numbers


def test_a_token_is_as_small_as_where_quality_was_measured() -> None:
    """Heads of reference:gqa are as wide as Llama's. Without residuals and eviction, whose share
    depends on the length."""
    for name in ("int4", "KVQuant 4 bits", "KVQuant-Z 4 bits"):
        assert share_of(name) == pytest.approx(QUALITY[name]["kept_fraction"], rel=0.01)


def test_composites_store_what_both_of_their_methods_leave() -> None:
    assert share_of("KVQuant-Z 4 bits") < min(map(share_of, ("KVQuant 4 bits", "zack .5")))
    assert share_of("GEAR-ZDC 2 bits") < share_of("GEAR-ZDC 4 bits")
    assert share_of("GEAR-ZDC 4 bits") < min(map(share_of, ("GEAR 4 bits", "zdc .5")))


def test_layouts_are_those_of_the_recipes() -> None:
    zack, zdc, kvquant, wide = (
        spec_of(x, "llama-3.1-8b") for x in ("zack .5", "zdc .5", "KVQuant 4 bits", TWO_WIDTHS)
    )
    assert {x.rank for x in zdc.layers[0].latents} == {64} and zdc.kept_fraction == 0.5
    assert {x.rank for x in zack.layers[0].latents} == {48, 64, 80} and zack.kept_fraction == 0.5
    assert kvquant.layers[0].keys == "pre_rope" and kvquant.kept_fraction == 1
    assert [len(x) for x in kvquant.layers[0].latents[0].codebooks] == [16, 8, 4]
    assert wide.hybrid.important[0] == 0.2 and wide.hybrid.ranks[0] == (64,) * 16


def test_the_quality_of_every_method_is_stored() -> None:
    """Settings are those of the tables of quality, whose rows have their names."""
    assert {x for x in METHODS if x in PUBLISHED} <= QUALITY.keys()


@pytest.fixture
def unmeasured(monkeypatch) -> None:
    """The table has no file of times."""
    monkeypatch.setattr(results_tables, "COMPOSITES", "none")


@pytest.mark.parametrize("name", METHODS)
def test_the_table_says_what_decodes_on_a_gpu(name: str, unmeasured) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    layout, policy = layout_and_policy(name)
    task = Task(
        decode=True,
        observed=policy is not None,
        device_type="cuda",
        dtype=torch.bfloat16,
        needs_weights=policy is not None and policy.scorer.needs_weights,
    )
    layer, geometry = layout.spec.layers[0], layout.spec.geometry
    shape = LayerShape(index=0, spec=layer, geometry=geometry, window=None, fixed_rope=True)
    groups = layout.groups_of_layer(0)
    if layout.coarse:
        groups += layout.coarse.groups_of_layer(0)
    chosen = select(shape, groups, task, HYBRID if layout.coarse else None).backend
    (line,) = (x for x in results_tables.composites().splitlines() if f"| {labelled(name)}" in x)
    assert ("| plain PyTorch |" in line) == (chosen in PLAIN_BACKENDS), chosen
    assert name.startswith(script.IN_PYTORCH) == (chosen in PLAIN_BACKENDS), chosen


def labelled(name: str) -> str:
    halves = {f"{x} .5": f"{x.upper()}, half of the dimensions" for x in ("zack", "zdc")}
    return f"{halves.get(name, name)} |"


def test_times_stand_in_the_table_once_they_are_measured(monkeypatch, unmeasured) -> None:
    assert "| not measured | not measured |" in results_tables.composites()
    times = {"ttft_ms": {"mean": 1234.5}, "tbt_ms": {"mean": 12.34}, "jct_ms": {"mean": 2345.6}}
    row = times | {"method": "H2O-ZDC", "load": "together", "completed": 12, "requests": 12}
    late = {**row, "load": "alone", "tbt_ms": None, "completed": 2, "requests": 3}
    known = {results_tables.COMPOSITES: {"rows": [row, late]}}
    monkeypatch.setattr(results_tables.CLAIMS, "_results", results_tables.CLAIMS._results | known)
    (line,) = (x for x in results_tables.composites().splitlines() if "| H2O-ZDC |" in x)
    assert line.endswith("| 1,234, 12.3, 2,346 | 1,234, –, 2,346 (2 of 3 done) |")


# -- a stub in the servers' place ------------------------------------------------------------------


@pytest.fixture
def stubs(monkeypatch) -> list[str]:
    """Stubs take the servers' place. The names of those that were started."""
    started: list[str] = []

    def start(self: Any, name: str, port: int) -> ServerProcess:
        started.append(name)
        how = "refuses" if name == "int4" else "well"
        words = [sys.executable, str(STUB), how, str(port)]
        return ServerProcess(words, f"http://127.0.0.1:{port}", {})

    monkeypatch.setattr(script.Script, "start", start)
    return started


def test_rows_are_written_and_kept(stubs: list[str], tmp_path: Path, capsys) -> None:
    path = tmp_path / "times.json"
    call = [*SMALL, "--json", str(path), "--together", "2"]
    script.main([*call, "--methods", "int4", "H2O-ZDC"])
    report = json.loads(path.read_text())
    assert [(x["method"], x["load"]) for x in report["rows"]] == [
        ("H2O-ZDC", "together"),
        ("H2O-ZDC", "alone"),
    ]
    together, alone = report["rows"]
    assert together["completed"] == alone["completed"] == 3
    assert together["settings"] == "zdc .5 --evict h2o --keep-tokens .5 --page 16"
    for row in report["rows"]:
        assert 0 < row["ttft_ms"]["mean"] <= row["jct_ms"]["mean"] and row["tbt_ms"]["mean"] >= 0
    (failed,) = report["failed"]
    assert failed == {"method": "int4", "why": "--bits must be one of 16, 8"}
    assert report["settings"]["kv_bytes"] == 1_700_000_000 and report["versions"]["torch"]
    assert "H2O-ZDC together ttft_ms" in capsys.readouterr().out

    script.main([*call, "--methods", "H2O-ZDC", "zdc .5"])
    again = json.loads(path.read_text())
    assert stubs == ["int4", "H2O-ZDC", "zdc .5"], "what is there is not measured again"
    assert again["rows"][:2] == report["rows"] and len(again["rows"]) == 4
    with pytest.raises(SystemExit, match="has rows of output 6, and this is 7"):
        script.main([*call, "--output", "7"])


def test_what_time_does_not_suffice_for_is_told(stubs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    words = [*SMALL, "--json", str(path), "--seconds", "0", "--methods", PLAIN, "H2O"]
    script.main([*words, "--together", "2"])
    report = json.loads(path.read_text())
    assert not stubs and not report["rows"]
    assert report["failed"] == [{"method": "uncompressed, H2O", "why": "no time was left"}]


def test_the_state_of_a_server_is_read() -> None:
    text = (
        "# HELP kvfold:pool_bytes Bytes\n"
        'kvfold:pool_bytes{model_name="m",state="total"} 9.0\n'
        'kvfold:pool_bytes{model_name="m",state="used"} 4.0\n'
        'vllm:num_requests_running{model_name="m"} 2.0\n'
    )
    assert dict(script.states(text)) == {"pool_bytes": 4.0, "num_requests_running": 2.0}


# -- the command as it is --------------------------------------------------------------------------


@pytest.mark.slow  # servers that start
def test_servers_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    more = ["--kv-bytes", "40000", "--methods", PLAIN, "H2O-ZDC", "--together", "2"]
    script.main([*SMALL, *more, "--json", str(path)])
    report = json.loads(path.read_text())
    assert not report["failed"] and len(report["rows"]) == 4
    rows = {(x["method"], x["load"]): x for x in report["rows"]}
    assert all(x["completed"] == 3 for x in rows.values())
    plain, composite = (rows[x, "alone"]["server"] for x in (PLAIN, "H2O-ZDC"))
    assert plain["bits"] == "256 B (1.00x smaller)" and "tokens kept" not in plain
    assert composite["bits"] == "128 B (2.00x smaller)"
    assert composite["tokens kept"].startswith("0.50 of a request")
    assert "pool_bytes" in rows["H2O-ZDC", "together"]["peaks"]  # sampled, so 0 in a fast run
