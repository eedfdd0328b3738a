"""Sample a token from each row of logits, with its own settings and random numbers.

Shapes: n rows (one per sequence), V vocabulary, r rows that are not greedy, m rows that want
logprobs, k most top logprobs that one of them wants.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from kvfold.engine.requests.request import SamplingParams, TokenLogprobs
from kvfold.engine.runner.edits import LogitEdits
from kvfold.ops.common.launch import Download, upload
from kvfold.ops.noise import add_gumbel, keys_of
from kvfold.utils.errors import SettingError

BAD = -1  # copied to the host instead of the token of a row without finite logits
BLOCK = 2**19  # most logits that a CPU works on at once: more do not fit in its caches


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Natural log-probabilities, before temperature and limits.

    rows: the m rows that want them. ids: int64 [m, 1 + k]. values: fp32 [m, 1 + k]. Of the chosen
        token, then of the likeliest ones, best first.
    """

    rows: tuple[int, ...]
    ids: Tensor
    values: Tensor


class Sampled:
    """Sampled tokens on the logits' device, which are also being copied to the host.

    tokens: int64 [n]. bad: bool [n], rows with NaN or without a finite maximum, whose token has no
        meaning.
    """

    def __init__(self, tokens: Tensor, bad: Tensor, logprobs: Logprobs | None) -> None:
        self.tokens, self.bad, self.logprobs = tokens, bad, logprobs
        more = (logprobs.ids, logprobs.values) if logprobs else ()
        self._sent = Download(tokens.masked_fill(bad, BAD), *more)

    def on_host(self, params: Sequence[SamplingParams]) -> list["SampledToken"]:
        """The sampled tokens on the host. Waits until the copy is done. params: those of the
        sampling."""
        tokens, *more = (x.tolist() for x in self._sent.wait())
        logprobs: dict[int, TokenLogprobs] = {}
        if x := self.logprobs:
            for row, ids, values in zip(x.rows, *more, strict=True):
                top = tuple(zip(ids[1:], values[1:], strict=True))[: params[row].logprobs]
                logprobs[row] = TokenLogprobs(chosen=values[0], top=top)
        return [
            SampledToken(token=None if token == BAD else token, logprobs=logprobs.get(i))
            for i, token in enumerate(tokens)
        ]


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """One row's token, None if its logits were bad or its settings allow none (refusal: why), and
    its logprobs if it wants them."""

    token: int | None
    logprobs: TokenLogprobs | None
    refusal: SettingError | None = None


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    edits: LogitEdits | None = None,
) -> Sampled:
    """Sample one token per row of logits [n, V], of any dtype. A row's token does not depend on
    other rows.

    seeds: of the requests. positions: index of each new token in its sequence. Seed and position
        alone determine the random numbers; greedy rows ignore them. edits: changes of some logits,
        which do not affect logprobs. Everything but the maximum is computed in fp32. Never waits
        for the device.
    """
    assert len(logits) == len(params) == len(seeds) == len(positions), (logits.shape, len(params))
    applied = None
    if edits is not None:
        logits = logits.float()  # a bias would be rounded in 16 bits
        applied = edits.apply(logits)
    most, tokens = logits.max(-1)
    for rows in _blocks(params, logits):
        chosen = [params[i] for i in rows]
        keys = keys_of([seeds[i] for i in rows], [positions[i] for i in rows])
        index, keys = (upload(np.asarray(x), logits.device) for x in (rows, keys))
        scaled = _scale(logits[index].float(), most[index], chosen)
        tokens[index] = _draw(scaled, keys, chosen)
    bad = most - most != 0  # infinity or NaN; the maximum of a row with NaN is NaN
    if applied is not None:
        applied.undo()
    return Sampled(tokens, bad, _logprobs(logits, tokens, params))


