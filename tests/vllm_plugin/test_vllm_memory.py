"""What vLLM measures of a model's memory holds what attention needs beside the cache: on a CPU,
where vLLM measures nothing by itself, made to call the model as it does on a GPU."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from forks import forked
from vllm_maps_cases import alone, loaded, sidecar
from vllm_types import build

pytestmark = pytest.mark.vllm
OPTIONS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "block_size": 32, "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64, "async_scheduling": False,
}  # fmt: skip


class Attended(NamedTuple):
    """One layer's attention in a step: tokens, requests that decode, lengths of all requests as the
    host knows them, and bytes of blocks."""

    layer: int
    tokens: int
    decodes: int
    most: list[int]
    block_bytes: int


def measured(model: str, settings: dict, **more) -> tuple[list[Attended], bool]:
    """What attends while memory is measured, and whether something is held afterwards."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork

    options = OPTIONS | {"additional_config": {"kvfold": settings}} | more
    return forked(watched, model, options)


def watched(model: str, options: dict) -> tuple[list[Attended], bool]:
    from vllm.v1.worker.cpu_worker import CPUWorker

    seen: list[Attended] = []
    held: list[bool] = []
    measure = CPUWorker.determine_available_memory

    def determine(worker) -> int:
        from kvfold.vllm_plugin import profiling
        from kvfold.vllm_plugin.backend import cached_impls
        from kvfold.vllm_plugin.blocks import BlockContext

        attend, limits = BlockContext._attend, worker.vllm_config.scheduler_config

        def recorded(context, layer, location, q, rows, out) -> None:
            step = context.step
            assert not q.isnan().any() and len(out) == len(step.slots)
            said = len(step.slots), step.num_decodes, list(step.max_lengths)
            seen.append(Attended(layer.index, *said, location.arena.numel()))
            attend(context, layer, location, q, rows, out)

        profiling.MEASURED, BlockContext._attend = ("cpu",), recorded
        worker.model_runner._dummy_run(limits.max_num_batched_tokens, is_profile=True)
        (profile,) = {impl.profile for impl in cached_impls(worker.vllm_config)}
        count = len(seen)
        worker.model_runner._dummy_run(limits.max_num_batched_tokens, is_profile=True)
        assert len(seen) == count, "once is enough"
        held.append(bool(profile.held_metadata or profile.pending))
        BlockContext._attend = attend
        return measure(worker)

    CPUWorker.determine_available_memory = determine
    assert alone(model, None, options).tokens
    return seen, held[0]


def test_one_layer_of_each_size_attends(tmp_path: Path) -> None:
    """A prompt's chunk of all tokens, then fewer beside requests that decode, then chunks of as
    many prompts as a recorded step has; all as long as requests can be. On two blocks, whatever the
    length."""
    path = build("llama", tmp_path / "model")
    maps = sidecar(loaded(path), tmp_path / "maps", half=True)  # of 32, 24, 40 and 32 numbers
    seen, held = measured(path, {"maps": maps})
    assert not held
    sizes = [2 * 2 * 2 * rank * 32 * 4 for rank in (16, 12, 20)]  # two heads, two sides
    assert [(x.layer, x.block_bytes) for x in seen[::3]] == [*enumerate(sizes)]
    for alone_, beside, several in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
        assert alone_.layer == beside.layer == several.layer
        assert alone_[1:4] == (64, 0, [256])
        assert beside[1:4] == (64, 4, [256] * 5)
        assert several[1:4] == (64, 4, [256] * 8)


def test_windows_and_readers_and_states(tmp_path: Path) -> None:
    """Layers with and without windows have metadata of their own; who reads another's keys and
    values needs no more than that layer."""
    for name, layers in (("gemma2", [0, 1]), ("falcon_h1", [0])):
        seen, held = measured(build(name, tmp_path / name), {"bits": 8})
        assert [x.layer for x in seen[::3]] == layers and not held
    path = build("gemma3n_text", tmp_path / "shared")
    seen, held = measured(path, {"maps": sidecar(loaded(path), tmp_path / "maps", half=True)})
    assert [x.layer for x in seen[::3]] == [0, 1] and not held


def test_more_tokens_in_a_step_than_a_request_can_have(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    seen, _ = measured(path, {"bits": 8}, max_model_len=128, max_num_batched_tokens=320)
    assert [x[:3] for x in seen] == [(0, 320, 0), (0, 320, 4), (0, 320, 4)]
    assert [x.most for x in seen] == [[128] * 3, [128] * 7, [128] * 8]


def test_a_folded_checkpoint(tmp_path: Path) -> None:
    command = {"keep": 0.5, "output": tmp_path / "model", "max_tokens": 4096, "check": False}
    forked(compressed, command)
    seen, held = measured(str(tmp_path / "model"), {}, max_model_len=512)
    assert not held
    assert [x[1:4] for x in seen[:2]] == [(64, 0, [512]), (64, 4, [512] * 5)]
    assert len({x.block_bytes for x in seen}) == len(seen) // 3


def compressed(options: dict) -> None:
    import kvfold

    kvfold.compress("reference:gqa", "swift", fold=True, **options)
