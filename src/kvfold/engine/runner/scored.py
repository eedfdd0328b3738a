"""How likely a model finds a prompt: log-probabilities of tokens that were given, as they are read.

Shapes: n tokens of a chunk, D model width, V vocabulary, k most top logprobs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvfold.engine.requests.request import Batch, ScheduledChunk, TokenLogprobs

MOST = 2**24  # logits at once: 64 MiB


def score_prompts(batch: Batch, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Note in requests that want it how likely each token of a prompt was, for those whose
    predecessors a batch holds. hidden [tokens of the batch, D]; logits_of: of rows, [n, V]."""
    end = 0
    for chunk in batch.chunks:
        first, end = end, end + len(chunk.tokens)
        if chunk.scores_prompt:
            _score(chunk, hidden[first:end], logits_of)


def _score(chunk: ScheduledChunk, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    request = chunk.request
    told = request.token_ids[chunk.start + 1 : min(chunk.end + 1, request.num_prompt)]
    most = request.sampling.prompt_logprobs
    assert most is not None
    found: list[TokenLogprobs] = []
    rows = 1  # a first one says how wide logits are
    while len(found) < len(told):
        part = slice(len(found), len(found) + rows)
        logits = logits_of(hidden[: len(told)][part])
        found += logprobs_of(logits, told[part], most)
        rows = max(1, MOST // logits.shape[-1])
    del request.prompt_logprobs[chunk.start :]  # of a chunk that is read once more
    request.prompt_logprobs += found


def logprobs_of(logits: Tensor, told: Sequence[int], most: int) -> list[TokenLogprobs]:
    """Of the tokens told after each row of logits [n, V], the `most` likeliest beside each."""
    logs = logits.float().log_softmax(-1)
    tokens = torch.tensor(told, device=logits.device)[:, None]
    chosen = logs.gather(-1, tokens)
    ranks = (logs > chosen).sum(-1).add_(1).tolist()
    values, ids = logs.topk(min(most, logs.shape[-1]))
    each = zip(chosen[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(chosen=own, rank=rank, top=tuple(zip(top, of_top, strict=True)))
        for own, rank, top, of_top in each
    ]
