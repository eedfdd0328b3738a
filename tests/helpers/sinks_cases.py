"""What tests of sinks share with others."""

import torch

import kvfold
from kvfold.engine.runner.trial import run_tokens
from sidecar_cases import bytes_tokenizer

STEPS = 4


def logits_of(model, made, ids, **settings) -> torch.Tensor:
    """[1 + STEPS, B, V] after prompts and after each step of sequences side by side."""
    llm = kvfold.LLM(model, maps=made, max_sequences=3, max_tokens=64, **settings)
    prompts, rest = zip(*((x[:-STEPS], x[-STEPS:]) for x in ids), strict=True)
    with torch.inference_mode():
        return torch.stack([x.clone() for x in run_tokens(llm.runner, prompts, rest)])


def expected(model, made, ids) -> torch.Tensor:
    """The same of transformers, with maps attached; then without them again."""
    undo = kvfold.attach(model, made)
    with torch.no_grad():
        found = [
            model(torch.tensor([x], device=model.device)).logits[0, len(x) - STEPS - 1 :]
            for x in ids
        ]
    undo()
    return torch.stack(found, 1)


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def maps_of(model, keep: float, folder):
    tokenizer = bytes_tokenizer(folder)
    return kvfold.compress(
        model, keep=keep, tokenizer=tokenizer, align=1, windows=True, max_tokens=1024
    )
