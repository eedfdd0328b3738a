"""What attention over rebuilt keys is given beside pages: packed maps, angles, slices and room.

Shapes as in `rebuild`; GP query heads of a value latent, padded; I items of a pass, S slices of it
(see `plan`); W 16-bit words of a key row, of C codes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.ops.plan import Slices, padded_queries, padded_width, stream_k
from kvfold.ops.rebuild import KeyMaps, RebuildGroups


def rope_table(inv_freq: Tensor, positions: int, head_dim: int) -> Tensor:
    """cos and sin of positions 0 .. as two fp16s of an int32 [positions, F]; dims that are not
    rotated turn by 0. One for all layers with these angles."""
    pairs = torch.zeros(padded_width(head_dim // 2), device=inv_freq.device)
    pairs[: len(inv_freq)] = inv_freq
    angles = torch.arange(positions, device=inv_freq.device)[:, None].float() * pairs
    both = torch.stack((angles.cos(), angles.sin()), -1).half()
    return both.view(torch.int32)[..., 0]


def pack_maps(maps: KeyMaps, about: RebuildGroups, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A^T [Hk, C, 2, W, F] by code of a word and half of the pairs, and fp32 [Hk, 6, F]: halves of
    mu, of what the codes' bits add to A z, negative, and of A's sums over the latent.

    Both are multiplied by `maps.scaling` where they are rotated.
    """
    bits, d, half = about.bits[0], maps.up.shape[1], maps.rotary // 2
    codes, words = 16 // bits, sum(pieces(about))
    up, mean = maps.up.float(), maps.mean.float()
    factor = torch.ones(d, device=up.device)
    factor[: 2 * half] = maps.scaling
    both = torch.cat((up, mean[..., None]), -1) * factor[:, None]
    rest = (d - 2 * half) // 2
    both = torch.cat((both[:, :half], both[:, 2 * half : 2 * half + rest],
                      both[:, half : 2 * half], both[:, 2 * half + rest :]), 1)  # fmt: skip
    padded = both.new_zeros(len(both), 2, padded_width(d // 2), codes * words + 1)
    padded[:, :, : d // 2, : up.shape[-1]] = both[..., :-1].unflatten(1, (2, -1))
    padded[:, :, : d // 2, -1] = both[..., -1].unflatten(1, (2, -1))
    by_code = padded[..., :-1].unflatten(-1, (words, codes)).permute(0, 4, 1, 3, 2)
    each = torch.ones(codes, device=up.device)
    each[1::2] = 16 if bits == 4 else 1  # unpack leaves these codes as many times as large
    packed = (by_code / each[:, None, None, None]).to(dtype if bits == 16 else torch.float16)
    kept = packed.float()
    total = (kept * each[:, None, None, None]).sum((1, 3))
    low = 0.0 if about.zeros else (2**bits - 1) / 2
    extra = -(1024 * kept.sum((1, 3)) + low * total)
    return packed.contiguous(), torch.cat((padded[..., -1], extra, total), 1).contiguous()


def pieces(about: RebuildGroups) -> tuple[int, int]:
    """Words of a key row as two powers of 2, the second 0 where one is as good."""
    words = max(16, about.widths[0] * about.bits[0] // 16)
    first = 1 << (words.bit_length() - 1)
    second = padded_width(words - first) if words > first else 0
    return (first, second) if second < first else (first + second, 0)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How a pass is cut: rows a tile, tiles in flight, warps, slices a multiprocessor, and most
    registers a thread."""

    block: int = 64
    stages: int = 3
    warps: int = 4
    slices: int = 2
    registers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Of both passes; the rows of a value tile divide those of a score tile."""

    scores: Pass = Pass()
    values: Pass = Pass()


@dataclass(frozen=True)
class RebuildPlan:
    """One layer's slices of both passes, int32 [B * G] the first tile of every (sequence, group),
    and room for weights, tops and parts."""

    scores: Slices
    values: Slices
    bases: Tensor
    weights: Tensor
    tops: Tensor
    part: Tensor
    part_ml: Tensor


def plan_rebuild(
    lengths: Tensor,
    about: RebuildGroups,
    queries: int,
    dtype: torch.dtype,
    tuning: Tuning,
    sms: int,
    rows: int,
) -> RebuildPlan:
    """lengths int [B, G] of one layer, which add up to `rows` at most. No host sync."""
    device, group_heads, value_heads = lengths.device, *about.heads
    first, second = tuning.scores, tuning.values
    assert first.block % second.block == 0, "value tiles do not divide score tiles"
    tiles = -(-lengths // first.block)
    scores = _cut(tiles.repeat_interleave(group_heads, 1), first, sms)
    each = (-(-lengths // second.block))[:, about.values[:, 6]]
    values = _cut(each, second, sms)
    bases = tiles.flatten().cumsum(0) - tiles.flatten()
    room, heads = rows // first.block + lengths.numel(), group_heads * queries
    number = sms * second.slices + each.numel()
    # Of codes, at least as many words as a product has rows.
    width = max(padded_width(about.widths[1]), 256 // about.bits[1])
    kept = dtype if about.bits[1] == 16 else torch.float16
    part = torch.empty(number, padded_queries(value_heads * queries), width, device=device)
    return RebuildPlan(
        scores=scores,
        values=values,
        bases=bases.int(),
        weights=torch.empty(room, heads, first.block, dtype=kept, device=device),
        tops=torch.empty(room, heads, device=device),
        part=part,
        part_ml=part.new_empty(number, 2, part.shape[1]),
    )


def _cut(tiles: Tensor, tuning: Pass, sms: int) -> Slices:
    """Tiles [B, .] of equal cost; beginning an item costs as much as one."""
    cost = torch.ones(tiles.numel(), dtype=torch.int64, device=tiles.device)
    return stream_k(tiles.flatten(), cost, 1, sms * tuning.slices)
