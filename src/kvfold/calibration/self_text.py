"""Calibration text that a model writes itself: replies to packaged prompts, sampled as they come.

Shapes: B texts written at once, T tokens, prompts padded on the left.
"""

import hashlib
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from kvfold.utils.progress import Report
from kvfold.utils.text import encode_chat, packaged

SELF = "self"  # in place of a file
BATCH = 16
_PROMPTS = "calibration/prompts.txt"


def describe(max_tokens: int, seed: int) -> str:
    """What a text is written from, beside the model: the key of statistics that are measured on it,
    as the same text written on another device differs in its bits."""
    prompts = hashlib.sha256(packaged(_PROMPTS).encode()).hexdigest()[:16]
    return f"{SELF}: {max_tokens} tokens, seed {seed}, prompts {prompts}"


def write(
    model: Any,
    tokenizer: Any,
    max_tokens: int,
    length: int,
    *,
    seed: int = 0,
    progress: Report | None = None,
) -> list[list[int]]:
    """Token ids of texts of at most `length` tokens, their prompts included, that hold at least
    `max_tokens` together.

    Sampled at temperature 1 from all tokens, from user prompts in the tokenizer's chat template, or
    from BOS alone where it has none (from the token that ends a text, or a token at random, where
    there is no BOS). Leaves the state of random numbers as it was.
    """
    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        prompts = cycle(_prompts(model, tokenizer, length))
        texts: list[list[int]] = []
        done = 0
        while done < max_tokens:
            batch = list(islice(prompts, BATCH))
            texts += _sampled(model, batch, length, _Counter(done, max_tokens, progress))
            done = sum(map(len, texts))
    return texts


def _prompts(model: Any, tokenizer: Any, length: int) -> list[list[int]]:
    """Token ids of the prompts, with room for as many tokens of a reply."""
    if getattr(tokenizer, "chat_template", None):
        asked = (encode_chat(tokenizer, line) for line in packaged(_PROMPTS).splitlines())
        return [ids[-(length // 2) :] for ids in asked]
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is not None:
        return [[first]]
    count = model.get_input_embeddings().num_embeddings
    return [[token] for token in torch.randint(min(count, len(tokenizer)), (1024,)).tolist()]


@torch.no_grad()
def _sampled(
    model: Any, prompts: list[list[int]], length: int, counter: "_Counter"
) -> list[list[int]]:
    """A text for each prompt, as token ids: the prompt, then tokens up to one that ends a text."""
    width = max(map(len, prompts))
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    padding = ends[0] if ends else 0
    ids = torch.tensor([[padding] * (width - len(x)) + x for x in prompts])
    there = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts])
    counter.begin(prompts, width, ends)
    found = model.generate(
        ids.to(model.device),
        attention_mask=there.to(model.device),
        max_length=length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        pad_token_id=padding,
        stopping_criteria=[counter],
    )
    return [
        prompt + _until(row[width:], ends)
        for prompt, row in zip(prompts, found.tolist(), strict=True)
    ]


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    """Tokens up to the first of `ends`, which is included."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


class _Counter(StoppingCriteria):
    """Says how many tokens there are, and stops when they are enough."""

    def __init__(self, done: int, total: int, report: Report | None) -> None:
        self.done, self.total, self.report = done, total, report

    def begin(self, prompts: list[list[int]], width: int, ends: list[int]) -> None:
        """Count a batch of prompts, padded to `width`, whose replies end with one of `ends`."""
        self.done += sum(map(len, prompts))
        self.width, self.ends = width, torch.tensor(ends, dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        end = torch.isin(input_ids[:, self.width :], self.ends.to(input_ids.device))
        written = end.cumsum(1) - end.long() == 0  # up to the first end, which is included
        now = self.done + int(written.sum())
        if self.report is not None:
            self.report(min(now, self.total), self.total)
        return torch.full((len(input_ids),), now >= self.total, device=input_ids.device)
