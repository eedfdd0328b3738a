"""vLLM on a CPU whose blocks move to files and to another part of memory, and come back: equal
tokens, whatever happens to the files.

Its own environment (`make test-vllm`). Tiny random models; each engine in a process of its own.
`test_vllm_disk` tests the parts without vLLM.
"""

import errno
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import kvfold
from forks import forked
from vllm_maps_cases import loaded, sidecar
from vllm_tiers_cases import OPTIONS, Asked, ask, copy_on_cpu, disk, transfer
from vllm_types import build

pytestmark = pytest.mark.vllm


def prompts() -> list[list[int]]:
    make = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, (n,), generator=make).tolist() for n in (105, 70)]


WHOLE = [96, 64]  # tokens in whole blocks of 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build("llama", tmp_path_factory.mktemp("tiers") / "model")


def served(model: str, settings: dict | None = None, again: bool = False, **more) -> Asked:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = OPTIONS | more
    if settings:
        options["additional_config"] = {"kvfold": settings}
    if options.get("tensor_parallel_size", 1) > 1:
        return ask(model, prompts(), options)
    import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork

    return forked(ask, model, prompts(), options, again)


def stored(path: Path) -> list[Path]:
    return sorted(x for x in path.rglob("*") if x.is_file())


def test_a_cache_in_few_bits_outlives_its_engine(model: str, tmp_path: Path) -> None:
    """A server with other bits, or another salt, does not see it."""
    plain = served(model, {"bits": 8})
    first = served(model, {"bits": 8}, **disk(tmp_path))
    assert first.tokens == plain.tokens and first.cached == [0, 0]
    assert len(stored(tmp_path)) == 3 + 2, "answers are stored too, once they fill a block"
    again = served(model, {"bits": 8}, **disk(tmp_path))
    assert again.tokens == plain.tokens and again.cached == WHOLE
    assert again.moved["loaded_bytes"] == sum(WHOLE) // 32 * (
        stored(tmp_path)[0].stat().st_size - 16
    )
    other = served(model, {"bits": 4}, **disk(tmp_path))
    assert other.cached == [0, 0] and other.tokens == served(model, {"bits": 4}).tokens
    assert len(list(tmp_path.iterdir())) == 2


def test_maps_and_weights_keep_blocks_apart(model: str, tmp_path: Path) -> None:
    """Blocks of other maps have the same sizes, tokens and model name."""
    loaded_model = loaded(model)
    maps = []
    for seed in range(2):
        torch.manual_seed(seed)
        maps.append(sidecar(loaded_model, tmp_path / f"maps{seed}", half=True))
    one, two = ({"maps": x} for x in maps)
    kept = disk(tmp_path / "kv")
    first, wanted = served(model, one, **kept), served(model, two)
    assert first.tokens != wanted.tokens
    other = served(model, two, **kept)
    assert other.tokens == wanted.tokens and other.cached == [0, 0]
    back = served(model, one, **kept)
    assert back.tokens == first.tokens and back.cached == WHOLE


def test_weights_keep_blocks_apart(model: str, tmp_path: Path) -> None:
    """The changed weight changes no key or value of the layer that it is in."""
    kept = disk(tmp_path / "kv")
    for _ in range(2):
        answers = served(model, **kept)
    assert answers.cached == WHOLE
    changed = loaded(model)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    changed.save_pretrained(path := tmp_path / "model")
    assert served(str(path), **kept).cached == [0, 0]


def test_vllms_own_cache_and_a_folded_checkpoint(model: str, tmp_path: Path) -> None:
    for _ in range(2):
        plain = served(model, **disk(tmp_path / "plain"))
    assert plain.cached == WHOLE and plain.tokens == served(model).tokens
    folded = tmp_path / "folded"
    forked(compressed, {"keep": 0.5, "output": folded, "max_tokens": 4096, "check": False})
    more = {"block_size": 64, "max_model_len": 512}
    for _ in range(2):
        answers = served(str(folded), **disk(tmp_path / "kv"), **more)
    assert answers.cached == [64, 64] and answers.tokens == served(str(folded), **more).tokens


