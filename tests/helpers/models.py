"""Tiny random models of every family, and a dense stand-in for a folded one."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor

from kvfold.cache.eviction.policies import POLICIES

SERVED = [x for x in POLICIES if x != "learned"]  # whatever the model has learned
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
ROTARY: dict[str, Any] = {**COMMON, "intermediate_size": 64, "num_key_value_heads": 2}
LLAMA3_ROPE: Any = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _gemma2(layer_types: list[str]) -> hf.Gemma2Config:
    """A scale and caps that scores and logits of so small a model feel."""
    attention: dict[str, Any] = {"attn_implementation": "eager"}  # sdpa of 5.17 leaves the cap out
    return hf.Gemma2Config(
        **ROTARY,
        head_dim=20,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=2.0,
        sliding_window=16,
        layer_types=layer_types,
        **attention,
    )


CONFIGS = {
    "llama-gqa": lambda: hf.LlamaConfig(**ROTARY),
    "llama-mha": lambda: hf.LlamaConfig(**{**ROTARY, "num_key_value_heads": 4}),
    "llama3-scaling": lambda: hf.LlamaConfig(
        **ROTARY, rope_parameters=LLAMA3_ROPE, attention_bias=True, head_dim=16
    ),
    "mistral": lambda: hf.MistralConfig(**ROTARY, sliding_window=None),
    "mistral-sliding": lambda: hf.MistralConfig(**ROTARY, sliding_window=16),
    "qwen2": lambda: hf.Qwen2Config(**ROTARY),
    "qwen3": lambda: hf.Qwen3Config(**ROTARY, head_dim=20),
    "phi3": lambda: hf.Phi3Config(
        **ROTARY,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gemma2": lambda: _gemma2(["full_attention"] * 2),
    "gemma2-sliding": lambda: _gemma2(["sliding_attention", "full_attention"]),
    "opt": lambda: hf.OPTConfig(
        **COMMON, ffn_dim=64, word_embed_proj_dim=48, dropout=0.0, pad_token_id=0
    ),
    "gpt-neox": lambda: hf.GPTNeoXConfig(
        **COMMON,
        intermediate_size=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    ),
}


def llama_8b(**changed) -> hf.LlamaConfig:
    """The shape of Llama-3.1-8B."""
    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "dtype": torch.bfloat16,
    }
    return hf.LlamaConfig(**(shape | changed))


def tiny(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> hf.PreTrainedModel:
    """A random model whose biases and norms are not at their trivial initial values."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def greedy(model, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens, and how far each was ahead of the second best."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else a BOS that is token 0, too, counts as padding
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tops = [score[0].topk(2).values for score in out.scores]
    return out.sequences[0, len(prompt) :].tolist(), [float(a - b) for a, b in tops]
