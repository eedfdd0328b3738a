"""vLLM's own models with maps beside their weights, on a CPU: the tokens that transformers gives
with the same maps, and that vLLM gives without any where maps drop nothing.

Its own environment (`make test-vllm`). Tiny random models; each engine in a process of its own.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import kvfold
from kvfold.seam.layers import seam_layers
from kvfold.seam.maps import Maps
from kvfold.seam.sidecar import Sidecar, probes_of
from kvfold.spec import CacheSpec, Geometry, Latent, LayerSpec
from vllm_types import REFUSED, TYPES, build

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from forks import forked

pytestmark = pytest.mark.vllm
NEW, RANKS = 16, (16, 12, 20, 16)  # tokens; numbers a head of keys and of values, by layer
HYBRID = ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "qwen3_5_text", "qwen3_next")


def prompts() -> list[list[int]]:
    """The last shares 100 tokens with the first, which is asked before the others."""
    make = torch.Generator().manual_seed(1)
    parts = [torch.randint(3, 250, (n,), generator=make).tolist() for n in (100, 5, 70, 7)]
    return [parts[0] + parts[1], parts[2], parts[0] + parts[3]]


@dataclass
class Answers:
    """Of every prompt: new tokens, tokens that were cached before, log-probabilities by token of
    the first new one; bytes of each layer's cache; classes of attention."""

    tokens: list[list[int]]
    cached: list[int]
    first: list[dict[int, float]]
    cache_bytes: list[int]
    attention: set[str]


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


def alone(*args) -> Answers:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return generated(*args)


def generated(model: str, lora: str | None, options: dict) -> Answers:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    if lora is not None:
        options |= {"enable_lora": True, "max_lora_rank": 8}
    llm = LLM(model, **options)
    try:
        wanted = SamplingParams(
            temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=4
        )
        asked = [{"prompt_token_ids": x} for x in prompts()]
        adapter = None if lora is None else LoRARequest("adapter", 1, lora)
        outputs = []
        for part in (asked[:1], asked[1:]):
            outputs += llm.generate(part, wanted, use_tqdm=False, lora_request=adapter)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        held = [getattr(layer, "kv_cache", None) for layer in layers.values()]
        return Answers(
            [list(x.outputs[0].token_ids) for x in outputs],
            [x.num_cached_tokens for x in outputs],
            [{t: y.logprob for t, y in x.outputs[0].logprobs[0].items()} for x in outputs],
            [x.numel() * x.element_size() for x in held if isinstance(x, torch.Tensor)],
            {type(getattr(layer, "impl", None)).__name__ for layer in layers.values()},
        )
    finally:
        llm.llm_engine.engine_core.shutdown()


def sidecar(model, folder: Path, half: bool = False, joint: bool = False) -> str:
    """Random orthogonal maps, as files: of full rank, or of RANKS; joint: one latent of values."""
    layers = seam_layers(model)
    maps, specs = {}, []
    for index, layer in enumerate(layers):
        heads, d = layer.num_kv_heads, layer.head_dim
        r = RANKS[index % len(RANKS)] if half else d
        plain = layer.softcap is None and layer.sinks is None
        values = (
            orthogonal(1, heads * d)[..., : heads * r] if joint else orthogonal(heads, d)[..., :r]
        )
        keys = orthogonal(heads, d)[..., :r]
        maps[layer.name] = Maps(
            key_down=keys,
            key_up=keys,
            key_shift=torch.randn(heads, r) * plain,
            value_down=values,
            value_up=values,
            value_shift=torch.zeros(values.shape[::2]),
            value_mean=torch.zeros(heads, d),
        )
        owners = [tuple(range(heads))] if joint else [(head,) for head in range(heads)]
        latents = [Latent(side="k", heads=(head,), rank=r) for head in range(heads)]
        latents += [Latent(side="v", heads=own, rank=values.shape[2]) for own in owners]
        specs.append(LayerSpec(keys="post_rope", values="rebuilt", latents=tuple(latents)))
    first = layers[0]
    geometry = Geometry(
        hidden_size=model.config.get_text_config().hidden_size,
        num_query_heads=first.num_query_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        num_layers=len(layers),
        rope=True,
        key_norm=True,
        scaling=first.head_dim**-0.5 if first.scaling is None else first.scaling,
        softcap=first.softcap,
    )
    made = Sidecar(
        maps=maps,
        spec=CacheSpec(geometry=geometry, layers=tuple(specs)),
        base=probes_of(layers),
        provenance={"model": "random"},
    )
    made.save(folder)
    return str(folder)


