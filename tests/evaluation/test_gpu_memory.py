"""kvfold capacity: what it says fits is what an engine then holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvfold.evaluation.capacity import GIB, WORK, Capacity

import kvfold
from kvfold import LLM
from kvfold.bench.synthetic_engine import config_of, random_model
from kvfold.cli.main import main
from kvfold.config import CacheConfig
from kvfold.maps.layers import attention_layers
from kvfold.maps.plain import plain_sidecar
from kvfold.maps.sidecar import Sidecar, probes_of
from kvfold.utils.errors import SettingError
from lab.serve_throughput import measure

CACHES = {
    "16 bits": CacheConfig(),
    "4 bits": CacheConfig(bits=4),
    "eviction": CacheConfig(evict="kv-compress", keep_tokens=0.25),
    "kivi": CacheConfig(format="kivi", bits=2),
}


def of(cache: CacheConfig, pool: int = GIB) -> Capacity:
    """A tiny model on a GPU with so many bytes for pages."""
    found = Capacity(config=config_of("tiny"), spec=None, cache=cache, gpu_bytes=1, share=1)
    return replace(found, gpu_bytes=found.weights + WORK + pool)


@pytest.fixture(scope="module")
def tiny():
    return random_model("tiny", None, torch.device("cpu"))


@pytest.mark.parametrize("name", CACHES)
def test_bytes_are_those_of_an_engine(tiny, name: str) -> None:
    found = of(CACHES[name], pool=2**20)
    llm = LLM(tiny, **vars(CACHES[name]) | {"kv_bytes": 2**20}, max_tokens=256)
    layout = llm.runner.pool.layout
    assert layout.page_bytes == found.layout.page_bytes
    assert layout.residual_bytes == found.layout.residual_bytes
    assert found.pool == 2**20
    loaded = sum(x.numel() * x.element_size() for x in tiny.parameters())
    assert loaded <= found.weights <= 1.03 * loaded  # maps that turn numbers are weights, too


@pytest.mark.parametrize("name", ["16 bits", "eviction"])
def test_so_many_requests_run_at_once(tiny, name: str) -> None:
    """As many as are said to fit, and not many more, decode together; nothing is pre-empted."""
    pool, tokens, outputs = 2_000_000, 616, 24
    found = of(CACHES[name], pool).room(tokens + outputs)
    llm = LLM(
        tiny,
        **vars(CACHES[name]) | {"kv_bytes": pool, "keep_tokens": None},
        max_tokens=tokens + outputs,
        max_sequences=200,
    )
    rate = 1 if name == "16 bits" else (tokens + outputs) / found.num_kept
    row = measure(llm, tokens, rate, requests=2 * found.requests, outputs=outputs, seed=0)
    assert 0.8 * found.requests <= row.largest_batch <= 1.3 * found.requests
    assert row.preemptions == 0


@pytest.mark.parametrize("bits", [None, 4])
def test_bytes_with_maps_are_those_of_an_engine(capsys, tmp_path, bits: int | None) -> None:
    """Of layers with maps and of one without any."""
    model = kvfold.load("reference:gqa", device="cpu", dtype=torch.bfloat16)
    _, sidecar = plain_sidecar(model)
    maps = dict(list(sidecar.maps.items())[1:])
    geometry = replace(sidecar.spec.geometry, num_layers=len(maps))
    made = Sidecar(
        maps=maps,
        spec=replace(sidecar.spec, layers=sidecar.spec.layers[1:], geometry=geometry),
        base=probes_of(attention_layers(model)),
        provenance={"model": "reference:gqa", "recipe": {"name": "swift"}},
    )
    made.save(tmp_path / "maps")
    cache = CacheConfig(bits=bits, page=16)
    estimate = Capacity.of_maps(made, config=model.config, cache=cache, gpu_bytes=4 * GIB)
    llm = LLM(model, maps=made, bits=bits, page=16, kv_bytes=2**22, max_tokens=256)
    assert estimate.layout.page_bytes == llm.runner.pool.layout.page_bytes
    original = Capacity(config=model.config, spec=None, cache=CacheConfig(), gpu_bytes=4 * GIB)
    numbers = sum(x.numel() for layer in maps.values() for x in layer.tensors().values())
    assert estimate.weights == original.weights + 2 * numbers
    assert estimate.room(512).step_ms is None and estimate.room(512).requests > 0
    flags = [] if bits is None else ["--bits", str(bits)]
    for call in ([str(tmp_path / "maps")], ["reference:gqa", "--maps", str(tmp_path / "maps")]):
        assert main(["capacity", *call, "--context", "512", *flags]) == 0
        out = capsys.readouterr().out
        rows = [x.split("  ")[0] for x in out.splitlines() if " 512 " in x]
        assert rows[0] == "original" and rows[-1] == "maps" + ", these options" * (bits is not None)
        assert "not predicted with maps" in out


def test_maps_that_leave_out_layers_with_other_heads_are_refused() -> None:
    model = kvfold.load("reference:gqa", device="cpu")
    _, sidecar = plain_sidecar(model)
    made = replace(sidecar, provenance={"left": {"unlike": ["first"]}})
    with pytest.raises(SettingError, match="maps have none for first, whose heads"):
        Capacity.of_maps(made, config=model.config, cache=CacheConfig(), gpu_bytes=GIB)


def test_rooms_shrink_and_grow_as_they_must() -> None:
    whole, few = of(CACHES["16 bits"]), of(CACHES["eviction"])
    assert whole.room(512).requests > whole.room(1024).requests > 0
    assert few.room(1024).num_kept == 256 and few.room(1024).requests > whole.room(1024).requests
    assert few.num_kept(8) == 8  # what a policy protects, at most what there is
    cache = CacheConfig(evict="kvzip-keys", keep_tokens=0.25)
    alike, repaired = of(cache), of(replace(cache, repair=True))
    assert repaired.pool == alike.pool
    assert repaired.room(1024).requests < alike.room(1024).requests
    nothing = of(CACHES["16 bits"], pool=-GIB)
    assert nothing.pool == 0 and nothing.room(512).requests == 0
    assert nothing.room(512).step_ms is None


def test_the_command(tmp_path: Path, capsys) -> None:
    path = tmp_path / "found.json"
    call = ["capacity", "random:llama-3.1-8b", "--gpu", "l4", "--context", "2048,131072"]
    assert main([*call, "--bits", "4", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["weight_bytes"] == pytest.approx(2 * 8.03e9, rel=0.01)
    first, last = found["rows"]
    assert first["requests"] == found["pool_bytes"] // first["request_bytes"] > 40
    assert last["requests"] == 0 and last["step_ms"] is None
    out = capsys.readouterr().out
    assert f"--set kv-bytes={found['pool_bytes']}" in out
    beside = found["beside"]
    assert [*beside] == ["original", "original, --bits 8"]
    few = [rows[0]["requests"] for rows in (*beside.values(), found["rows"])]
    assert few == sorted(few) and few[0] < few[-1] / 3
    lines = [line.split("  ")[0] for line in out.splitlines() if " 2048 " in line]
    assert lines == ["original", "original, --bits 8", "original, these options"]


def test_what_is_asked_about_stands_there_once(capsys) -> None:
    for flags, names in (([], ["original, --bits 8", "original"]), (["--bits", "8"], ["original"])):
        assert main(["capacity", "random:tiny", "--context", "512", *flags]) == 0
        found = [x for x in capsys.readouterr().out.splitlines() if x.startswith("original")]
        assert [x.split("  ")[0] for x in found][: len(names)] == names
        assert len(found) == 2
