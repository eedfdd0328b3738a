"""A random model of one layer that reads bytes: its steps take milliseconds, for soaks."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

POSITIONS = 512


def tiny_tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a byte, a start token and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def tiny_model(window: int | None = None, seed: int = 0) -> hf.PreTrainedModel:
    """window: of its attention; None: all tokens are seen."""
    torch.manual_seed(seed)
    config = hf.MistralConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        sliding_window=window,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biased answers, far from ties
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def disturbed(model: Any, share: float, seed: int) -> hf.PreTrainedModel:
    """A copy whose weights differ by so much of their size, at random."""
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + share * torch.randn(parameter.shape, generator=generator))
    return other


def save_tiny(folder: Path) -> None:
    """Model and tokenizer as a checkpoint."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