def orthogonal(count: int, size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(count, size, size, dtype=torch.float64))[0].float()


def loaded(path: str):
    """By transformers; eager attention knows caps of scores and sinks."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def by_transformers(model, ids: list[int]) -> list[int]:
    """Greedy tokens, each read through the cache."""
    part, cache, found = torch.tensor([ids]), None, []
    for _ in range(NEW):
        out = model(part, past_key_values=cache, use_cache=True)
        part, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        found.append(int(part))
    return found


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
    kvfold.attach(model, half)
    assert found.tokens == [by_transformers(model, ids) for ids in prompts()]
    assert found.tokens != stock.tokens, "these maps drop something"
    if name not in HYBRID:
        assert found.cached == stock.cached == [0, 0, 96]
        assert sum(found.cache_bytes) < 0.55 * sum(stock.cache_bytes)


@pytest.mark.parametrize("joint", [False, True])
def test_two_processes(joint: bool, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "maps", half=True, joint=joint)
    found = served(path, {"maps": maps}, tensor_parallel_size=2)
    kvfold.attach(model, maps)
    assert found.tokens == [by_transformers(model, ids) for ids in prompts()]


@pytest.mark.parametrize("joint", [False, True])
def test_values_of_all_heads_together(joint: bool, tmp_path: Path) -> None:
    path = build("qwen3_moe", tmp_path / "model")
    model = loaded(path)
    maps = sidecar(model, tmp_path / "maps", half=True, joint=joint)
    found = served(path, {"maps": maps, "bits": 8}, enforce_eager=False)
    kvfold.attach(model, maps)
    wanted = [by_transformers(model, ids) for ids in prompts()]
    same = sum(
        a == b for x, y in zip(found.tokens, wanted, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert same > NEW, "8 bits change few first tokens"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "qwen3_next"])
def test_few_bits_need_no_maps(name: str, tmp_path: Path) -> None:
    path = build(name, tmp_path / "model")
    stock, found = served(path), served(path, {"bits": 8})
    apart = [
        max(abs(a[token] - b[token]) for token in a.keys() & b.keys())
        for a, b in zip(found.first, stock.first, strict=True)
    ]
    assert max(apart) < 0.3, apart
    assert "MappedImpl" in found.attention


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
    assert found.tokens == [by_transformers(adapted, ids) for ids in prompts()]
    assert found.tokens != without.tokens


def test_maps_of_another_model_are_refused(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    model = loaded(path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.normal_(0, 0.15)
    with pytest.raises(
        RuntimeError, match=r"made for another model: keys and values of .*layers.0"
    ):
        served(path, {"maps": sidecar(model, tmp_path / "maps")})
    other = loaded(build("qwen2", tmp_path / "other"))
    with pytest.raises(RuntimeError, match="take the maps of this model"):
        served(build("phi3", tmp_path / "third"), {"maps": sidecar(other, tmp_path / "wrong")})


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_stores_something_else_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="calls vLLM's attention"):
        served(build(name, tmp_path / "model"), {"bits": 8})


def test_other_settings_of_a_cache_are_refused(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "model")
    with pytest.raises(RuntimeError, match="--kv-cache-dtype fp8"):
        served(path, {"bits": 8}, kv_cache_dtype="fp8")
