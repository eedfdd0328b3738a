"""Log-probabilities of prompt tokens, computed while the prompt is prefilled.

Shapes: n tokens of a chunk, D model width, V vocabulary, k most top logprobs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvfold.engine.requests.request import Batch, ScheduledChunk, TokenLogprobs

MOST = 2**24  # most logits computed at once: 64 MiB


def score_prompts(batch: Batch, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Store the log-probabilities of prompt tokens in the requests that want them: of those tokens
    whose predecessors are in the batch.

    hidden: [tokens of the batch, D]. logits_of: from hidden states [n, D] to logits [n, V].
    """
    end = 0
    for chunk in batch.chunks:
        first, end = end, end + len(chunk.tokens)
        if chunk.scores_prompt:
            _score(chunk, hidden[first:end], logits_of)


def _score(chunk: ScheduledChunk, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    request = chunk.request
    targets = request.token_ids[chunk.start + 1 : min(chunk.end + 1, request.num_prompt)]
    most = request.sampling.prompt_logprobs
    assert most is not None
    logprobs = token_logprobs(hidden, targets, most, logits_of)
    del request.prompt_logprobs[chunk.start :]  # in case the chunk is computed again
    request.prompt_logprobs += logprobs


def token_logprobs(
    hidden: Tensor, targets: Sequence[int], most: int, logits_of: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens `targets` that follow the first hidden states [n, D], and of
    the `most` likeliest tokens. Computes few logits at once."""
    logprobs: list[TokenLogprobs] = []
    size = 1  # the first row shows the width of the logits
    while len(logprobs) < len(targets):
        part = slice(len(logprobs), len(logprobs) + size)
        logits = logits_of(hidden[: len(targets)][part])
        logprobs += logprobs_of(logits, targets[part], most)
        size = max(1, MOST // logits.shape[-1])
    return logprobs


def logprobs_of(logits: Tensor, targets: Sequence[int], most: int) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens `targets` that follow each row of logits [n, V], and of the
    `most` likeliest tokens."""
    logs = logits.float().log_softmax(-1)
    tokens = torch.tensor(targets, device=logits.device)[:, None]
    chosen = logs.gather(-1, tokens)
    ranks = (logs > chosen).sum(-1).add_(1).tolist()
    values, ids = logs.topk(min(most, logs.shape[-1]))
    rows = zip(chosen[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(
            chosen=chosen_logprob, rank=rank, top=tuple(zip(top, top_logprobs, strict=True))
        )
        for chosen_logprob, rank, top, top_logprobs in rows
    ]
