"""Model types that vLLM serves with maps beside their weights, as tiny random checkpoints.

Heads are of sizes that vLLM's CPU kernels take. Arguments are added to BASE; None takes one away.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = {"head_dim": None, "hidden_size": 128}  # where the head size is what the width leaves
OWN = {"num_key_value_heads": None, **WIDE}  # a key and value head for each query head
ALTERNATE = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 64,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32}
GPT = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 256, "n_positions": 512}

TYPES: dict[str, dict] = {
    "apertus": WIDE,
    "arcee": {},
    "afmoe": {
        **EXPERTS,
        **ALTERNATE,
        "route_norm": True,
        "score_func": "sigmoid",
        "num_dense_layers": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_shared_experts": 1,
    },
    "cohere": {**WIDE, "tie_word_embeddings": True, "use_qk_norm": False},
    "cohere2": {**WIDE, **ALTERNATE, "tie_word_embeddings": True},
    "dots1": {**ROUTED, "n_shared_experts": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
    "exaone4": {**WIDE, **ALTERNATE, "sliding_window_pattern": 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_d_ssm": 128},
    "flex_olmo": {**WIDE, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        "sliding_window": 32,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {**ALTERNATE, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3n_text": {
        **ALTERNATE,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
        "laurel_rank": 8,
        "tie_word_embeddings": True,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": OWN,
    "gpt_oss": {**LOCAL_EXPERTS, **ALTERNATE},
    "granite": WIDE,
    "granitemoe": {**WIDE, **LOCAL_EXPERTS},
    "granitemoehybrid": {
        **WIDE,
        **LOCAL_EXPERTS,
        **MAMBA,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "helium": {"hidden_size": 128},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 96},
    "lfm2": {
        **WIDE,
        "block_dim": 128,
        "block_use_xavier_init": True,
        "conv_dim": 128,
        "conv_dim_out": 128,
        "block_ff_dim": 96,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "llama": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {**LOCAL_EXPERTS, "sliding_window": None},
    "nemotron": {},
    "olmo": WIDE,
    "olmo2": WIDE,
    "olmo3": {**WIDE, **ALTERNATE},
    "olmoe": {**WIDE, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {**OWN, "ffn_dim": 96, "word_embed_proj_dim": 128},
    "persimmon": OWN,
    "phi": WIDE,
    "phi3": WIDE,
    "qwen2": WIDE,
    "qwen2_moe": {**WIDE, **EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": WIDE,
    "stablelm": WIDE,
    "starcoder2": {**WIDE, "sliding_window": None},
}
# Their latent is the cache already, and passes attention's interface by.
REFUSED: dict[str, dict] = {
    "deepseek_v2": {
        **ROUTED,
        "num_key_value_heads": 4,
        "topk_method": "greedy",
        "n_shared_experts": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "head_dim": None,
    },
}


def build(name: str, folder: Path) -> str:
    """A checkpoint of a type of TYPES or REFUSED, whose attention and norms matter."""
    arguments = {**TYPES, **REFUSED}[name]
    if arguments is not GPT:
        arguments = {key: x for key, x in {**BASE, **arguments}.items() if x is not None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **arguments)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tied = getattr(config, "tie_word_embeddings", False) and name.startswith("gemma")
    make = torch.Generator().manual_seed(5)
    for parameter, weight in model.named_parameters():
        embeds = any(part in parameter for part in ("embed", "wte", "word_emb"))
        size = (0.05 if tied else 1.0) if embeds else 0.15
        if weight.ndim >= 2:
            weight.data = size * torch.randn(weight.shape, generator=make)
        elif parameter.endswith("sinks"):
            weight.data = torch.randn(weight.shape, generator=make)
    model.save_pretrained(folder)
    return str(folder)