def compressed(options: dict) -> None:
    kvfold.compress("reference:gqa", "swift", fold=True, **options)


def test_layers_with_windows(tmp_path: Path) -> None:
    path = build("gemma2", tmp_path / "model")
    for _ in range(2):
        answers = served(path, {"bits": 8}, **disk(tmp_path / "kv"))
    assert answers.cached == WHOLE and answers.tokens == served(path, {"bits": 8}).tokens


def test_two_processes_store_a_part_each(model: str, tmp_path: Path) -> None:
    first = served(model, {"bits": 8}, **disk(tmp_path), tensor_parallel_size=2)
    assert {x.suffix for x in stored(tmp_path)} == {".0", ".1"}
    again = served(model, {"bits": 8}, **disk(tmp_path), tensor_parallel_size=2)
    assert again.tokens == first.tokens and again.cached == WHOLE
    assert served(model, {"bits": 8}, **disk(tmp_path)).cached == [0, 0], "of one process"


@pytest.mark.parametrize("fault", ["truncated", "changed"])
def test_damaged_blocks_are_computed_again(fault: str, model: str, tmp_path: Path) -> None:
    first = served(model, {"bits": 8}, **disk(tmp_path))
    for path in stored(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data[:-9] if fault == "truncated" else data)
    again = served(model, {"bits": 8}, **disk(tmp_path))
    assert again.tokens == first.tokens
    assert any("damaged and computed again" in message for message in again.log)
    assert served(model, {"bits": 8}, **disk(tmp_path)).cached == WHOLE, "stored again"


def test_a_full_disk_leaves_answers_as_they_are(model: str, tmp_path: Path) -> None:
    wanted = served(model, {"bits": 8})
    answers = forked(on_a_full_disk, model, prompts(), tmp_path)
    assert answers.tokens == wanted.tokens and not stored(tmp_path)
    assert sum("cannot store blocks" in message for message in answers.log) == 1


def on_a_full_disk(model: str, prompts: list, path: Path) -> Asked:
    from kvfold.vllm_plugin import block_files

    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    block_files._write_all = write
    options = OPTIONS | disk(path) | {"additional_config": {"kvfold": {"bits": 8}}}
    return ask(model, prompts, options)


def test_a_producer_stores_and_a_consumer_restores(model: str, tmp_path: Path) -> None:
    consumer = served(model, {"bits": 8}, **disk(tmp_path, "kv_consumer"))
    assert not stored(tmp_path)
    for _ in range(2):
        producer = served(model, {"bits": 8}, **disk(tmp_path, "kv_producer"))
        assert producer.cached == [0, 0]
    restored = served(model, {"bits": 8}, **disk(tmp_path, "kv_consumer"))
    assert restored.cached == WHOLE and restored.tokens == consumer.tokens == producer.tokens


@pytest.mark.parametrize("settings", [{"bits": 8}, {"maps": True}, None])
def test_cpu_memory_as_a_tier(settings: dict | None, model: str, tmp_path: Path) -> None:
    """vLLM's OffloadingConnector, with copies by PyTorch."""
    if settings == {"maps": True}:
        settings = {"maps": sidecar(loaded(model), tmp_path / "maps", half=True)}
    plain = served(model, settings)
    options = OPTIONS | transfer("OffloadingConnector", cpu_bytes_to_use=1 << 28)
    if settings:
        options["additional_config"] = {"kvfold": settings}
    answers = forked(offloaded, model, prompts(), options)
    assert answers.tokens == plain.tokens * 2
    assert answers.cached == [0, 0, *WHOLE]


def offloaded(model: str, prompts: list, options: dict) -> Asked:
    copy_on_cpu()
    return ask(model, prompts, options, again=True)


