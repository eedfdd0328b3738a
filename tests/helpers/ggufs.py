"""Tiny GGUF files, written as llama.cpp writes a Llama."""

import json

import gguf
import torch
import transformers as hf

from kvfold.hub.loading import load_tokenizer

TINY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CHAT = "{% for message in messages %}User: {{ message['content'] }}\nBot:{% endfor %}"
_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def random_llama(**changes):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY | changes))


def write(path, model, *, packed=False, architecture="llama", without=(), extra=(), adds_bos=True):
    """`model` as a GGUF file, its matrices as Q8_0 if `packed`, with the embedded model's tokenizer
    or as much of it as the vocabulary has room for.

    without: tensors to leave out, by GGUF name; extra: metadata to add; adds_bos: whether the file
    says that BOS comes in front of a text, None: it does not say. Returns the numbers that were
    written, by the model's names.
    """
    writer, written = gguf.GGUFWriter(path, architecture), {}
    _describe(writer, model.config)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    for key, value in extra:
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, weight in model.state_dict().items():
        target, data = _target(name), _interleaved(name, weight, model.config).numpy()
        if target in without:
            continue
        kind = gguf.GGMLQuantizationType.F32
        if packed and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
        stored = gguf.quantize(data, kind)
        writer.add_tensor(target, stored, raw_dtype=kind)
        unpacked = torch.from_numpy(gguf.dequantize(stored, kind).copy())
        written[name] = _interleaved(name, unpacked, model.config, back=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _describe(writer, config):
    writer.add_file_type(0)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    parts = json.loads(load_tokenizer("reference:gqa").backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(parts["vocab"], key=parts["vocab"].get)[: config.vocab_size]
    known = set(tokens)
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (config.vocab_size - 1)])
    writer.add_token_merges([" ".join(pair) for pair in parts["merges"] if "".join(pair) in known])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT)


def _target(name):
    stem = name.removesuffix(".weight")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_TENSORS[part]}.weight"


def _interleaved(name, weight, config, back=False):
    """llama.cpp turns neighbouring rows of a head together, transformers rows half a head apart."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if part not in heads:
        return weight
    half = config.head_dim // 2
    shape = (half, 2) if back else (2, half)
    return weight.view(heads[part], *shape, -1).transpose(1, 2).reshape(weight.shape).contiguous()


def places(path):
    """Where the table of tensors begins, and where the tensors do, in bytes."""
    reader = gguf.GGUFReader(path)
    return min(x.field.offset for x in reader.tensors), int(reader.data_offset)
