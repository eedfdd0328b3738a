"""kvfold advise: what it says fits is what an engine then holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold import LLM, recipes
from kvfold.bench.synthetic_engine import config_of, random_model
from kvfold.bench.variants import SHAPES
from kvfold.cli.main import main
from kvfold.compression.planning.target import Target
from kvfold.compression.planning.typical import typical_spec
from kvfold.config import CacheConfig
from kvfold.engine.core.pace import PrefillPace
from kvfold.evaluation.gpu_memory import GIB, WORK, GPUMemory, gpu_bytes
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


def of(cache: CacheConfig, pool: int = GIB) -> GPUMemory:
    """A tiny model on a GPU with so many bytes for pages."""
    found = GPUMemory(config=config_of("tiny"), spec=None, cache=cache, gpu_bytes=1, share=1)
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
    llm.engine.scheduler.pace = PrefillPace(None)  # as on a GPU: steps read prompts by no clock
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
    estimate = GPUMemory.of_maps(made, config=model.config, cache=cache, gpu_bytes=4 * GIB)
    llm = LLM(model, maps=made, bits=bits, page=16, kv_bytes=2**22, max_tokens=256)
    assert estimate.layout.page_bytes == llm.runner.pool.layout.page_bytes
    original = GPUMemory(config=model.config, spec=None, cache=CacheConfig(), gpu_bytes=4 * GIB)
    numbers = sum(x.numel() for layer in maps.values() for x in layer.tensors().values())
    assert estimate.weights == original.weights + 2 * numbers
    assert estimate.room(512).step_ms and estimate.room(512).requests > 0
    assert estimate.room(512, timed=False).step_ms is None
    flags = [] if bits is None else ["--bits", str(bits)]
    for call in ([str(tmp_path / "maps")], ["reference:gqa", "--maps", str(tmp_path / "maps")]):
        assert main(["advise", *call, "--context", "512", *flags]) == 0
        out = capsys.readouterr().out
        rows = [x.split("  ")[0] for x in out.splitlines() if "x  " in x]
        assert rows == ["original", "--bits 8", "maps" + ", options" * (bits is not None)]
        assert (
            f"kvfold serve {call[0]} " in out.replace(" \\\n     ", "")
            and f'"maps": "{tmp_path}/maps"' in out
        )


def test_maps_that_leave_out_layers_with_other_heads_are_refused() -> None:
    model = kvfold.load("reference:gqa", device="cpu")
    _, sidecar = plain_sidecar(model)
    made = replace(sidecar, provenance={"left": {"unlike": ["first"]}})
    with pytest.raises(SettingError, match="maps have none for first, whose heads"):
        GPUMemory.of_maps(made, config=model.config, cache=CacheConfig(), gpu_bytes=GIB)


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


def test_a_plan_takes_the_bytes_of_its_factor() -> None:
    geometry, config = SHAPES["llama-3.1-8b"], config_of("llama-3.1-8b")
    for name, factor in (("swift", 4), ("small", 6)):
        spec = typical_spec(recipes.get(name), geometry, Target(factor=factor))
        found = GPUMemory.of_plan(spec, config=config, cache=CacheConfig(), gpu_bytes=GIB)
        full = 2 * geometry.full_numbers * found.layout.page
        assert found.layout.page_bytes == pytest.approx(full / factor, rel=0.01)


def test_sizes_of_gpus() -> None:
    assert gpu_bytes("24GB") == 24 * 10**9 and gpu_bytes("1.5 gib") == 1.5 * GIB
    assert gpu_bytes("T4") == 15 * GIB
    for text in ("24", "0GB", "GB", "1e9GB", "24TB", ""):
        with pytest.raises(SettingError, match="or a size such as 24GB"):
            gpu_bytes(text)


def test_a_named_setting(tmp_path: Path, capsys) -> None:
    path = tmp_path / "found.json"
    call = ["advise", "random:llama-3.1-8b", "--gpu", "l4", "--context", "2048"]
    assert main([*call, "--bits", "4", "--sequences", "40", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    names = ["original", "--bits 8", "--bits 4"]
    assert [x["setting"] for x in found["rows"]] == names and found["advice"] == names[-1]
    few = [x["requests"] for x in found["rows"]]
    assert few == sorted(few) and few[0] < few[-1] / 3
    last = found["rows"][-1]
    assert last["weight_bytes"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert last["requests"] == last["pool_bytes"] // last["request_bytes"] > 40
    assert last["step_ms"] is None  # an L4's steps were not timed
    out = capsys.readouterr().out
    assert (
        f"--max-sequences 40 --max-tokens 2048 \\\n      --set kv-bytes={last['pool_bytes']}" in out
    )
    assert "Times of steps are not predicted for this GPU" in out
    assert "* " not in out  # nothing was chosen
