"""Rows repaired by benchmarks/repair.py."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import repair


def rows(count: int = 24, d: int = 8, asked: int = 40) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, d, generator=generator) for n in (asked, count, count))
    q[:, 0] += 3  # queries of a model have something in common
    return q, k, v


@pytest.mark.parametrize("how", ["values", "bias", "keys"])
def test_nothing_changes_where_all_rows_stay(how: str) -> None:
    q, k, v = rows()
    for found, wanted in zip(repair.repaired(q, (k, v), (k, v), how)[:2], (k, v), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", ["values", "bias", "keys"])
def test_a_fit_is_nearer_to_what_attention_gave(how: str) -> None:
    q, k, v = rows()
    wanted, mass = (q @ k.mT).softmax(-1) @ v, (q @ k.mT).logsumexp(-1)

    def errors(k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> tuple[float, float]:
        scores = q @ k.mT + bias
        output = (scores.softmax(-1) @ v - wanted).square().sum()
        return float(output), float(((scores.logsumexp(-1) - mass).exp() - 1).square().sum())

    before = errors(k[:12], v[:12], torch.zeros(12))
    after = errors(*repair.repaired(q, (k, v), (k[:12], v[:12]), how))
    assert after[0] < before[0]
    assert after[1] < before[1] or (how == "values" and after[1] == before[1])


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_a_ridge_has_one_least_square(shape: tuple[int, int]) -> None:
    a, b = torch.randn(*shape).double(), torch.randn(shape[0], 3).double()
    x = repair.nearest(a, b, 0.1)
    held = 0.1 * a.square().sum() / shape[1]
    torch.testing.assert_close(a.mT @ (a @ x - b) + held * x, torch.zeros_like(x))
