"""Exact windows (`window`) in vLLM, on a CPU: the tokens of an attention that computes all scores
both ways, and masks them.

Its own environment (`make test-vllm`). Tiny random models; each engine in a process of its own.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from forks import forked
from kvfold.maps.sidecar import Sidecar
from vllm_maps_cases import (
    Answers,
    alone,
    generated,
    loaded,
    prompts,
    sidecar,
    sidecar_before_rope,
)
from vllm_types import build
from windowed import Window, windowed

pytestmark = pytest.mark.vllm
TIE = 1e-3  # of logits
WINDOW = 24
OPTIONS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "block_size": 32, "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64, "enable_prefix_caching": True,
}  # fmt: skip


def served(model: str, settings: dict | None, call: Any = alone, **more: Any) -> Any:
    """vLLM's answers, greedy, prompts in chunks of at most 64 tokens."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = OPTIONS | more
    if settings is not None:
        options["additional_config"] = {"kvfold": settings}
    if options.get("tensor_parallel_size", 1) > 1:
        return generated(model, None, options)
    import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork

    return forked(call, model, None, options)


def check_tokens(
    model: Any,
    maps: str,
    window: int,
    answers: list[list[int]],
    asked: list[list[int]],
) -> None:
    """Each answer is the greedy one of a model whose attention is masked, up to a tie."""
    compared = 0
    with windowed(model, Sidecar.load(maps), None, Window(kind="whole", tokens=window)) as read:
        for ids, answer in zip(asked, answers, strict=True):
            best = read([*ids, *answer])[len(ids) - 1 : -1].topk(2)
            for place, token in enumerate(answer):
                if best.values[place, 0] - best.values[place, 1] < TIE:
                    break
                assert token == int(best.indices[place, 0]), (len(ids), place, answer)
                compared += 1
    assert compared > sum(map(len, answers)) // 2, "ties hide the rest"


@pytest.mark.parametrize(
    ("name", "window", "joint"),
    [("llama", 1, False), ("qwen2", WINDOW, False), ("qwen3_moe", WINDOW, True)],
)
def test_each_query_sees_its_window_exactly(
    name: str, window: int, joint: bool, tmp_path: Path
) -> None:
    """In chunks, after a cached prefix, and beside requests that decode."""
    path = build(name, tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "half", half=True, joint=joint)
    found = served(path, {"maps": maps, "window": window})
    assert found.cached == [0, 0, 96], "prefixes are found as without a window"
    assert "MappedImpl" in found.attention
    check_tokens(model, maps, window, found.tokens, prompts())
    assert found.tokens != served(path, {"maps": maps}).tokens


