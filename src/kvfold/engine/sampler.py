"""From logits to tokens, for all rows at once, each with its own settings and randomness.

Shapes: n rows (one a sequence), V vocabulary, r rows that draw, m rows that want logprobs, k most
top logprobs that one of them wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.engine.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Natural log-probabilities, before temperature and limits.

    rows: the m rows that want them. ids int64 [m, 1 + k], values fp32 [m, 1 + k]: the chosen token,
    then the likeliest ones, best first.
    """

    rows: tuple[int, ...]
    ids: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """On the logits' device. tokens int64 [n]; bad bool [n]: rows with NaN or without a finite
    maximum, whose token means nothing."""

    tokens: Tensor
    bad: Tensor
    logprobs: Logprobs | None

    def choices(self, params: Sequence[SamplingParams]) -> list["Choice"]:
        """On the host; waits for the device. `params`: those it was sampled with."""
        tokens, bad = torch.stack((self.tokens, self.bad.long())).tolist()
        found: dict[int, TokenLogprobs] = {}
        if x := self.logprobs:
            for row, ids, values in zip(x.rows, x.ids.tolist(), x.values.tolist(), strict=True):
                top = tuple(zip(ids[1:], values[1:], strict=True))[: params[row].logprobs]
                found[row] = TokenLogprobs(chosen=values[0], top=top)
        return [
            Choice(token=None if bad[i] else token, logprobs=found.get(i))
            for i, token in enumerate(tokens)
        ]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One row's token, None if its logits were bad, and its logprobs if it wants them."""

    token: int | None
    logprobs: TokenLogprobs | None


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
) -> Sampled:
    """One token a row of logits [n, V] fp32. A row's token depends on nothing in other rows.

    generators: CPU generator of every row that is not greedy; it gives one number. Never waits for
    the device.
    """
    assert logits.shape[0] == len(params) == len(generators), (logits.shape, len(params))
    most, tokens = logits.max(-1)
    rows = [i for i, p in enumerate(params) if not p.greedy]
    if rows:
        uniform = _uniform([generators[i] for i in rows]).to(logits.device)
        chosen = [params[i] for i in rows]
        tokens[rows] = _draw(_limit(_scale(logits[rows], chosen), chosen), uniform)
    bad = ~most.isfinite()  # the maximum of a row with a NaN is NaN
    return Sampled(tokens=tokens, bad=bad, logprobs=_logprobs(logits, tokens, params))


def _uniform(generators: Sequence[torch.Generator | None]) -> Tensor:
    """fp64 [r] in [0, 1): one number from every generator."""
    return torch.stack(
        [torch.rand((), generator=generator, dtype=torch.float64) for generator in generators]
    )


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=torch.float64)[:, None]


def _scale(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature [r, V]; the maximum goes first, so that nothing overflows."""
    temperature = _column([p.temperature for p in params], logits).to(logits.dtype)
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def _limit(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """-inf outside the top k, and of those outside the fewest whose probability reaches top p."""
    if all(p.top_k is None and p.top_p == 1 for p in params):
        return scaled
    vocab = scaled.shape[-1]
    # float(inf): rounding of the running sum must not cut a row that asked for no limit.
    top_p = _column([p.top_p if p.top_p < 1 else float("inf") for p in params], scaled)
    top_k = _column([p.top_k or vocab for p in params], scaled)
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    within = torch.arange(vocab, device=scaled.device) < top_k
    probabilities = values.masked_fill(~within, -torch.inf).softmax(-1, dtype=torch.float64)
    within &= probabilities.cumsum(-1) - probabilities < top_p
    return scaled.masked_fill(torch.zeros_like(within).scatter(-1, order, ~within), -torch.inf)


def _draw(scaled: Tensor, uniform: Tensor) -> Tensor:
    """The token where the running sum of probabilities passes uniform, int64 [r].

    fp64: a sum over a large vocabulary must not lose the rare tokens. One number a row, not V, so
    that a request's own generator costs little.
    """
    cdf = scaled.softmax(-1, dtype=torch.float64).cumsum(-1)
    found = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
    return found.squeeze(-1).clamp(max=scaled.shape[-1] - 1)  # NaN rows run past the end


def _logprobs(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> Logprobs | None:
    counts = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    if not counts:
        return None
    rows = list(counts)
    logs, chosen = logits[rows].log_softmax(-1), tokens[rows, None]
    values, ids = logs.topk(min(max(counts.values()), logits.shape[-1]))
    return Logprobs(
        rows=tuple(rows),
        ids=torch.cat([chosen, ids], -1),
        values=torch.cat([logs.gather(-1, chosen), values], -1),
    )
