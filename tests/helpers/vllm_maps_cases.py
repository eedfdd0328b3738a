"""What tests of vllm maps share with others."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvfold.layout import CacheSpec, Geometry, Latent, LayerSpec
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import attention_layers
from kvfold.maps.sidecar import Sidecar, probes_of
from maps_rope_cases import maps_of

NEW, RANKS = 16, (16, 12, 20, 16)  # tokens; numbers a head of keys and of values, by layer


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
    layers = attention_layers(model)
    maps, specs = {}, []
    own = [layer for layer in layers if layer.source == layer.name]
    # vLLM 0.32 pads layers that share keys, some with windows, to bytes that divide each other.
    ranks = RANKS if len(own) == len(layers) else (16,)
    for index, layer in enumerate(own):
        heads, d = layer.num_kv_heads, layer.head_dim
        r = ranks[index % len(ranks)] if half else d
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
        num_layers=len(own),
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


def sidecar_before_rope(model, folder: Path, joint: bool) -> str:
    """Random maps for half the numbers, of keys before RoPE, as files; joint: one latent of keys
    and values."""
    layers = attention_layers(model)
    maps = maps_of(model, layers, keep=0.5, joint=joint)
    heads, specs = tuple(range(layers[0].num_kv_heads)), []
    for layer in layers:
        key, value = (x.shape[2] for x in (maps[layer.name].key_down, maps[layer.name].value_down))
        latents = [Latent(side="k", heads=(x,), rank=key) for x in heads]
        latents.append(Latent(side="v", heads=heads, rank=value))
        if joint:
            latents = [Latent(side="kv", heads=heads, rank=key)]
        specs.append(LayerSpec(keys="pre_rope", values="rebuilt", latents=tuple(latents)))
    made = Sidecar.load(sidecar(model, folder.with_name("after")))
    spec = replace(made.spec, layers=tuple(specs))
    replace(made, maps=maps, spec=spec).save(folder)
    return str(folder)
