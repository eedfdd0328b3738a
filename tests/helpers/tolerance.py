"""How far apart two correct implementations of one formula may be, derived from their arithmetic.

Every rounded operation returns x (1 + d) with |d| <= u, where u is half of the dtype's eps. A value
that went through n such operations is off by at most gamma(n) times the sum of the absolute values
it was added up from, whatever the order of the additions and with or without fused multiply-adds:

    gamma(n) = n u / (1 - n u)                Higham, Accuracy and Stability, 2nd ed., eq. 3.5
    gamma(n) = 6 sqrt(n) u                    Higham and Mary 2019, theorem 2.4, with lambda = 6

The first holds always. The second takes roundings to be independent; a sum then breaks it with a
probability below 2 n exp(-18), and in fact far more rarely, since it bounds every partial sum by
the last. The smaller of the two is taken. No constant was fitted to what a machine measured.
"""

from math import e, log2, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

LAMBDA = 6
DECODED = 8  # roundings of a stored number, of a scale and of an exponential, beside the sums


def gamma(dtype: torch.dtype, terms: int) -> float:
    """Relative error of a value after `terms` roundings."""
    u = torch.finfo(dtype).eps / 2
    assert terms * u < 0.1, f"{terms} roundings of {dtype} leave nothing to compare"
    return min(terms * u / (1 - terms * u), LAMBDA * sqrt(terms) * u)


def rounding(dtype: torch.dtype, terms: int) -> float:
    """Largest difference of two implementations, each within gamma(terms) of the exact value,
    relative to the sum of the absolute values of what is added up.

    terms: roundings on the longest way from an input to the result: one for each product of a sum
    and for each other operation; sums that feed sums add theirs.
    """
    return 2 * gamma(dtype, terms)


class AttentionErrors(NamedTuple):
    """Largest error of outputs [N, dv], weights [N, T] and log2-sum-exp2s [N]; float64."""

    out: Tensor
    weights: Tensor
    lse: Tensor


def attention_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sizes: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionErrors:
    """Of softmax(q k^T scale) v in `dtype`, to first order: q [N, dk], k [T, dk], v [T, dv].

    sizes: what the numbers of k and v are summed from, without signs, where that is more than they
    are themselves. A score sums dk products, so it is off by ds = gamma(dk + 8) scale |q| |k|^T.
    That moves a weight p by p (ds + sum p ds), and an output by sum p ds |v - out|. Sums of T
    exponentials and of T values add gamma(T + 8) to a weight, and gamma(2 T + 8) sum p |v| to an
    output.
    """
    q, k, v = q.double(), k.double(), v.double()
    of_k, of_v = (k.abs(), v.abs()) if sizes is None else (x.double() for x in sizes)
    rows, scores = len(k), q @ k.T * scale
    weights = scores.softmax(-1)
    moved = weights * gamma(dtype, q.shape[1] + DECODED) * scale * (q.abs() @ of_k.T)  # p ds
    away = (v - (weights @ v)[:, None]).abs()  # [N, T, dv]
    out = (moved[..., None] * away).sum(1) + gamma(dtype, 2 * rows + DECODED) * (weights @ of_v)
    sums = gamma(dtype, rows + DECODED)
    off = moved + weights * (moved.sum(-1, keepdim=True) + sums)
    lse = moved.sum(-1) + sums * (1 + scores.logsumexp(-1).abs())
    return AttentionErrors(out, off, lse * log2(e))


def model_terms(config: PreTrainedConfig, tokens: int) -> int:
    """Roundings from an embedding to a logit where each token attends to at most `tokens`.

    In a layer: two norms, the sums of q, k and v, of scores, of the softmax, of values, of the
    output, and of both products of the MLP; then the last norm and the product with the head.
    """
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or config.ffn_dim
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = hidden + head + 2 * tokens + head * config.num_attention_heads
    layer = 2 * hidden + attention + hidden + inner
    return config.num_hidden_layers * layer + 2 * hidden


def logit_rounding(config: PreTrainedConfig, tokens: int, logits: Tensor) -> float:
    """Largest difference of the logits of two implementations of a model.

    Takes it that no layer amplifies relative errors, which norms before each and a residual stream
    beside them keep from happening in small random models.
    """
    return rounding(logits.dtype, model_terms(config, tokens)) * float(logits.abs().max())


def flipped(found: list[Tensor], wanted: list[Tensor]) -> float:
    """How far the rows of quantised caches differ, each relative to the largest number of its
    layer, summed. A number that rounding leaves halfway between two codes may take either, so that
    it moves by a whole step; as all else from then on by at most that share of its size."""
    moved = zip(found, wanted, strict=True)
    return float(sum((x - y).abs().sum() / y.abs().max() for x, y in moved))


def assert_same_logits(
    found: Tensor, wanted: Tensor, config: PreTrainedConfig, tokens: int, codes: float = 0.0
) -> None:
    """Of a model whose tokens attend to at most `tokens`. codes: what `flipped` says."""
    atol = logit_rounding(config, tokens, wanted) + codes * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)