def _blocks(params: Sequence[SamplingParams], logits: Tensor) -> Iterator[list[int]]:
    """Split the rows that are not greedy into blocks that sort the same number of tokens and, on a
    CPU, fit in its caches."""
    vocab = logits.shape[-1]
    most = max(1, BLOCK // vocab) if logits.device.type == "cpu" else len(params)
    by_size: dict[int, list[int]] = {}
    for i, p in enumerate(params):
        if not p.greedy:
            by_size.setdefault(_num_sorted(p, vocab), []).append(i)
    for rows in by_size.values():
        for first in range(0, len(rows), most):
            yield rows[first : first + most]


def _num_sorted(params: SamplingParams, vocab: int) -> int:
    """Number of likeliest tokens that a row's top_k and top_p need sorted; 0: it has no such limit.
    A power of two, so that rows share a sort, and determined by the row's settings only."""
    if params.top_k is None:
        return vocab if params.top_p < 1 else 0
    return min(1 << (params.top_k - 1).bit_length(), vocab)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(np.array(values, dtype=np.float64)[:, None], like.device)


def _scale(logits: Tensor, most: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(Logits - maximum) / temperature [r, V], in place. The maximum is subtracted first to avoid
    overflow."""
    temperature = _column([p.temperature for p in params], logits).to(logits.dtype)
    return logits.sub_(most[:, None]).div_(temperature)


def _draw(scaled: Tensor, keys: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sample by the Gumbel-max trick: the token with the largest log-probability plus noise, int64
    [r].

    scaled: [r, V], at most 0, overwritten. keys: [r]. params: of rows that sort the same number of
        tokens.
    """
    count = _num_sorted(params[0], scaled.shape[-1])
    if any(p.min_p for p in params):
        scaled.masked_fill_(scaled < _column([_log(p.min_p) for p in params], scaled), -torch.inf)
    if not count:
        return add_gumbel(scaled, keys).argmax(-1)
    ids = _likeliest(scaled, count)
    values = _limit(scaled.gather(-1, ids), params)
    best = add_gumbel(values, keys, ids).argmax(-1, keepdim=True)
    return ids.gather(-1, best).squeeze(-1)


def _log(share: float) -> float:
    return log(share) if share else -inf


def _likeliest(scaled: Tensor, count: int) -> Tensor:
    """Ids [r, count] of the largest values of scaled [r, V], best first; of equal values the lower
    id first.

    The bits of floats of the same sign order like the floats. The ids are appended to break ties.
    """
    if scaled.is_cuda and count == scaled.shape[-1]:
        return _sort(scaled)
    ids = torch.arange(scaled.shape[-1], device=scaled.device)
    keys = scaled.abs().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(ids)
    return keys.topk(count, largest=False).values.bitwise_and_(2**32 - 1)


def _sort(scaled: Tensor) -> Tensor:
    """The same for all V tokens, for which topk is slow. Zeros of both signs are equal."""
    return scaled.abs().sort(stable=True).indices


def _limit(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set the scaled logits [r, m] of the likeliest tokens, best first, to -inf after the top k,
    and after the fewest tokens whose probability reaches top p."""
    # inf: rounding of the cumulative sum must not cut a row without a limit.
    top_p = _column([p.top_p if p.top_p < 1 else float("inf") for p in params], values)
    top_k = _column([p.top_k or float("inf") for p in params], values)
    within = torch.arange(values.shape[-1], device=values.device) < top_k
    probabilities = values.masked_fill(~within, -torch.inf).softmax(-1, dtype=torch.float64)
    within &= probabilities.cumsum(-1) - probabilities < top_p
    return values.masked_fill(~within, -torch.inf)


def _logprobs(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> Logprobs | None:
    counts = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    if not counts:
        return None
    rows = upload(np.array(list(counts)), logits.device)
    logs, chosen = logits[rows].float().log_softmax(-1), tokens[rows, None]
    values, ids = logs.topk(min(max(counts.values()), logits.shape[-1]))
    return Logprobs(
        rows=tuple(counts),
        ids=torch.cat([chosen, ids], -1),
        values=torch.cat([logs.gather(-1, chosen), values], -1),
    )
