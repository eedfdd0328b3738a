"""Bases are exact at full rank, predict their error, and survive rank-deficient statistics."""

import pytest
import torch

from kvfold.compress.basis import orthonormal, weight_svd, weighted, whitened_svd

N, D, T = 12, 20, 400


def samples(rank: int = N, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(T, rank, generator=generator, dtype=torch.double)
    return low @ torch.randn(rank, N, generator=generator, dtype=torch.double) + 1.0


def moments(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cov(c.mT, correction=0), c.mean(0)


@pytest.mark.parametrize("rank", [N, 5, 1])
def test_weighted_is_exact_at_full_rank(rank: int) -> None:
    c, g = samples(rank), samples(rank, seed=1)
    basis = weighted(*(moments(c)[0], g.mT @ g / T, moments(c)[1]))
    eye = torch.eye(N, dtype=torch.double)
    assert torch.allclose(basis.down.mT @ basis.up, eye, atol=1e-7)
    rebuilt = basis.mean + (c - basis.mean) @ basis.down @ basis.up.mT
    assert torch.allclose(rebuilt, c, atol=1e-7)


def test_weighted_predicts_its_error_and_beats_pca() -> None:
    c = samples()
    g = samples(seed=2) * torch.logspace(0, -1, N, dtype=torch.double)
    covariance, mean = moments(c)
    gradient = g.mT @ g / T
    basis, pca = weighted(covariance, gradient, mean), orthonormal(covariance, mean)

    def loss(b, rank: int) -> float:
        e = (c - mean) - (c - mean) @ b.down[:, :rank] @ b.up[:, :rank].mT
        return float(torch.einsum("ti,ij,tj->t", e, gradient, e).mean() / 2)

    for rank in (3, 6, 9):
        assert basis.error(rank) == pytest.approx(loss(basis, rank), rel=2e-2)
        assert loss(basis, rank) < loss(pca, rank)


def test_orthonormal_equals_the_svd_of_the_rows() -> None:
    rows = samples()
    basis = orthonormal(rows.mT @ rows, torch.zeros(N, dtype=torch.double))
    _, s, vt = torch.linalg.svd(rows, full_matrices=False)
    assert torch.allclose(basis.singular, s, rtol=1e-8)
    assert torch.allclose((basis.down.mT @ vt.mT).abs(), torch.eye(N).double(), atol=1e-6)


def test_whitened_svd_equals_the_published_form() -> None:
    """Palu / SVD-LLM: truncate W L with L L^T = E[x x^T], undo L."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(T, D, generator=generator).double() * torch.linspace(0.1, 2, D)
    w = torch.randn(N, D, generator=generator).double()
    bias = torch.randn(N, generator=generator).double()
    outputs = x @ w.mT + bias
    basis = whitened_svd(outputs.mT @ outputs / T, outputs.mean(0), bias, N)
    root = torch.linalg.cholesky(x.mT @ x / T)
    u, s, vt = torch.linalg.svd(w @ root, full_matrices=False)
    for rank in (2, 6):
        published = (u[:, :rank] * s[:rank]) @ vt[:rank] @ torch.linalg.inv(root)
        ours = basis.up[:, :rank] @ basis.down[:, :rank].mT @ w
        assert torch.allclose(published, ours, atol=1e-8)


def test_weight_svd_is_the_truncated_svd() -> None:
    w = torch.randn(N, D, generator=torch.Generator().manual_seed(4)).double()
    basis = weight_svd(w, torch.zeros(N).double())
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    ours = basis.up[:, :4] @ basis.down[:, :4].mT @ w
    assert torch.allclose(ours, (u[:, :4] * s[:4]) @ vt[:4], atol=1e-10)


def test_truncated_maps_are_scaled_to_unit_rms() -> None:
    c = samples()
    covariance, mean = moments(c)
    basis = weighted(covariance, torch.eye(N).double(), mean).measured(covariance)
    down, up = basis.truncated(5)
    z = (c - mean) @ down
    assert float(z.square().mean()) == pytest.approx(1.0, rel=1e-6)
    assert torch.allclose(down.mT @ up, torch.eye(5).double(), atol=1e-7)