def test_a_window_of_all_tokens_is_the_original(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    stock = served(path, None)
    found = served(path, {"bits": 4, "window": 200}, enforce_eager=False)
    assert found.tokens == stock.tokens
    assert served(path, {"bits": 4}).tokens != stock.tokens


@pytest.mark.parametrize("joint", [False, True])
def test_keys_before_rope(joint: bool, tmp_path: Path) -> None:
    """Entries have other keys than the window."""
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    maps = sidecar_before_rope(model, tmp_path / "maps", joint)
    found = served(path, {"maps": maps, "window": WINDOW})
    check_tokens(model, maps, WINDOW, found.tokens, prompts())


def test_attention_sinks(tmp_path: Path) -> None:
    """They count once, beside exact tokens and entries."""
    path = build("gpt_oss", tmp_path / "model")
    file = Path(path, "config.json")
    config = json.loads(file.read_text())
    whole = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    file.write_text(json.dumps(config | whole))
    model = loaded(path)
    model.config.sliding_window = 512  # transformers makes a mask of it, for no layer
    maps = sidecar(model, tmp_path / "maps", half=True)
    found = served(path, {"maps": maps, "window": WINDOW})
    check_tokens(model, maps, WINDOW, found.tokens, prompts())


@pytest.mark.parametrize("joint", [False, True])
def test_two_processes(joint: bool, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "maps", half=True, joint=joint)
    found = served(path, {"maps": maps, "window": WINDOW}, tensor_parallel_size=2)
    check_tokens(model, maps, WINDOW, found.tokens, prompts())


def many_prompts() -> list[list[int]]:
    make = torch.Generator().manual_seed(2)
    lengths = (40, 90, 3, 65, 33, 70)
    return [torch.randint(3, 250, (n,), generator=make).tolist() for n in lengths]


def crowded(model: str, _: None, options: dict) -> tuple[list[list[int]], int]:
    """Answers of 80 tokens, and how often a request was pre-empted."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, preempted = Scheduler._preempt_request, []

    def counted(*args: Any, **named: Any) -> None:
        preempted.append(1)
        preempt(*args, **named)

    Scheduler._preempt_request = counted
    llm = LLM(model, **options)
    wanted = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": x} for x in many_prompts()]
    outputs = llm.generate(asked, wanted, use_tqdm=False)
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == options["num_gpu_blocks_override"] - 1
    return [list(x.outputs[0].token_ids) for x in outputs], len(preempted)


def test_requests_that_are_preempted(tmp_path: Path) -> None:
    """Some requests' blocks are taken away, and their tokens computed again."""
    path = build("qwen2", tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "maps", half=True)
    settings = {"maps": maps, "window": WINDOW}
    tokens, preempted = served(path, settings, crowded, num_gpu_blocks_override=26)
    assert preempted
    check_tokens(model, maps, WINDOW, tokens, many_prompts())


def speculated(model: str, _: None, options: dict) -> tuple[list[list[int]], list[int], list[int]]:
    """Answers of 80 tokens; how many tokens of each draft there were, and were accepted."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    update, drafted, accepted = Scheduler.update_from_output, [], []

    def counted(scheduler: Any, step: Any, output: Any) -> Any:
        for name, draft in step.scheduled_spec_decode_tokens.items():
            drafted.append(len(draft))
            accepted.append(len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1)
        return update(scheduler, step, output)

    Scheduler.update_from_output = counted
    llm = LLM(model, **options)
    wanted = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": x} for x in many_prompts()]
    outputs = llm.generate(asked, wanted, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in outputs], drafted, accepted


def test_speculation_by_ngrams(tmp_path: Path) -> None:
    """Several tokens of a request in a step; of those that are rejected nothing stays."""
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "maps", half=True)
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    settings = {"maps": maps, "window": WINDOW}
    found = served(path, settings, speculated, speculative_config=ngrams)
    tokens, drafted, accepted = found
    assert 0 < sum(accepted) < sum(drafted)
    check_tokens(model, maps, WINDOW, tokens, many_prompts())


def blocks(model: str, _: None, options: dict) -> tuple[int, int]:
    """Bytes that a request of 200 tokens takes between two steps that decode, and of the cache of
    one token in one layer, if nothing were compressed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(model, **options).llm_engine
    wanted = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    engine.add_request("0", {"prompt_token_ids": [5] * 200}, wanted)
    scheduler = engine.engine_core.engine_core.scheduler
    pool, config = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_config
    free, taken = pool.get_num_free_blocks(), []
    while engine.has_unfinished_requests():
        engine.step()
        taken.append(free - pool.get_num_free_blocks())
    size = config.kv_cache_tensors[0].size // config.num_blocks
    return taken[-3] * size, size


def test_what_a_request_takes(tmp_path: Path) -> None:
    """Its entries, and exact tokens of its window alone."""
    path = build("llama", tmp_path / "model")
    options = {"num_gpu_blocks_override": 200, "enable_prefix_caching": False}
    without, _ = served(path, {"bits": 8}, blocks, **options)
    found, block = served(path, {"bits": 8, "window": 32}, blocks, **options)
    exact = 4 * 2 * 2 * 32 * 4  # bytes of a token: layers, heads, sides, numbers, fp32
    assert block >= 16 * exact
    assert found <= without + 3 * block + block  # two or three blocks, and a longer last block


def measured(model: str, _: None, options: dict) -> list[tuple[int, int, int]]:
    """What attends while vLLM measures memory as on a GPU: layer, tokens and requests that
    decode."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    seen: list[tuple[int, int, int]] = []
    measure = CPUWorker.determine_available_memory

    def determine(worker: Any) -> int:
        from kvfold.vllm_plugin import profiling
        from kvfold.vllm_plugin.block_window import BlockWindowStep

        attend = BlockWindowStep.attend

        def recorded(step: Any, layer: Any, *inputs: Any) -> None:
            tokens = step.context.step
            seen.append((layer.index, len(tokens.slots), tokens.num_decodes))
            attend(step, layer, *inputs)
            assert inputs[-1].isfinite().all()

        profiling.MEASURED, BlockWindowStep.attend = ("cpu",), recorded
        worker.model_runner._dummy_run(options["max_num_batched_tokens"], is_profile=True)
        BlockWindowStep.attend = attend
        return measure(worker)

    CPUWorker.determine_available_memory = determine
    assert alone(model, None, options).tokens
    return seen


def test_memory_is_measured_with_the_window(tmp_path: Path) -> None:
    """A prompt's chunk, and chunks beside requests that decode, in a layer of each size."""
    path = build("llama", tmp_path / "model")
    maps = sidecar(loaded(path), tmp_path / "half", half=True)  # the first layer's size twice
    seen = served(path, {"maps": maps, "window": WINDOW}, measured, async_scheduling=False)
    assert [x[0] for x in seen[::3]] == [0, 1, 2]
    assert {x[1:] for x in seen} == {(64, 0), (64, 4)}


SLIDING = "layers with a sliding window"


@pytest.mark.parametrize(
    ("name", "settings", "options", "message"),
    [
        ("gemma3_text", {"bits": 8}, {}, SLIDING),
        ("falcon_h1", {"bits": 8}, {}, "recurrent states"),
        ("llama", {}, {}, "set bits to 8 or fewer"),
        ("llama", {"bits": 8, "window": -1}, {}, r"window must be in \[0, 4096\], got -1"),
        ("llama", {"bits": 8, "window": "9"}, {}, "window must be .* got '9'"),
        (
            "llama",
            {"bits": 8},
            {"disable_hybrid_kv_cache_manager": True},
            "--disable-hybrid-kv-cache-manager would keep all tokens exactly",
        ),
        (
            "llama",
            {"bits": 8},
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
            "OffloadingConnector does not move exact tokens",
        ),
    ],
)
def test_what_is_refused(
    name: str, settings: dict, options: dict, message: str, tmp_path: Path
) -> None:
    path = build(name, tmp_path / "model")
    with pytest.raises(Exception, match=message):
        served(path, {"window": WINDOW} | settings, refused, **options)


def refused(model: str, _: None, options: dict) -> Answers:
    """Start vLLM; its own errors end here, so that the cause is seen."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    LLM(model, **options)
    raise AssertionError("it started")
