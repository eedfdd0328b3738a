"""Fits to keys and values in bf16, by the fused attention and the TF32 products of a GPU. A CPU
runs plain attention, and rounds the factors of products itself."""

import pytest
import torch
from torch import Tensor

from kvfold.cache.eviction import repair
from kvfold.cache.eviction.repair import WEIGHTS, attend
from repair_cases import fit_to_attention
from store_cases import DEVICE

pytestmark = pytest.mark.gpu
BF16, TF32, FP32 = 2.0**-8, 2.0**-10, 2.0**-23  # spacing of numbers from 1 on


def rows(heads: int, asked: int, count: int, dk: int, dv: int) -> tuple[Tensor, ...]:
    """Queries that have something in common, and each its own entry."""
    generator = torch.Generator().manual_seed(0)
    k, v, q, common = (
        torch.randn(heads, *shape, generator=generator)
        for shape in ((count, dk), (count, dv), (asked, dk), (1, dk))
    )
    own = torch.randint(count, (heads, asked, 1), generator=generator)
    q = (q + k.take_along_dim(own, 1) + 2 * common) * dk**-0.5
    return tuple(x.bfloat16().to(DEVICE) for x in (q, k, v))


def exact(q: Tensor, k: Tensor, v: Tensor, exist: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps in fp64."""
    scores = (q.double() @ k.double().mT).masked_fill(~exist[:, None], -torch.inf)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("count", [64, 301])
@pytest.mark.parametrize("widths", [(32, 32), (20, 36), (128, 128), (320, 320)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("missing", [(), ("flash",), ("flash", "efficient")])
def test_attention_gives_outputs_and_log_sum_exps(
    missing: tuple[str, ...],
    masked: bool,
    widths: tuple[int, int],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all entries, and of those that exist where some do not; also on GPUs that lack kernels."""
    for name in missing:
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda *_: False)
    q, k, v = rows(3, 70, count, *widths)
    exist = torch.ones(3, count, dtype=torch.bool, device=DEVICE)
    if masked:
        exist[0, 5:], exist[1, -20:], exist[2, ::3] = False, False, False
        k, v = (x.masked_fill(~exist[..., None], 1e3) for x in (k, v))
    found = attend(q, k, v, exist if masked else None)
    outputs, lse = exact(q, k, v, exist)
    most = float(v.where(exist[..., None], 0).abs().max())
    # Weights and outputs are rounded to bf16.
    torch.testing.assert_close(found[0].double(), outputs, rtol=0, atol=2 * BF16 * most)
    terms = float(q.double().norm(dim=-1).max() * k.where(exist[..., None], 0).norm(dim=-1).max())
    torch.testing.assert_close(found[1].double(), lse, rtol=0, atol=widths[0] * FP32 * terms)


def test_heads_without_entries_give_finite_numbers() -> None:
    q, k, v = rows(2, 70, 64, 32, 32)
    exist = torch.zeros(2, 64, dtype=torch.bool, device=DEVICE)
    exist[0] = True
    assert all(bool(x.isfinite().all()) for x in attend(q, k, v, exist))


def rounded_product(a: Tensor, b: Tensor) -> Tensor:
    """Factors cut to TF32, as a GPU may do."""
    a, b = ((x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32) for x in (a, b))
    return a @ b


@pytest.mark.parametrize("kept", [24, 90])  # fewer than queries, and more
def test_rounded_factors_leave_a_fit_what_it_is(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of fitted entries are near those of a fit in fp32 on a CPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(repair, "tf32_product", rounded_product)
    q, k, v = rows(4, 60, 128, 32, 32)
    stays = torch.zeros(4, 128, dtype=torch.bool, device=DEVICE)
    heaviest = (q.float() @ k.float().mT).softmax(-1).sum(1).topk(kept).indices
    stays.scatter_(1, heaviest, True)
    every = torch.ones_like(stays)
    found = fit_to_attention(q, k, v, every, stays, kept)
    wide_q, wide_k, wide_v = (x.float().cpu() for x in (q, k, v))
    plain = fit_to_attention(wide_q, wide_k, wide_v, every.cpu(), stays.cpu(), kept)
    assert torch.equal(found.places.cpu(), plain.places)
    outputs = exact(q, found.keys, found.values, found.inside)[0]
    best = exact(q, plain.keys.to(DEVICE), plain.values.to(DEVICE), found.inside)[0]
    # Rounding of a matrix that is factored moves outputs by the root of its condition.
    root = (1 + kept / WEIGHTS) ** 0.5
    off, size = ((x.square().sum((1, 2)).sqrt()) for x in (outputs - best, best))
    assert (off < root * TF32 * size).all()


def test_the_precision_of_products_is_as_before() -> None:
    setting = torch.backends.cuda.matmul.fp32_precision
    a = torch.randn(4, 4, device=DEVICE)
    torch.testing.assert_close(repair.tf32_product(a, a), a @ a, rtol=0, atol=0.1)
    assert torch.backends.cuda.matmul.fp32_precision == setting
