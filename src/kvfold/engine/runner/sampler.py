"""From logits to tokens, for all rows at once, each with its own settings and randomness.

Shapes: n rows (one a sequence), V vocabulary, r rows that draw, m rows that want logprobs, k most
top logprobs that one of them wants.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from kvfold.engine.requests.request import SamplingParams, TokenLogprobs
from kvfold.engine.runner.edits import Edits
from kvfold.ops.common.launch import Download, upload
from kvfold.ops.noise import add_gumbel, keys_of
from kvfold.utils.errors import SettingError

BAD = -1  # in place of a token on its way to the host
BLOCK = 2**19  # logits that a CPU works on at once: more of them leave its caches


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Natural log-probabilities, before temperature and limits.

    rows: the m rows that want them. ids int64 [m, 1 + k], values fp32 [m, 1 + k]: the chosen token,
    then the likeliest ones, best first.
    """

    rows: tuple[int, ...]
    ids: Tensor
    values: Tensor


class Sampled:
    """On the logits' device, and from there on their way to the host. tokens int64 [n]; bad bool
    [n]: rows with NaN or without a finite maximum, whose token means nothing."""

    def __init__(self, tokens: Tensor, bad: Tensor, logprobs: Logprobs | None) -> None:
        self.tokens, self.bad, self.logprobs = tokens, bad, logprobs
        more = (logprobs.ids, logprobs.values) if logprobs else ()
        self._sent = Download(tokens.masked_fill(bad, BAD), *more)

    def choices(self, params: Sequence[SamplingParams]) -> list["Choice"]:
        """On the host; waits for the device until the sampling is done, and no longer. `params`:
        those it was sampled with."""
        tokens, *more = (x.tolist() for x in self._sent.wait())
        found: dict[int, TokenLogprobs] = {}
        if x := self.logprobs:
            for row, ids, values in zip(x.rows, *more, strict=True):
                top = tuple(zip(ids[1:], values[1:], strict=True))[: params[row].logprobs]
                found[row] = TokenLogprobs(chosen=values[0], top=top)
        return [
            Choice(token=None if token == BAD else token, logprobs=found.get(i))
            for i, token in enumerate(tokens)
        ]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One row's token, None if its logits were bad or its settings leave none (refusal: why), and
    its logprobs if it wants them."""

    token: int | None
    logprobs: TokenLogprobs | None
    refusal: SettingError | None = None


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    edits: Edits | None = None,
) -> Sampled:
    """One token a row of logits [n, V], of any type. A row's token depends on nothing in other
    rows.

    seeds: of the requests; positions: index of each new token in its sequence. Both say what is
    drawn, and there is no other randomness; a greedy row ignores them. edits: of some logits, which
    logprobs do without. All but a maximum is computed in fp32. Never waits for the device.
    """
    assert len(logits) == len(params) == len(seeds) == len(positions), (logits.shape, len(params))
    applied = None
    if edits is not None:
        logits = logits.float()  # a bias of 16 bits would be another one
        applied = edits.apply(logits)
    most, tokens = logits.max(-1)
    for rows in _blocks(params, logits):
        chosen = [params[i] for i in rows]
        keys = keys_of([seeds[i] for i in rows], [positions[i] for i in rows])
        index, keys = (upload(np.asarray(x), logits.device) for x in (rows, keys))
        scaled = _scale(logits[index].float(), most[index], chosen)
        tokens[index] = _draw(scaled, keys, chosen)
    bad = most - most != 0  # of infinities, and of NaN, which the maximum of a row with one is
    if applied is not None:
        applied.undo()
    return Sampled(tokens, bad, _logprobs(logits, tokens, params))


def _blocks(params: Sequence[SamplingParams], logits: Tensor) -> Iterator[list[int]]:
    """The rows that draw, in blocks that sort as many tokens each and, on a CPU, fit its caches."""
    vocab = logits.shape[-1]
    most = max(1, BLOCK // vocab) if logits.device.type == "cpu" else len(params)
    alike: dict[int, list[int]] = {}
    for i, p in enumerate(params):
        if not p.greedy:
            alike.setdefault(_num_sorted(p, vocab), []).append(i)
    for rows in alike.values():
        for first in range(0, len(rows), most):
            yield rows[first : first + most]


def _num_sorted(params: SamplingParams, vocab: int) -> int:
    """How many of the likeliest tokens a row's limits are about; 0: it has none. In powers of two,
    so that rows share a sort, and a row's own settings alone say how long it is."""
    if params.top_k is None:
        return vocab if params.top_p < 1 else 0
    return min(1 << (params.top_k - 1).bit_length(), vocab)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(np.array(values, dtype=np.float64)[:, None], like.device)


def _scale(logits: Tensor, most: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature [r, V], in place; the maximum goes first, so that nothing
    overflows."""
    temperature = _column([p.temperature for p in params], logits).to(logits.dtype)
    return logits.sub_(most[:, None]).div_(temperature)


def _draw(scaled: Tensor, keys: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The token whose log-probability and noise add up to most, int64 [r]. scaled [r, V], at most
    0, which are overwritten; keys [r]; params: of rows that sort as many tokens."""
    count = _num_sorted(params[0], scaled.shape[-1])
    if any(p.min_p for p in params):
        scaled.masked_fill_(scaled < _column([_log(p.min_p) for p in params], scaled), -torch.inf)
    if not count:
        return add_gumbel(scaled, keys).argmax(-1)
    ids = _likeliest(scaled, count)
    values = _limit(scaled.gather(-1, ids), params)
    found = add_gumbel(values, keys, ids).argmax(-1, keepdim=True)
    return ids.gather(-1, found).squeeze(-1)


def _log(share: float) -> float:
    return log(share) if share else -inf


def _likeliest(scaled: Tensor, count: int) -> Tensor:
    """Ids [r, count] of the largest of scaled [r, V], best first, and of equals the first.

    Numbers of one sign are in order as their bits are, behind which ids settle who is first.
    """
    if scaled.is_cuda and count == scaled.shape[-1]:
        return _sort(scaled)
    ids = torch.arange(scaled.shape[-1], device=scaled.device)
    keys = scaled.abs().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(ids)
    return keys.topk(count, largest=False).values.bitwise_and_(2**32 - 1)


def _sort(scaled: Tensor) -> Tensor:
    """The same of all V, where a topk of so many is slow. Zeros of both signs are equal."""
    return scaled.abs().sort(stable=True).indices


def _limit(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scaled logits [r, m] of the likeliest tokens, best first, with -inf behind the top k, and of
    those behind the fewest whose probability reaches top p."""
    # float(inf): rounding of the running sum must not cut a row that asked for no limit.
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
