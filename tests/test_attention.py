"""Attention over transient keys and values, and what fused kernels need of them."""

import torch

from kvfold.ops.attention import aligned, attention


def test_aligned_pads_with_zeros_and_begins_every_row_at_sixteen_bytes() -> None:
    rows = torch.randn(2, 5, 37)
    part = rows[..., 3:14].unsqueeze(1)
    padded = aligned(part)
    assert padded.shape == (2, 1, 5, 16) and padded.is_contiguous()
    assert torch.equal(padded[..., :11], part) and not padded[..., 11:].any()


def test_aligned_leaves_what_fits_and_copies_what_begins_between() -> None:
    rows = torch.randn(2, 1, 5, 32)
    assert aligned(rows) is rows
    shifted = rows[..., 4:20]
    assert torch.equal(aligned(shifted), shifted) and aligned(shifted).storage_offset() == 0
    odd_stride = torch.randn(2, 1, 5, 19)[..., :16]
    assert aligned(odd_stride).is_contiguous()


def test_padding_does_not_change_attention() -> None:
    q, k, v = torch.randn(2, 4, 7, 11), torch.randn(2, 2, 7, 11), torch.randn(2, 1, 7, 5)
    plain, _ = attention(q, k, v, None, 0.3)
    padded, _ = attention(aligned(q), aligned(k), aligned(v), None, 0.3)
    torch.testing.assert_close(padded[..., :5], plain)
