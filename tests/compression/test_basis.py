"""Bases are exact at full rank, predict their error, and survive rank-deficient statistics."""

import pytest
import torch

from kvfold.compression.basis import Basis, orthonormal, weight_svd, weighted, whitened_svd

N, D, T = 12, 20, 400


def samples(rank: int = N, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(T, rank, generator=generator, dtype=torch.double)
    return low @ torch.randn(rank, N, generator=generator, dtype=torch.double) + 1.0


def moments(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cov(c.mT, correction=0), c.mean(0)


def dropped(b: Basis, c: torch.Tensor, gradient: torch.Tensor, kept: slice) -> float:
    """Nats a token of rows that are rebuilt from some directions."""
    e = (c - b.mean) - (c - b.mean) @ b.down[:, kept] @ b.up[:, kept].mT
    return float(torch.einsum("ti,ij,tj->t", e, gradient, e).mean() / 2)


@pytest.mark.parametrize("rank", [N, 5, 1])
def test_weighted_is_exact_at_full_rank(rank: int) -> None:
    c, g = samples(rank), samples(rank, seed=1)
    basis = weighted(*(moments(c)[0], g.mT @ g / T, moments(c)[1]))
    eye = torch.eye(N, dtype=torch.double)
    assert torch.allclose(basis.down.mT @ basis.up, eye, atol=1e-7)
    rebuilt = basis.mean + (c - basis.mean) @ basis.down @ basis.up.mT
    assert torch.allclose(rebuilt, c, atol=1e-7)


def pair_with_first(rank: int, first: torch.Tensor | None) -> tuple[Basis, torch.Tensor]:
    """A basis of samples of a rank that know a first token, and their mean."""
    c, g = samples(rank), samples(seed=1)
    covariance, mean = moments(c)
    return weighted(covariance, g.mT @ g / T, mean, first), mean


FIRST = 30 * torch.randn(N, generator=torch.Generator().manual_seed(9)).double()


@pytest.mark.parametrize("rank", [N, 5, 1, 0])
def test_the_first_token_has_a_direction_of_its_own(rank: int) -> None:
    basis, mean = pair_with_first(rank, FIRST)
    eye = torch.eye(N, dtype=torch.double)
    assert torch.allclose(basis.down.mT @ basis.up, eye, atol=1e-7)
    for kept in range(1, N + 1):
        down, up = basis.down[:, :kept], basis.up[:, :kept]
        back = mean + up @ (down.mT @ (FIRST - mean))
        assert torch.allclose(back, FIRST, atol=1e-8 * float(FIRST.abs().max()))
    assert (basis.singular.diff() <= 0).all() and basis.width == N


def test_a_first_token_where_no_other_goes_stays_in_range() -> None:
    """The others do not vary along its share: float32 must still hold both maps."""
    away = FIRST / FIRST.norm()
    c = samples(5) - 1
    c = c - (c @ away)[:, None] * away
    basis = weighted(c.mT @ c / T, torch.eye(N).double(), torch.zeros(N).double(), FIRST)
    assert basis.down.abs().max() < 1e6 and basis.up.abs().max() < 1e6
    assert torch.allclose(basis.down.mT @ basis.up, torch.eye(N).double(), atol=1e-7)


def test_the_first_direction_costs_what_others_lose_without_it() -> None:
    """Where all that is felt lies along the first token, nothing else says that it matters."""
    c, away = samples(), FIRST / FIRST.norm()
    covariance, mean = moments(c)
    gradient = torch.outer(away, away) + 1e-6 * torch.eye(N, dtype=torch.double)
    basis = weighted(covariance, gradient, mean, mean + FIRST)
    lost = dropped(basis, c, gradient, slice(1, N))
    assert lost > 100 * float(basis.loss[1])
    assert float(basis.loss[0]) == pytest.approx(lost, rel=2e-2)
    variance = basis.down[:, 0] @ covariance @ basis.down[:, 0]
    felt = basis.up[:, 0] @ gradient @ basis.up[:, 0]
    assert float(variance) == pytest.approx(float(felt), rel=2e-2)


def clusters() -> tuple[torch.Tensor, torch.Tensor]:
    """Nine rows in ten near one place, the others far from it, and what is felt of either."""
    c = samples() / 10
    c[::10, 0] += 1000
    return c, samples(seed=1)


@pytest.mark.parametrize("fixed", [False, True])
def test_numbers_count_from_a_first_token_among_the_others(fixed: bool) -> None:
    c, g = clusters()
    covariance, mean = moments(c)
    gradient = g.mT @ g / T
    basis = weighted(covariance, gradient, mean, c[1], fixed=fixed)
    assert torch.equal(basis.mean, mean if fixed else c[1])
    z = ((c - basis.mean) @ basis.down)[:, 0].abs()
    assert (z.median() < 0.01 * z.max()) is not fixed
    assert float(basis.loss[0]) == pytest.approx(dropped(basis, c, gradient, slice(1, N)), rel=2e-2)
    for kept in range(1, N + 1):
        error = (c[1] - basis.mean) - basis.up[:, :kept] @ (
            basis.down[:, :kept].mT @ (c[1] - basis.mean)
        )
        assert error.norm() < 1e-8 * c[1].norm()


def test_a_first_token_like_the_others_changes_nothing() -> None:
    plain, mean = pair_with_first(N, None)
    same, _ = pair_with_first(N, mean)
    for name in ("down", "up", "mean", "singular"):
        assert torch.equal(getattr(plain, name), getattr(same, name))
    other, _ = pair_with_first(N, FIRST)
    assert not torch.allclose(plain.down, other.down)


def test_what_a_first_token_leaves_is_kept_as_well_as_by_the_plain_pair() -> None:
    """One direction is spent on it: rank r + 1 loses no more of the others than rank r did."""
    c, g = samples(), samples(seed=1) * torch.logspace(0, -1, N, dtype=torch.double)
    covariance, mean = moments(c)
    gradient = g.mT @ g / T
    plain, ours = weighted(covariance, gradient, mean), weighted(covariance, gradient, mean, FIRST)
    for rank in (3, 6, 9):
        least = dropped(plain, c, gradient, slice(rank))
        assert dropped(ours, c, gradient, slice(rank + 1)) <= 1.001 * least


def test_weighted_predicts_its_error_and_beats_pca() -> None:
    c = samples()
    g = samples(seed=2) * torch.logspace(0, -1, N, dtype=torch.double)
    covariance, mean = moments(c)
    gradient = g.mT @ g / T
    basis, pca = weighted(covariance, gradient, mean), orthonormal(covariance, mean)
    for rank in (3, 6, 9):
        lost = dropped(basis, c, gradient, slice(rank))
        assert float(basis.loss[rank:].sum()) == pytest.approx(lost, rel=2e-2)
        assert lost < dropped(pca, c, gradient, slice(rank))


def test_orthonormal_equals_the_svd_of_the_rows() -> None:
    rows = samples()
    basis = orthonormal(rows.mT @ rows, torch.zeros(N, dtype=torch.double))
    _, s, vt = torch.linalg.svd(rows, full_matrices=False)
    assert torch.allclose(basis.singular, s, rtol=1e-8)
    assert torch.allclose((basis.down.mT @ vt.mT).abs(), torch.eye(N).double(), atol=1e-6)


def published_palu(x: torch.Tensor, w: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
    """Palu's release: W L = U S V^T with L L^T = E[x x^T]; B = U sqrt(S), A = sqrt(S) V^T L^-1."""
    root = torch.linalg.cholesky(x.mT @ x / len(x))
    u, s, vt = torch.linalg.svd(w @ root, full_matrices=False)
    half = s[:rank].sqrt()
    return u[:, :rank] * half, half[:, None] * vt[:rank] @ torch.linalg.inv(root)


@pytest.mark.parametrize("rank", [2, 6, N])
def test_whitened_svd_equals_the_published_form(rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(T, D, generator=generator).double() * torch.linspace(0.1, 2, D)
    w = torch.randn(N, D, generator=generator).double()
    bias = torch.randn(N, generator=generator).double()
    outputs = x @ w.mT + bias
    basis = whitened_svd(outputs.mT @ outputs / T, outputs.mean(0), bias, N)
    up, down = published_palu(x, w, rank)
    signs = torch.sign((basis.up[:, :rank] * up).sum(0))
    assert torch.allclose(basis.up[:, :rank] * signs, up, atol=1e-6)
    assert torch.allclose(basis.down[:, :rank].mT @ w * signs[:, None], down, atol=1e-6)


def test_whitened_numbers_have_the_roots_of_the_singular_values_as_rms() -> None:
    c = samples()
    raw, bias = c.mT @ c / T, torch.zeros(N).double()
    basis = whitened_svd(raw, c.mean(0), bias, N)
    rms = (c @ basis.down).square().mean(0).sqrt()
    assert torch.allclose(rms, basis.singular.sqrt(), rtol=1e-6)


@pytest.mark.parametrize("rank", [N, 5, 0])
def test_whitened_svd_is_exact_at_full_rank_whatever_is_null(rank: int) -> None:
    c = (samples(rank) - 1) if rank else torch.zeros(T, N).double()
    basis = whitened_svd(c.mT @ c / T, c.mean(0), torch.zeros(N).double(), N)
    eye = torch.eye(N, dtype=torch.double)
    assert torch.allclose(basis.down.mT @ basis.up, eye, atol=1e-9)
    anything = torch.randn(7, N, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose(anything @ basis.down @ basis.up.mT, anything, atol=1e-9)


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
