"""vLLM's own models with maps beside their weights, on a CPU: the tokens that transformers gives
with the same maps, and that vLLM gives without any where maps drop nothing.

Its own environment (`make test-vllm`). Tiny random models; each engine in a process of its own.
"""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import kvfold
from forks import forked
from vllm_maps_cases import (
    NEW,
    Answers,
    alone,
    generated,
    loaded,
    prompts,
    sidecar,
    sidecar_before_rope,
)
from vllm_quantised import KINDS, quantised
from vllm_types import REFUSED, TYPES, build

pytestmark = pytest.mark.vllm
TIE = 1e-3  # of logits
ROUNDING = 0.2  # of log-probabilities in bf16: 0.03 to 0.1 was seen
RECURRENT = ("falcon_h1", "granitemoehybrid", "lfm2")  # whose states are cached too
# Where vLLM 0.32 itself gives other tokens than transformers, or these have ties.
APART = ("cohere2", "ernie4_5_moe", "gemma3n_text", "lfm2")


def served(model: str, settings: dict | None = None, lora: str | None = None, **more) -> Answers:
    """vLLM's answers, greedy, prompts in chunks of at most 64 tokens."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "block_size": 32, "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 64, "enable_prefix_caching": True,
    } | more  # fmt: skip
    if settings:
        options["additional_config"] = {"kvfold": settings}
    if options.get("tensor_parallel_size", 1) > 1:
        return generated(model, lora, options)
    import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork

    return forked(alone, model, lora, options)


@torch.no_grad()
def check_tokens(tokens: list[list[int]], model) -> None:
    """They are transformers' greedy ones, each read through the cache, up to a tie."""
    for ids, answer in zip(prompts(), tokens, strict=True):
        part, cache = torch.tensor([ids]), None
        for place, token in enumerate(answer):
            out = model(part, past_key_values=cache, use_cache=True)
            best = out.logits[0, -1].topk(2)
            if best.values[0] - best.values[1] < TIE:
                break
            assert token == int(best.indices[0]), (len(ids), place, answer)
            part, cache = best.indices[:1][None], out.past_key_values
        assert place > NEW // 4, "ties hide the rest"


@pytest.mark.parametrize("name", TYPES)
def test_a_type(name: str, tmp_path: Path) -> None:
    """Maps of full rank change no token; unequal ranks give what transformers gives with the same
    maps, from a cache that is as much smaller."""
    path = build(name, tmp_path / "model")
    model = loaded(path)
    stock = served(path)
    assert len({token for tokens in stock.tokens for token in tokens}) > 8, "it repeats itself"
    full = served(path, {"maps": sidecar(model, tmp_path / "full")})
    assert full.tokens == stock.tokens
    assert "MappedImpl" in full.attention
    half = sidecar(model, tmp_path / "half", half=True)
    found = served(path, {"maps": half})
    assert found.tokens != stock.tokens, "these maps drop something"
    assert found.cached == stock.cached, "prefixes are found as before"
    if name not in APART:
        kvfold.attach(model, half)
        check_tokens(found.tokens, model)
    if name not in RECURRENT:
        assert sum(found.cache_bytes) < 0.55 * sum(stock.cache_bytes)


@pytest.mark.parametrize("joint", [False, True])
def test_two_processes(joint: bool, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "maps", half=True, joint=joint)
    found = served(path, {"maps": maps}, tensor_parallel_size=2)
    kvfold.attach(model, maps)
    check_tokens(found.tokens, model)


@pytest.mark.parametrize("joint", [False, True])
def test_values_of_all_heads_together(joint: bool, tmp_path: Path) -> None:
    path = build("qwen3_moe", tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "maps", half=True, joint=joint)
    found = served(path, {"maps": maps}, enforce_eager=False)
    kvfold.attach(model, maps)
    check_tokens(found.tokens, model)
    packed = served(path, {"maps": maps, "bits": 8})
    assert 0 < difference(found, packed) < 0.3
    assert sum(packed.cache_bytes) < 0.32 * sum(found.cache_bytes)  # of 32 bits, with scales


def difference(a: Answers, b: Answers) -> float:
    """The most by which log-probabilities of first tokens differ."""
    pairs = zip(a.first, b.first, strict=True)
    return max(abs(x[token] - y[token]) for x, y in pairs for token in x.keys() & y.keys())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "falcon_h1"])
