"""Adjust the keys and values of the remaining entries so that attention over them matches attention
over all entries, after Attention Matching (adamzweiger/compaction).

Pure functions that never wait for the device. Shapes: H KV heads, m queries per head, T entries, S
at least the number of remaining entries of any head, dk and dv dimensions of a key and of a value.

On a GPU, keys and values in bf16 or fp16 are attended to by PyTorch's fused kernels, and products
of matrices are in TF32, which holds such numbers exactly. Systems of equations are solved in fp32.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvfold.ops.common.attention import aligned, capped

WEIGHTS, KEYS, VALUES = 0.1, 0.01, 1.0  # ridges, as shares of the mean of the Gram diagonal
MOST = 3.0  # log w is clipped to -MOST .. MOST
SCORES = 2**26  # most attention scores computed at once (at least one head's)
ABSENT = -3e4  # score of an entry that does not exist: its exponential is 0, and fp16 has it
Product = Callable[[Tensor, Tensor], Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs of attention to all entries, [H, m, dv], and log-sum-exps of the scores, fp32
    [H, m, 1].

    q [H, m, dk], scaled, k [H, T, dk] and v [H, T, dv] of one dtype; valid bool [H, T]: entries
    that exist (None: all). A head without entries has any finite outputs.
    """
    if k.is_cuda and k.dtype.itemsize == 2 and softcap is None and k.shape[1]:
        result = _attend_fused(q, k, v, valid)
        if result is not None:
            return result
    valid = torch.ones_like(k[..., 0], dtype=torch.bool) if valid is None else valid
    heads = max(1, SCORES // (q.shape[1] * k.shape[1]))
    chunks = (x.split(heads) for x in (q, k, v, valid))
    outputs, lse = zip(*map(partial(_attend, softcap), *chunks), strict=True)
    return torch.cat(outputs), torch.cat(lse)


def fit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inside: Tensor,
    target: Tensor,
    lse: Tensor,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Fit entries so that attention to them has the outputs `target` and the log-sum-exps `lse`.
    Returns their keys and values in fp32.

    q [H, m, dk], scaled, k [H, S, dk], v [H, S, dv]; inside bool [H, S]: entries that exist.

    Let M [m, S] be the attention weights of the entries in the softmax over all entries.
    w = argmin |M w - 1|^2 makes up for the evicted weight. A key becomes k + log(w) u, where u has
    products closest to 1 with the queries. Then v = argmin |A v - y|^2, where A is the attention
    over these entries and y the target. A ridge keeps w near 1 and v near the stored values.
    """
    product = tf32_product if k.dtype.itemsize == 2 else torch.matmul
    q, k, v, count = q.float(), k.float(), v.float(), inside.sum(-1)
    shares = _scores(q, k, inside, softcap, product).sub_(lse).exp_()
    missing = 1 - shares.sum(-1, keepdim=True)
    w = 1 + ridge_solve(shares, missing, WEIGHTS, count, product)
    u = ridge_solve(q, torch.ones_like(missing), KEYS)
    k = k + w.log().nan_to_num(-MOST).clamp(-MOST, MOST) * u.mT
    del shares
    weights = _scores(q, k, inside, softcap, product).softmax(-1)
    error = target - product(weights, v)
    return k, v + ridge_solve(weights, error, VALUES, count, product)


def tf32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32. A GPU rounds a and b to TF32 first: to 11 significant bits."""
    setting = torch.backends.cuda.matmul
    is_old = not hasattr(setting, "fp32_precision")  # before PyTorch 2.9
    name = "allow_tf32" if is_old else "fp32_precision"
    before = getattr(setting, name)
    setattr(setting, name, True if is_old else "tf32")
    try:
        return a @ b
    finally:
        setattr(setting, name, before)


def ridge_solve(
    a: Tensor,
    b: Tensor,
    ridge: float,
    count: Tensor | None = None,
    product: Product = torch.matmul,
) -> Tensor:
    """Ridge regression: x [.., n, c] that minimises |a x - b|^2 + penalty |x|^2, for a [.., m, n]
    and b [.., m, c].

    count: int [..], how many columns of a exist (None: those that are not 0); others are 0.
    penalty: `ridge` times the mean of the diagonal of a^T a over these columns. The matrix
        to factor then has a condition number of at most 1 + n / ridge, for which fp32 is enough.
    """
    count = a.any(-2).sum(-1) if count is None else count
    wide = a.shape[-1] > a.shape[-2]
    gram = product(a, a.mT) if wide else product(a.mT, a)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    penalty = ridge * diagonal.sum(-1, keepdim=True) / count.clamp(min=1)[..., None]
    diagonal.add_(penalty.clamp(min=torch.finfo(a.dtype).tiny))
    factor, _ = torch.linalg.cholesky_ex(gram)  # unlike `cholesky`, does not wait for the device
    right = b if wide else product(a.mT, b)
    solution = torch.linalg.solve_triangular(factor, right, upper=False)
    solution = torch.linalg.solve_triangular(factor.mT, solution, upper=True)
    return product(a.mT, solution) if wide else solution


def _attend(
    softcap: float | None, q: Tensor, k: Tensor, v: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    scores = _scores(q.float(), k.float(), valid, softcap)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v.float(), lse


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """None if PyTorch has no kernel for them on this GPU."""
    m, dv, bias = q.shape[1], v.shape[-1], None
    q, k, v = (aligned(x[None]) for x in (q, k, v))
    if valid is not None:
        bias = torch.zeros_like(valid, dtype=k.dtype).masked_fill_(~valid, ABSENT)
        bias = aligned(bias)[:, None, : k.shape[2]].expand(-1, m, -1)[None]
    params = torch.backends.cuda.SDPAParams(q, k, v, bias, 0.0, False, False)
    if bias is None and torch.backends.cuda.can_use_flash_attention(params):
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=1.0)
    elif torch.backends.cuda.can_use_efficient_attention(params):
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, scale=1.0
        )
    else:
        return None
    return output[0, ..., :dv], lse[0, :, :m, None]


def _scores(
    q: Tensor,
    k: Tensor,
    inside: Tensor,
    softcap: float | None,
    product: Product = torch.matmul,
) -> Tensor:
    """Scores [H, m, S], ABSENT where there is no entry."""
    return capped(product(q, k.mT), softcap).masked_fill_(~inside[:, None], ABSENT)
