"""vLLM on a CPU serves what kvfold compressed: the tokens of transformers, and so many more cached.

Its own environment (`make test-vllm`). Every engine has a process of its own, forked from this one
lest each import vLLM again; several processes that serve a model together are vLLM's to start.
"""

import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import kvfold
from forks import forked
from kvfold import recipes
from kvfold.hub.loading import load_config, load_tokenizer, resolve
from kvfold.utils.text import packaged
from models import greedy

pytestmark = pytest.mark.vllm
NEW = 16  # tokens
TIE = 1e-3  # of logits
RECIPES = [x for x, make in recipes.RECIPES.items() if not (make().codebooks or make().reduce)]
SMALL = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 64, "enforce_eager": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """Compressed once, when asked for."""
    made: dict[tuple[str, str, float | None], Path] = {}

    def get(model: str, recipe: str, factor: float | None = None) -> str:
        key = model, recipe, factor
        if key not in made:
            made[key] = tmp_path_factory.mktemp("vllm") / "checkpoint"
            size = {"keep": 0.5} if factor is None else {"factor": factor}
            # Numba in this process, which a check loads, keeps vLLM 0.32 from starting in a fork.
            size |= {"output": made[key], "max_tokens": 4096, "check": False}
            kvfold.compress(model, recipe, **size, fold=True)
        return str(made[key])

    return get


def prompts() -> list[list[int]]:
    """The last two begin alike, for as long as two blocks."""
    ids = load_tokenizer("reference:gqa")(packaged("calibration.txt")[:20000])["input_ids"]
    shared = ids[2000:2150]
    return [ids[:5], ids[100:140], ids[300:470], shared + ids[3000:3010], shared + ids[3100:3130]]


class Served(NamedTuple):
    """Of every prompt: tokens, tokens that were cached before, log-probabilities by token of the
    first new one; and the tokens that the cache holds."""

    tokens: list[list[int]]
    cached: list[int]
    first: list[dict[int, float]]
    capacity: int


def served(model: str, settings: dict | None = None, *, ask=None, again=False, **options) -> Served:
    """vLLM's outputs for prompts `ask`, greedy, prefill in chunks of at most 128 tokens. again: of
    the second time that it is asked."""
    if settings:
        options |= {"additional_config": {"kvfold": settings}}
    options = {"dtype": "float32", "max_num_batched_tokens": 128} | SMALL | options
    asked = [{"prompt_token_ids": x} for x in ask or prompts()]
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if options.get("tensor_parallel_size", 1) > 1:
        return generated(resolve(model), asked, 1 + again, options)
    import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork

    return forked(alone, resolve(model), asked, 1 + again, options)


def alone(*args) -> Served:
    """`generated`, by an engine in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return generated(*args)


def generated(model: str, asked: list[dict], times: int, options: dict) -> Served:
    from vllm import LLM, SamplingParams

    llm = LLM(model, **options)
    try:
        wanted = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=3)
        for _ in range(times):
            outputs = llm.generate(asked, wanted, use_tqdm=False)
        return Served(
            [list(x.outputs[0].token_ids) for x in outputs],
            [x.num_cached_tokens for x in outputs],
            [{t: y.logprob for t, y in x.outputs[0].logprobs[0].items()} for x in outputs],
            llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        )
    finally:
        llm.llm_engine.engine_core.shutdown()


def check_tokens(tokens: list[list[int]], model: str) -> None:
    """Those of transformers, up to where it finds a second token as likely."""
    loaded = kvfold.load(model, dtype=torch.float32)
    for prompt, got in zip(prompts(), tokens, strict=True):
        want, ahead = greedy(loaded, prompt, NEW)
        sure = next((i for i, x in enumerate(ahead) if x < TIE), NEW)
        assert got[:sure] == want[:sure], (len(prompt), got, want, ahead)


@pytest.fixture(scope="module")
def stock() -> dict[str, int]:
    """Tokens that vLLM's own cache holds."""
    names = ("reference:gqa", "reference:mha")
    return {name: served(name).capacity for name in names}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", ["reference:gqa", "reference:mha"])
