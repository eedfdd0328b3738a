"""Attention over transient keys and values, and what fused kernels need of them."""

import pytest
import torch

from kvfold.ops.common import attention as module
from kvfold.ops.common.attention import aligned, attend_rows, attention, attention_in_place


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


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_of_too_many_numbers_are_attended_head_by_head(monkeypatch, softcap) -> None:
    """Fused attention in CUDA was wrong beyond 2^32 numbers of a sequence."""
    q, k, v = torch.randn(2, 6, 8), torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 12)
    valid = torch.rand(2, 3, 40) > 0.4
    valid[1, 2] = False
    wanted = attend_rows(q, k, v, valid, 0.3, softcap)
    heads = []

    def spy(q, *args, **options):
        heads.append(q.shape[1])
        return attention(q, *args, **options)

    monkeypatch.setattr(module, "attention", spy)
    monkeypatch.setattr(module, "MOST_NUMBERS", 3 * 40 * 12 - 1)
    for x, y in zip(attend_rows(q, k, v, valid, 0.3, softcap), wanted, strict=True):
        torch.testing.assert_close(x, y)
    assert heads == [2, 2, 2]


def test_attention_in_place_reads_what_a_copy_would() -> None:
    """Chunks in any order, heads of unequal length, and garbage where no index points."""
    q, table = torch.randn(2, 2, 3, 16), torch.full((400, 16), torch.nan)
    starts = torch.randperm(24).view(2, 2, 6, 1) * 16  # pages of 8 keys, then 8 values
    index = (starts + torch.arange(8)).view(2, 2, 3, 16).int()
    lengths = torch.tensor([[48, 33], [1, 20]])
    valid = torch.arange(48).view(3, 16) < lengths[..., None, None]
    index = torch.where(valid, index, index[..., :1, :1])
    table[index.flatten().long()] = torch.randn(index.numel(), 16)
    table[index.flatten().long() + 8] = torch.randn(index.numel(), 16)
    found = attention_in_place(q, table, index, valid, 8, 0.3)
    rows = index.flatten(2).long()
    mask = valid.flatten(2)[:, :, None].expand(-1, -1, 3, -1).flatten(1, 2)[:, :, None]
    wanted, _ = attention(q.flatten(1, 2)[:, :, None], table[rows], table[rows + 8], mask, 0.3)
    torch.testing.assert_close(found.flatten(1, 2), wanted[:, :, 0])
