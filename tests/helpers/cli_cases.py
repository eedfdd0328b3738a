"""What tests of cli share with others."""

from typing import Any

import pytest
import torch
import transformers as hf

from commands import without_progress
from kvfold.cli.main import main
from kvfold.hub.loading import load_tokenizer

TINY: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


FEW = ["--max-tokens", "1024"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A random Llama with the reference model's tokenizer, as a checkpoint."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "plain"
    hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).save_pretrained(path)
    load_tokenizer("reference:gqa").save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The ship went out to sea, and nobody saw it again. " * 60, encoding="utf-8")
    return path


def printed(capsys, *arguments):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    captured = capsys.readouterr()
    assert not without_progress(captured.err)
    return captured.out