def test_tokens_and_capacity(model: str, recipe: str, checkpoints, stock: dict[str, int]) -> None:
    """Prompts come in chunks, and what was cached of them is taken when they come again."""
    path = checkpoints(model, recipe)
    found = served(path, again=True)
    assert found.cached == [x // 64 * 64 for x in map(len, prompts())], "whole blocks are cached"
    check_tokens(found.tokens, path)
    kept = kvfold.load(path).config.quantization_config.spec.kept_fraction
    assert found.capacity == pytest.approx(stock[model] / kept, rel=0.01)


@pytest.mark.parametrize("recipe", ["swift", "lean", "small", "palu-j"])
def test_two_processes(recipe: str, checkpoints) -> None:
    path = checkpoints("reference:gqa", recipe)
    found = served(path, again=True, tensor_parallel_size=2)
    assert max(found.cached) == 128
    check_tokens(found.tokens, path)


@pytest.mark.parametrize("recipe", ["swift", "small"])
def test_compiled(recipe: str, checkpoints) -> None:
    """vLLM traces the model once, and runs it in pieces around attention."""
    path = checkpoints("reference:gqa", recipe)
    check_tokens(served(path, enforce_eager=False).tokens, path)


@pytest.mark.parametrize("bits", [8, 4])
def test_bits_of_an_unchanged_model(bits: int, stock: dict[str, int]) -> None:
    """fp32 of vLLM's own cache is 32 bits a number; an fp16 scale is shared by 128."""
    size = same_as_by_the_engine("reference:gqa", bits)
    assert size == pytest.approx(stock["reference:gqa"] * 32 / (bits + 16 / 128), rel=0.01)


@pytest.mark.parametrize("recipe", ["swift", "lean", "small"])
def test_planned_bits(recipe: str, checkpoints, stock: dict[str, int]) -> None:
    size = same_as_by_the_engine(checkpoints("reference:gqa", recipe, factor=6.0), None)
    assert size == pytest.approx(stock["reference:gqa"] * 12, rel=0.02)


def same_as_by_the_engine(model: str, bits: int | None) -> int:
    """Log-probabilities after short prompts, against kvfold's own engine; tokens that vLLM's cache
    holds. Rounding turns a code over now and then, which then is felt."""
    ids = load_tokenizer("reference:gqa")(packaged("calibration.txt")[:9000])["input_ids"]
    ask = [ids[i : i + 7] for i in range(0, 1000, 50)]
    found = served(model, bits and {"bits": bits}, ask=ask)
    want = forked(by_the_engine, model, bits, ask)
    off = [
        max(abs(a[token] - b[token]) for token in a.keys() & b.keys())
        for a, b in zip(found.first, want, strict=True)
    ]
    assert statistics.median(off) < 1e-4 and max(off) < 0.2, off
    return found.capacity


def by_the_engine(model: str, bits: int | None, ask: list[list[int]]) -> list[dict[int, float]]:
    llm = kvfold.LLM(model, max_tokens=512, kv_bytes=2**28, dtype="float32", bits=bits)
    wanted = kvfold.SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=3)
    return [dict(out.logprobs[0].top) for out in llm.generate(ask, wanted)]


def test_what_is_refused(checkpoints) -> None:
    with pytest.raises(RuntimeError, match="vLLM has one block table for all heads"):
        served(checkpoints("reference:gqa", "fast"), {"evict": "random"})
    with pytest.raises(RuntimeError, match="window=64: this checkpoint is folded"):
        served(checkpoints("reference:gqa", "fast"), {"window": 64})


def test_a_plain_model_needs_no_format_of_weights() -> None:
    from kvfold.vllm_plugin.quantization import KVFoldQuantization

    with pytest.raises(ValueError, match="leave it out; bits and maps are set in"):
        KVFoldQuantization().maybe_update_config("plain", load_config("reference:gqa"))


def test_logits_that_are_not_finite_end_their_request(checkpoints) -> None:
    path = checkpoints("reference:gqa", "fast")
    want = served(path, ask=prompts()[:2]).tokens
    tokens, reasons, errors = forked(poisoned, path, prompts()[:2])
    assert reasons == ["length", "stop"]
    assert tokens[0] == want[0] and tokens[1][:-1] == want[1][:4]
    assert len(errors) == 1 and "not finite for 1 token(s)" in errors[0]


def poisoned(model: str, ask: list[list[int]]) -> tuple[list[list[int]], list[str], list[str]]:
    """Tokens, ends and errors that are logged, where the second request's fifth logits are NaN."""
    import logging

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models.llama import LlamaForCausalLM

    compute, left = LlamaForCausalLM.compute_logits, [sys.maxsize]
    records: list[str] = []

    def wrong(self, *args):
        logits = compute(self, *args)
        left[0] -= 1
        if left[0] == 0:
            logits[1] = torch.nan
        return logits

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    LlamaForCausalLM.compute_logits = wrong
    llm = LLM(model, dtype="float32", async_scheduling=False, **SMALL)
    logging.getLogger("vllm.kvfold").addHandler(Handler())  # vLLM has set up its own by now
    try:
        left[0] = 5
        asked = [{"prompt_token_ids": x} for x in ask]
        wanted = SamplingParams(temperature=0, max_tokens=NEW)
        outputs = [x.outputs[0] for x in llm.generate(asked, wanted, use_tqdm=False)]
        return [list(x.token_ids) for x in outputs], [x.finish_reason for x in outputs], records
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_a_model_that_overflows_is_refused_at_the_start(checkpoints, tmp_path: Path) -> None:
    model = kvfold.load(checkpoints("reference:gqa", "fast"), dtype=torch.bfloat16)
    attention = model.model.layers[2].self_attn
    with torch.no_grad():
        attention.down_proj.weight.mul_(1e4)
        attention.o_proj.weight.mul_(1e36)
    model.save_pretrained(tmp_path)
    load_tokenizer("reference:gqa").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="attention of layer 2 gives numbers that are not"):
        served(str(tmp_path), dtype="bfloat16")
