"""Lets a model write its own calibration text: sampled replies to packaged prompts.

Shapes: B texts written at once, T tokens, prompts padded on the left.
"""

import hashlib
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from kvfold.utils.chat import encode_chat
from kvfold.utils.progress import Report
from kvfold.utils.text import packaged

SELF = "self"  # in place of a file
BATCH = 16
_PROMPTS = "calibration/prompts.txt"


def describe(max_tokens: int, seed: int) -> str:
    """What the text is written from, except the model. It is a part of the statistics' key, in
    place of the tokens, which may differ between devices."""
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
    """Write texts that have at least `max_tokens` tokens together. Returns their token ids.

    Every text has at most `length` tokens, its prompt included. It is sampled at temperature 1 from
    all tokens. It continues a user prompt in the tokenizer's chat template; without a template, the
    BOS token; without BOS, the EOS token, else a random token. torch's random state is restored.
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
    """Token ids of the prompts, each at most half of a text's `length`."""
    if getattr(tokenizer, "chat_template", None):
        prompts = (encode_chat(tokenizer, line) for line in packaged(_PROMPTS).splitlines())
        return [ids[-(length // 2) :] for ids in prompts]
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is not None:
        return [[first]]
    count = model.get_input_embeddings().num_embeddings
    return [[token] for token in torch.randint(min(count, len(tokenizer)), (1024,)).tolist()]


@torch.no_grad()
def _sampled(
    model: Any, prompts: list[list[int]], length: int, counter: "_Counter"
) -> list[list[int]]:
    """The text of each prompt as token ids: the prompt, then tokens up to one that ends a text."""
    width = max(map(len, prompts))
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    padding = ends[0] if ends else 0
    ids = torch.tensor([[padding] * (width - len(x)) + x for x in prompts])
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts])
    counter.begin(prompts, width, ends)
    generated = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
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
        for prompt, row in zip(prompts, generated.tolist(), strict=True)
    ]


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    """The tokens up to and including the first of `ends`."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


class _Counter(StoppingCriteria):
    """A stopping criterion of generation: it reports progress, and stops at `total` tokens."""

    def __init__(self, done: int, total: int, report: Report | None) -> None:
        self.done, self.total, self.report = done, total, report

    def begin(self, prompts: list[list[int]], width: int, ends: list[int]) -> None:
        """Count a batch of prompts, padded to `width`, whose replies end with one of `ends`."""
        self.done += sum(map(len, prompts))
        self.width, self.ends = width, torch.tensor(ends, dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        end = torch.isin(input_ids[:, self.width :], self.ends.to(input_ids.device))
        written = end.cumsum(1) - end.long() == 0  # up to and including the first end
        now = self.done + int(written.sum())
        if self.report is not None:
            self.report(min(now, self.total), self.total)
        return torch.full((len(input_ids),), now >= self.total, device=input_ids.device)