def test_connectors_that_restore_blocks_of_other_caches_are_refused(
    model: str, tmp_path: Path
) -> None:
    unsafe = transfer("ExampleConnector", shared_storage_path=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"ExampleConnector: .*Safe connectors: KVFoldDisk"):
        served(model, {"bits": 8}, **unsafe)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "path in kv_connector_extra_config must be a folder for blocks; got None"),
        ({"path": "/proc/kvfold"}, "cannot create path /proc/kvfold"),
        ({"path": "x", "paht": 1}, "has no paht. Legal: path, queue_gib"),
        ({"path": "x", "queue_gib": -1}, "must be a positive number of GiB; got -1"),
    ],
)
def test_settings_that_are_refused(
    extra: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfold.vllm_plugin.disk_connector import DiskSettings

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        DiskSettings.parse(extra)


def test_a_model_with_recurrent_states_is_refused(tmp_path: Path) -> None:
    path = build("falcon_h1", tmp_path / "model")
    with pytest.raises(RuntimeError, match="recurrent states beside attention"):
        served(path, {"bits": 8}, **disk(tmp_path / "kv"))


SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def tiers(*arguments: str, script: str = "vllm_tiers.py") -> subprocess.CompletedProcess:
    known = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    known = os.environ | known | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env=known, capture_output=True, text=True)


def test_the_benchmark_needs_a_gpu() -> None:
    done = tiers("bits-4")
    assert done.returncode == 1 and "needs a GPU; without one, try it with" in done.stderr


def test_the_benchmark_with_a_tiny_model(tmp_path: Path) -> None:
    report = tmp_path / "tiers.json"
    arguments = ["--shape", "tiny", "--tokens", "500", "--prompts", "1", "--json", str(report)]
    folders = ["--folder", str(tmp_path), "--shared", str(tmp_path)]
    nixl = ["nixl"] if find_spec("nixl") else []
    done = tiers("bits-4", "--tiers", ",".join(["disk", "pair", *nixl]), *arguments, *folders)
    assert done.returncode == 0, done.stderr
    measured = json.loads(report.read_text())["tiers"]
    rows = {x["from"]: x for x in measured["disk"]["rows"]}
    assert set(rows) == {"computed", "gpu", "disk", "page cache"}
    assert rows["computed"]["cached_tokens"] == [0]
    for name in ("gpu", "disk", "page cache"):
        assert rows[name]["cached_tokens"] == [384] and rows[name]["equal"] == [True]
    assert measured["disk"]["bytes"] == 384 * measured["disk"]["token_bytes"]
    for row in measured["pair"]["rows"]:
        assert row["equal"] and row["loaded_bytes"] == 384 * measured["pair"]["token_bytes"]
    for row in measured["nixl"]["rows"] if nixl else ():
        assert row["equal"] and row["cached_tokens"] == 500 and row["restored_ms"] > 0
    assert [x.name for x in tmp_path.iterdir()] == ["tiers.json"], "its files are gone"


@pytest.mark.parametrize("connector", ["disk", "nixl"])
def test_the_load_of_a_pair_with_a_tiny_model(connector: str, tmp_path: Path) -> None:
    """Every request is answered, and the node that decodes computes nothing that it can fetch."""
    expected = {"pair": 384, "apart": 0}
    report = tmp_path / "load.json"
    arguments = ["--shape", "tiny", "--tokens", "500", "--output", "8", "--slots", "8"]
    arguments += ["--rates", "2", "--seconds", "5", "--memory", ".4", "--connector", connector]
    if connector == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed: make test-vllm")
        arguments += ["--arrangements", "pair"]
        expected = {"pair": 500}
    bounds = ["--first", "60", "--token", "60000", "--shared", str(tmp_path)]
    done = tiers("bits-4", *arguments, *bounds, "--json", str(report), script="vllm_pair_load.py")
    assert done.returncode == 0, done.stderr
    rows = {x["arrangement"]: x for x in json.loads(report.read_text())["rows"]}
    for row in rows.values():
        assert row["in_time"] == row["answered"] == row["requests"] > 1
        assert row["goodput"] == row["requests"] / 5
    assert {name: x["cached_tokens"] for name, x in rows.items()} == expected
    assert [x.name for x in tmp_path.iterdir()] == ["load.json"], "its files are gone"
