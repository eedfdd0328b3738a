"""Tiny random models of many types, for tests of code that replaces transformers' attention.

The attention of `TYPES` is called through `ALL_ATTENTION_FUNCTIONS`, that of `REFUSED` is not.
Types that the installed transformers lacks are left out.
"""

from typing import Any

import torch
import transformers as hf
from transformers import CONFIG_MAPPING, PreTrainedModel

# A value of None leaves the argument out.
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 8
ALTERNATING = ["sliding_attention", "full_attention"] * 2
HYBRID = ["linear_attention", "full_attention"] * 2
SLIDING = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
DELTA_NET = {
    "layer_types": HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
GPT2 = {"initializer_range": 0.1, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
MHA = {"num_key_value_heads": 4}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}

_TYPES: dict[str, dict[str, Any]] = {
    # Rotary keys of grouped heads
    "llama": {},
    "mistral": {},
    "ministral3": {},
    "arcee": {},
    "bitnet": {},
    "cwm": {"sliding_window": WINDOW, "layer_types": ALTERNATING},
    "exaone": {},
    "internlm3": {},
    "gemma": {"head_dim": 20},
    "granite": {"attention_multiplier": 0.3},
    "helium": {},
    "hyperclovax": {},
    "jais2": {},
    "mixtral": LOCAL_MOE,
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {**QWEN_MOE, "shared_expert_intermediate_size": 32},
    "seed_oss": {},
    "starcoder2": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "granitemoe": LOCAL_MOE,
    "granitemoeshared": {**LOCAL_MOE, "shared_intermediate_size": 32},
    "phimoe": LOCAL_MOE,
    "solar_open": ROUTED_MOE,
    "dbrx": {
        **{name: None for name in SMALL if name not in ("vocab_size", "pad_token_id")},
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    # Norms of queries and keys, per head or over all heads, before or after RoPE
    "qwen3": {"head_dim": 20},
    "qwen3_moe": QWEN_MOE,
    "apertus": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": {**QWEN_MOE, "mlp_layer_types": ["dense", "sparse"] * 2},
    "nanochat": {},
    "olmo2": {},
    "olmoe": QWEN_MOE,
    "flex_olmo": QWEN_MOE,
    "dots1": ROUTED_MOE,
    "mellum": {**QWEN_MOE, **SLIDING, "mlp_layer_types": ["sparse"] * 4},
    # Clipped projections, caps of scores, learned sinks
    "olmo": {"clip_qkv": 4.0},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0},
    "vaultgemma": {**SLIDING, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0},
    "gpt_oss": {**LOCAL_MOE, **SLIDING},
    # Part of a head is rotated, or its pairs are interleaved
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**ROUTED_MOE, "use_qk_norm": True},
    "minimax_m2": {**LOCAL_MOE, "rotary_dim": 8},
    "nemotron": {},
    "persimmon": {"num_key_value_heads": None},
    "phi": {"qk_layernorm": True},
    "stablelm": {"qk_layernorm": True},
    "gpt_neox": {"num_key_value_heads": None},
    "gptj": {**GPT2, "rotary_dim": 8},
    "codegen": {**GPT2, "rotary_dim": 8},
    "cohere": {"use_qk_norm": True},
    "cohere2": SLIDING,
    "cohere2_moe": {**SLIDING, **QWEN_MOE},
    "ernie4_5": {},
    # Layers with a window, layers without RoPE
    "afmoe": {**SLIDING, **QWEN_MOE, "num_dense_layers": 1, "num_shared_experts": 1},
    "exaone4": SLIDING,
    "exaone_moe": {
        **SLIDING,
        **QWEN_MOE,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 10},
    "granite_swa": SLIDING,
    "granitemoe_swa": {**SLIDING, **LOCAL_MOE},
    "ministral": SLIDING,
    "modernbert-decoder": {
        "local_attention": 2 * WINDOW,
        "layer_types": ALTERNATING,
        "initializer_range": 0.1,
    },
    "olmo3": SLIDING,
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "llama4_text": {
        **LOCAL_MOE,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0, 1, 0],
        "floor_scale": 4,
    },
    # Numbers or widths of heads that differ by layer, values of another width
    "laguna": {
        **SLIDING,
        **QWEN_MOE,
        "shared_expert_intermediate_size": 32,
        "num_attention_heads_per_layer": [4, 8, 4, 8],
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "mimo_v2_flash": {
        **SLIDING,
        **ROUTED_MOE,
        "v_head_dim": 12,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    # Later layers read keys and values of earlier ones, layers of unequal width
    "gemma3n_text": {
        **SLIDING,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **SLIDING,
        "global_head_dim": 24,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
    },
    "gemma4_unified_text": {**SLIDING, "global_head_dim": 24},
    # Keys and values rebuilt from a latent before the cache
    "deepseek_v2": {**MLA, **ROUTED_MOE, "topk_method": "greedy"},
    "deepseek_v3": {**MLA, **ROUTED_MOE},
    "glm4_moe_lite": {**MLA, **ROUTED_MOE, "mlp_layer_types": ["dense", "sparse"] * 2},
    "longcat_flash": {
        **MLA,
        **ROUTED_MOE,
        "num_hidden_layers": None,
        "num_layers": 2,
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "minicpm3": MLA,
    "youtu": MLA,
    # Two softmaxes, dynamic masks, routed heads
    "diffllama": {},
    "doge": {"keep_window_size": 64},
    "jetmoe": {"num_attention_heads": None, "kv_channels": 16, "num_local_experts": 4},
    # Learned or sinusoidal positions, one head of keys
    "biogpt": {},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    # Recurrent layers beside attention
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **MAMBA2,
        **LOCAL_MOE,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {
        **QWEN_MOE,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "minimax": {**LOCAL_MOE, "layer_types": HYBRID, "block_size": 16},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "attention", "mlp", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "olmo_hybrid": DELTA_NET,
    "qwen3_next": {**QWEN_MOE, **DELTA_NET, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**QWEN_MOE, **DELTA_NET, "shared_expert_intermediate_size": 32},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 64,
        "attention_window_size": WINDOW,
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 16,
    },
    # A language model below a vision tower
    "qwen2_vl": {
        "text_config": {"head_dim": None, "rope_parameters": MROPE},
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    },
    "qwen2_5_vl": {
        "text_config": {"head_dim": None, "rope_parameters": MROPE},
        "vision_config": {**QWEN_VISION, "out_hidden_size": 64},
    },
    "qwen3_vl": {
        "text_config": {"rope_parameters": MROPE},
        "vision_config": {
            **QWEN_VISION,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    # Attention over indexed or compressed keys
    "deepseek_v32": {**MLA, **ROUTED_MOE, **INDEXER, "mlp_layer_types": ["dense", "sparse"] * 2},
    "glm_moe_dsa": {**MLA, **ROUTED_MOE, **INDEXER, "mlp_layer_types": ["dense", "sparse"] * 2},
    "deepseek_v4": {
        **ROUTED_MOE,
        "num_key_value_heads": 1,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_mult": 2,
        "sliding_window": WINDOW,
    },
    "minimax_m3_vl_text": {
        **LOCAL_MOE,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "inkling_text": {
        **ROUTED_MOE,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": WINDOW,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "d_rel": 4,
        "rel_extent": 16,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "kimi_linear": {
        **MLA,
        **LOCAL_MOE,
        "q_lora_rank": None,
        "moe_intermediate_size": 32,
        "layer_types": HYBRID,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "zaya": {
        **QWEN_MOE,
        "initializer_range": 0.1,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": (GPT2, "computes attention itself, with ALiBi"),
    "mpt": ({"d_model": 64, "n_layers": 4, "n_heads": 4}, "computes attention itself, with ALiBi"),
    "falcon": ({"head_dim": None}, "computes attention itself"),
    "xglm": (
        {"d_model": 64, "ffn_dim": 96, "num_layers": 4, "attention_heads": 4},
        "computes attention itself",
    ),
    "gpt_neo": (
        {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
        "computes attention itself",
    ),
    "gpt_neox_japanese": ({}, "computes attention itself"),
    "openai-gpt": (GPT2, "computes attention itself, without a cache"),
}
# Types of `TYPES` whose attention does not attend to exactly what `Cache.update` returned.
_LATENT = "the cache holds latents, attention receives keys and values expanded from them"
_INDIRECT = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT + ", and its indexer masks only under the names eager and sdpa",
    "glm_moe_dsa": _LATENT + ", and its indexer masks only under the names eager and sdpa",
    "glm4_moe_lite": _LATENT,
    "kimi_linear": _LATENT,
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "deepseek_v4": "compressed keys are appended after the cache, and values are the keys",
    "diffllama": "attention is called twice, each time with half of the value heads, repeated",
    "doge": "its mask is computed from the values that the cache returns",
    "jetmoe": "keys and values are repeated after the cache",
    "minimax": "it accepts only its own cache class",
}
# Types of `TYPES` whose unmodified logits in chunks differ from those of the whole prompt.
_CHUNKS_DIFFER = {
    "bamba": "also where one token follows the prompt",
    "jamba": "a chunk of several tokens does not start from the recurrent state",
    "minimax": "a chunk of several tokens does not start from the recurrent state",
    "recurrent_gemma": "a chunk of several tokens does not start from the recurrent state",
}


def _installed(name: str) -> bool:
    if name in ("codegen", "gptj") and not hf.GPTJPreTrainedModel._supports_attention_backend:
        return False  # before they passed the interface
    return name in CONFIG_MAPPING


ALL = tuple(_TYPES)
ALL_REFUSED = {name: reason for name, (_, reason) in _REFUSED.items()}
ALL_INDIRECT = dict(_INDIRECT)
TYPES = {name: arguments for name, arguments in _TYPES.items() if _installed(name)}
REFUSED = {name: reason for name, (_, reason) in _REFUSED.items() if _installed(name)}
INDIRECT = {name: reason for name, reason in _INDIRECT.items() if name in TYPES}
CHUNKS_DIFFER = {name: reason for name, reason in _CHUNKS_DIFFER.items() if name in TYPES}


def config(name: str) -> hf.PreTrainedConfig:
    """The configuration of a tiny model of a type of `TYPES` or `REFUSED`."""
    arguments = _TYPES[name] if name in _TYPES else _REFUSED[name][0]
    if "text_config" in arguments:
        return CONFIG_MAPPING[name](
            **{**arguments, "text_config": _small(arguments["text_config"])}
        )
    return CONFIG_MAPPING[name](**_small(arguments))


def tiny(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model with the same random weights at every call, in eval mode."""
    if name in _TYPES and "text_config" in _TYPES[name]:
        builder: Any = hf.AutoModelForImageTextToText
    else:
        builder = hf.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = builder.from_config(config(name), experts_implementation="eager").eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.mul_(3)  # else attention hardly matters
            else:
                weight.data.add_(0.1 * torch.randn_like(weight))  # norms, biases and sinks count
    return model.to(dtype)


def _small(arguments: dict) -> dict:
    return {key: value for key, value in {**SMALL, **arguments}.items() if value is not None}