def test_few_bits_need_no_maps(name: str, tmp_path: Path) -> None:
    path = build(name, tmp_path / "model")
    stock, found = served(path), served(path, {"bits": 8})
    assert 0 < difference(found, stock) < 0.6  # weights are random, and large
    assert "MappedImpl" in found.attention


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["llama", "phi", "olmo3", "glm4"])
def test_keys_before_rope(name: str, joint: bool, tmp_path: Path) -> None:
    """Reconstructed and rotated at their positions, however the model pairs its numbers; joint: one
    latent of keys and values."""
    path = build(name, tmp_path / "model")
    model = loaded(path)
    maps = sidecar_before_rope(model, tmp_path / "maps", joint)
    found = served(path, {"maps": maps})
    kvfold.attach(model, maps)
    check_tokens(found.tokens, model)


def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA adapters are made with peft")
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    adapted = peft.get_peft_model(model, config)
    for parameter, weight in adapted.named_parameters():
        if "lora_B" in parameter:
            weight.data.normal_(0, 0.05)
    adapted.save_pretrained(tmp_path / "lora")
    plain = loaded(path)
    maps = sidecar(plain, tmp_path / "maps", half=True)
    found = served(path, {"maps": maps}, lora=str(tmp_path / "lora"))
    without = served(path, {"maps": maps})
    kvfold.attach(adapted, maps)
    check_tokens(found.tokens, adapted)
    assert found.tokens != without.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights(kind: str, tmp_path: Path) -> None:
    """Maps of the model before it was quantised: of full rank they move what vLLM answers by no
    more than maps that are the identity do, which is rounding; of half the rank by much more."""
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    base = quantised(kind, path, tmp_path / kind)
    stock = served(base, dtype="bfloat16")
    identity = served(base, {"bits": 16}, dtype="bfloat16")
    full = served(base, {"maps": sidecar(model, tmp_path / "full")}, dtype="bfloat16")
    half = served(base, {"maps": sidecar(model, tmp_path / "half", half=True)}, dtype="bfloat16")
    assert "MappedImpl" in full.attention
    likeliest = likely(stock, stock)
    assert likely(stock, identity) == likely(stock, full) == likeliest
    assert 0 < difference(stock, identity) < ROUNDING and difference(stock, full) < ROUNDING
    assert likely(stock, half) < likeliest / 2


def likely(a: Answers, b: Answers) -> int:
    """How many of the likeliest first tokens of all prompts are so in both."""
    return sum(len(x.keys() & y.keys()) for x, y in zip(a.first, b.first, strict=True))


def test_maps_of_another_model_are_refused(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.normal_(0, 0.15)
    with pytest.raises(
        RuntimeError, match=r"which this model is not, .*keys and values of model.layers.0"
    ):
        served(path, {"maps": sidecar(model, tmp_path / "maps")})
    other = loaded(build("qwen2", tmp_path / "other"))
    with pytest.raises(RuntimeError, match="take the maps of this model"):
        served(build("phi3", tmp_path / "third"), {"maps": sidecar(other, tmp_path / "wrong")})


@pytest.mark.parametrize("bits", [None, 8])
def test_a_layer_that_reads_anothers_keys_is_checked_too(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Attention

    make = Attention.__init__

    def with_biases(self, *args, **kwargs) -> None:
        make(self, *args, **kwargs)
        if self.kv_sharing_target_layer_name is not None:
            self.alibi_slopes = torch.ones(self.num_heads)

    monkeypatch.setattr(Attention, "__init__", with_biases)
    path = build("gemma3n_text", tmp_path / "model")
    maps = {"bits": bits} if bits else {"maps": sidecar(loaded(path), tmp_path / "maps")}
    with pytest.raises(RuntimeError, match=r"layers.2.self_attn.attn adds ALiBi biases"):
        served(path, maps)


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_stores_something_else_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="calls vLLM's attention"):
        served(build(name, tmp_path / "model"), {"bits": 8})


def test_other_settings_of_a_cache_are_refused(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    with pytest.raises(RuntimeError, match="--kv-cache-dtype fp8"):
        served(path, {"bits": 8}, kv_cache_dtype="fp8")
