"""Orthogonal rotations that spread outliers over a latent before it is quantised.

Shapes: n numbers of a latent that are quantised together.
"""

import torch
from torch import Tensor


def rotation(n: int, seed: int = 0) -> Tensor:
    """An orthogonal fp64 [n, n], Q^T Q = I to 1e-12, for latents z Q; its maps absorb it.

    n a power of two: random signs, then the Sylvester-Hadamard matrix / sqrt(n), whose entries all
    have one magnitude (Palu §3.4; the signs keep it from lining up with structure in z). Any other
    n: a random orthogonal matrix, the sign-fixed Q of a Gaussian's QR (Mezzadri 2007), since
    Hadamard matrices of most other orders do not exist. The same for equal (n, seed).
    Raises ValueError for a negative n.
    """
    if n < 0:
        raise ValueError(f"n must be a width of at least 0 numbers, got {n}; pass a latent's rank")
    generator = torch.Generator().manual_seed(seed)
    if n.bit_count() == 1:
        signs = torch.randint(0, 2, (n, 1), generator=generator).double() * 2 - 1
        return signs * _hadamard(n) / n**0.5
    q, r = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()


def _hadamard(n: int) -> Tensor:
    """Sylvester's +-1 matrix [n, n] of a power of two: H_2m = [[H, H], [H, -H]]."""
    corner = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.kron(corner, h)
    return h
