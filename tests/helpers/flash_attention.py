"""vLLM's FlashAttention 3, played by PyTorch on a CPU."""

from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float, causal: bool, softcap: float,
    window_size: list[int] | None, fa_version: int, out: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """One request, by FlashAttention's rules: the last query sees seqused_k tokens, each query
    before it one less."""
    assert causal and fa_version == 3 and k.shape == v.shape == (1, max_seqlen_k, *k.shape[2:])
    assert cu_seqlens_q.tolist() == [0, max_seqlen_q] and q.shape[0] == max_seqlen_q
    assert q.shape[-1] % 8 == 0 and not any(x % 8 for t in (q, k, v) for x in t.stride()[:-1])
    count, group = int(seqused_k), q.shape[1] // k.shape[2]
    k, v = (x[0, :count].float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query, token = torch.arange(count - len(q), count)[:, None], torch.arange(count)
    seen = token <= query
    if window_size is not None:
        assert window_size[1] == 0
        seen = seen & (token >= query - window_size[0])
    scores = scores.masked_fill(~seen, float("-inf"))
    result = torch.einsum("hts,shd->thd", scores.softmax(-1), v).to(q.dtype)
    result = result if out is None else out.copy_(result)
    if not return_softmax_lse:
        return result
    sums = scores.logsumexp(-1)
    return result, sums.masked_fill(~seen.any(-1), float("inf"))  # as some versions do
