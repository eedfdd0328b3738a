"""What tests of sidecar share with others."""

import torch

TEXT = "The tide came in over the flats, and the boats that had lain on their sides stood up. " * 40


def nats(model, ids: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def bytes_tokenizer(folder):
    """Of text in bytes below 128."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(i): i for i in range(3, 127)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(models.BPE(letters, [], unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
