"""Attention over two sets of entries, merged: against softmax over all of them.

Without a GPU the kernel runs in Triton's interpreter.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.merge import reference, triton
from store_cases import DEVICE
from tolerance import DECODED, rounding

pytestmark = pytest.mark.gpu


def attended(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log2-sum-exp2 of scores [B, H, T, S] in log2 over values [B, H, S, d]."""
    lse = (scores / LOG2_E).logsumexp(-1) * LOG2_E
    return (scores - lse[..., None]).exp2().nan_to_num() @ values, lse


@pytest.mark.parametrize("module", [reference, triton])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "width", "other"), [(1, 128, 128), (3, 24, 9)])
def test_both_sets_share_a_softmax(module, dtype, queries: int, width: int, other: int) -> None:
    torch.manual_seed(0)
    shape, sizes = (2, 3, queries), (5, 7)
    scores = 3 * torch.randn(*shape, sum(sizes), device=DEVICE)
    scores[0, 1, :, : sizes[0]] = -torch.inf  # no entries in the first set
    scores[1, 2, :, sizes[0] :] = -torch.inf  # and none in the second
    values = torch.randn(2, 3, sum(sizes), width, device=DEVICE)
    values[:, :, sizes[0] :, other:] = 0
    expected, total = attended(scores, values)
    sides = zip(scores.split(sizes, -1), values.split(sizes, 2), strict=True)
    (out, lse), (other_out, other_lse) = (attended(*x) for x in sides)
    # Heads behind queries in memory, and beyond the narrow output what nobody may read.
    out = out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    other_out = torch.where(torch.arange(width, device=DEVICE) < other, other_out, torch.nan)
    other_out = other_out.to(dtype)[..., :other]
    found, found_total = module.merged(out, lse, other_out, other_lse)
    assert found.dtype is dtype and found.shape == expected.shape
    error = (found.float() - expected).abs().max()
    assert error <= rounding(dtype, sum(sizes) + 2 * DECODED) * values.abs().max()
    assert torch.allclose(found_total, total, atol=1e-5)


@pytest.mark.parametrize("module", [reference, triton])
def test_sets_without_entries(module) -> None:
    """Their outputs, which nobody wrote, are not read; without any entries the output is 0."""
    nothing = torch.full((1, 1, 2, 16), torch.nan, device=DEVICE)
    lse = torch.tensor([[[-torch.inf, 2.0]]], device=DEVICE)
    other_lse = torch.full_like(lse, -torch.inf)
    out = torch.where(lse.isfinite()[..., None], torch.ones_like(nothing), nothing)
    for inputs in ((out, lse, nothing, other_lse), (nothing, other_lse, out, lse)):
        found, total = module.merged(*inputs)
        assert found[0, 0].tolist() == [[0.0] * 16, [1.0] * 16] and torch.equal(total, lse)
