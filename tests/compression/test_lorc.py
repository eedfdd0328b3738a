"""LoRC's theorems (§5, appendix A) and reconstruction error (eq. 19), on layers of real models."""

import pytest
import torch
from torch import Tensor, nn

from kvfold.compression.basis import weight_svd
from kvfold.compression.ranks.condition import log_conditions
from kvfold.hub.loading import load
from kvfold.models.families import family_of

SILU_SLOPE = 1.1  # the largest slope of SiLU is 1.0999
RANKS = (1, 7, 32, 96)


def model_of(name: str):
    try:
        return load(name, dtype=torch.float32, device="cpu")
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(
    scope="module",
    params=["reference:gqa", pytest.param("reference:smollm2", marks=pytest.mark.real)],
)
def model(request):
    return model_of(request.param)


def projections(model) -> list:
    family = family_of(model.config)
    geometry = family.geometry(model.config)
    return [family.projections(attention, geometry) for attention in family.attentions(model)]


def truncated(w: Tensor, rank: int) -> Tensor:
    """The product that a folded model computes: up down^T W."""
    basis = weight_svd(w, w.new_zeros(len(w)))
    return basis.up[:, :rank] @ basis.down[:, :rank].mT @ w


def inputs(width: int) -> Tensor:
    return torch.randn(16, width, generator=torch.Generator().manual_seed(0)).double()


def test_theorem_1_bounds_the_error_of_a_projection(model) -> None:
    """|W x - W~ x| <= sigma_k+1 |x|, met by the right singular vector of sigma_k+1."""
    for layer in projections(model):
        for w in (layer.k, layer.v):
            _, sigma, vt = torch.linalg.svd(w, full_matrices=False)
            x = inputs(w.shape[1])
            for rank in RANKS:
                lost = w - truncated(w, rank)
                assert ((x @ lost.mT).norm(dim=1) <= sigma[rank] * x.norm(dim=1) * (1 + 1e-9)).all()
                assert torch.isclose((lost @ vt[rank]).norm(), sigma[rank], rtol=1e-6)


def test_theorem_2_bounds_it_behind_a_nonlinearity(model) -> None:
    """|phi(W x) - phi(W~ x)| <= L sigma_k+1 |x|."""
    for layer in projections(model):
        for w in (layer.k, layer.v):
            sigma, x = torch.linalg.svdvals(w), inputs(w.shape[1])
            for rank in RANKS:
                apart = silu(x @ w.mT) - silu(x @ truncated(w, rank).mT)
                assert (apart.norm(dim=1) <= SILU_SLOPE * sigma[rank] * x.norm(dim=1)).all()


def test_theorem_3_as_its_proof_supports_it(model) -> None:
    """The proof's recursion gives |x_L - x~_L| <= sum_i sigma_i L^(L-i+1) prod_j>i |W_j| |x~_i-1|.

    The layers are what attention does to a token that sees itself alone: W_O W_V.
    """
    weights = square_layers(model)
    x = inputs(weights[0].shape[1])
    for rank in RANKS:
        bounds, _, apart = propagate(weights, x, rank)
        assert (apart <= bounds * (1 + 1e-9)).all()
        assert (bounds > 0).all() and torch.isfinite(bounds).all()


def test_theorem_3_as_printed_leaves_out_the_size_of_the_inputs(model) -> None:
    """Eq. 16 has no |x~_i-1|: its left side grows with the input, and its right side does not."""
    weights = square_layers(model)[:1]
    x = inputs(weights[0].shape[1])
    _, printed, apart = propagate(weights, 1e3 * x, 32)
    assert (apart > printed).any()


def propagate(weights: list[Tensor], x: Tensor, rank: int) -> tuple[Tensor, float, Tensor]:
    """(proven bound [N], printed bound, distance [N]) behind layers of rank `rank`; x [N, D]."""
    whole, compressed = x, x
    proven, printed = torch.zeros(len(x)).double(), 0.0
    for w in weights:
        sigma = torch.linalg.svdvals(w)
        own = float(sigma[rank])
        proven = SILU_SLOPE * (float(sigma[0]) * proven + own * compressed.norm(dim=1))
        printed = SILU_SLOPE * float(sigma[0]) * printed + own
        whole, compressed = silu(whole @ w.mT), silu(compressed @ truncated(w, rank).mT)
    return proven, printed, (whole - compressed).norm(dim=1)


def square_layers(model) -> list[Tensor]:
    """W_O W_V of every layer [D, D], values repeated over their query heads."""
    geometry = family_of(model.config).geometry(model.config)
    return [
        layer.o
        @ layer.v.unflatten(0, (geometry.num_kv_heads, -1))
        .repeat_interleave(geometry.queries_per_kv, 0)
        .flatten(0, 1)
        for layer in projections(model)
    ]


def silu(x: Tensor) -> Tensor:
    return nn.functional.silu(x)


def test_equation_19_is_the_share_of_the_dropped_singular_values(model) -> None:
    """|M - M^|_F / |M|_F = sqrt(sum of dropped sigma^2 / sum of all sigma^2)."""
    for layer in projections(model):
        for w in (layer.k, layer.v):
            squares = torch.linalg.svdvals(w).square()
            for rank in RANKS:
                error = (w - truncated(w, rank)).norm() / w.norm()
                assert torch.isclose(error, (squares[rank:].sum() / squares.sum()).sqrt())


def test_cumulative_condition_numbers_fall_with_depth(model) -> None:
    """Eq. 12: what LoRC's threshold can skip is therefore always the first layers."""
    logs = log_conditions(projections(model))
    assert logs == sorted(logs, reverse=True)
