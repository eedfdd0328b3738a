"""Maps that reconstruct keys from latents, as a model has them and as kernels take them.

Shapes as in `latent_decode`; W code words of a key latent, of C codes each; K powers of a `Drift`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvfold.layout import LayerSpec
from kvfold.ops.common.plan import padded_width, power_of_two
from kvfold.ops.latent_decode.groups import LatentGroups

REACHES = (512, 256, 128, 64)  # possible lengths of a stretch, in entries
TOLERANCE = 1e-3  # largest error of a cosine: less than the rounding error of bf16
OFFSETS, STEP = 128, 16  # `exact_table`: first positions, and the step between the others
BIASED = 32.0  # from this absolute value on, a key's mean needs more precision than fp16


@dataclass(frozen=True, eq=False)
class KeyMaps:
    """The maps that reconstruct a layer's keys.

    layer: its latents.
    up [Hk, d, r]: matrices A, zero beyond a head's rank; mean [Hk, d]: mu.
    inv_freq fp32 [w / 2]: angle per position of the pairs (i, i + w / 2).
    rope: `rope_table` of these frequencies for all positions, which layers may share.
    scaling: factor of the rotated dims (attention_scaling of transformers).
    exact: `exact_table` of the same frequencies, computed if None.
    packed: cache of what kernels derive from the maps; each kernel has its key.
    """

    layer: LayerSpec
    up: Tensor
    mean: Tensor
    inv_freq: Tensor
    rope: Tensor
    scaling: float = 1.0
    exact: Tensor | None = None
    packed: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def rotary(self) -> int:
        """Number of rotated dims."""
        return 2 * len(self.inv_freq)

    @cached_property
    def angles(self) -> Tensor:
        """The `exact_table` of these maps."""
        if self.exact is not None:
            return self.exact
        return exact_table(self.inv_freq, self.rope.shape[0] - REACHES[0], self.up.shape[1])

    @cached_property
    def biased(self) -> bool:
        """Whether some number of a mean is at least BIASED. Waits for the device."""
        return bool(self.mean.abs().max() >= BIASED)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin fp32 [..., w] of positions [...]."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


@dataclass(frozen=True, eq=False)
class Drift:
    """RoPE pairs that rotate so slowly that their cosine and sine are polynomials over a stretch.

    For these pairs, from `fast` on, queries are multiplied by the map once per stretch of `reach`
    entries, instead of reconstructing these pairs of every key.
    powers fp32 [K, slow pairs]: coefficients, by powers of the offset from the stretch's middle
    divided by reach / 2; even powers make up the cosine, odd ones the sine.
    """

    fast: int
    reach: int
    powers: Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """A layer's maps as the kernels of `triton` take them.

    up [Hk, C, 2, W, F]: A^T, by code of a word and half of the pairs.
    up_by_share [Hk / share, C, W, share * 2 * fast]: both halves of reconstructed pairs, of
        `share` heads.
    sums fp32 [Hk, 6, F]: both halves of mu, of what the middle code adds to A z, and of the sums of
        A over the latent.
    All are multiplied by `KeyMaps.scaling` where dims are rotated.
    """

    up: Tensor
    up_by_share: Tensor
    share: int
    sums: Tensor
    drift: Drift


def find_drift(inv_freq: Tensor, pairs: int, queries: int) -> Drift:
    """Find the longest stretch over which the slower half of `pairs` follows polynomials of K
    powers; no slow pairs if there is none.

    queries: query heads per KV head. Waits for the device.
    """
    order, fast = num_powers(queries), pairs // 2
    freq = torch.zeros(pairs, dtype=torch.float64)
    freq[: len(inv_freq)] = inv_freq.double().cpu()
    for reach in REACHES if fast >= 16 else ():
        offset = torch.arange(-reach // 2, reach // 2, dtype=torch.float64)
        angles = offset[:, None] * freq[fast:]
        basis = (offset[:, None] * 2 / reach) ** torch.arange(order)
        powers, error = torch.zeros(order, pairs - fast, dtype=torch.float64), 0.0
        for first, wanted in ((0, angles.cos()), (1, angles.sin())):
            powers[first::2] = torch.linalg.lstsq(basis[:, first::2], wanted).solution
            missed = basis[:, first::2] @ powers[first::2] - wanted
            error = max(error, float(missed.abs().max()))
        if error < TOLERANCE:
            return Drift(fast, reach, powers.float().to(inv_freq.device))
    return no_drift(pairs, queries, inv_freq.device)


def no_drift(pairs: int, queries: int, device: torch.device) -> Drift:
    """Return a `Drift` without slow pairs."""
    return Drift(pairs, REACHES[0], torch.zeros(num_powers(queries), 0, device=device))


def num_powers(queries: int) -> int:
    """Number of powers: as many as fill the 8 columns of a matrix product, at least 4."""
    return max(4, 8 // power_of_two(queries))


def exact_table(inv_freq: Tensor, positions: int, head_dim: int) -> Tensor:
    """Return cos and sin fp32 [OFFSETS + ., F, 2] of positions 0 .. OFFSETS - 1, then of every
    STEP-th position that `rope_table` has.

    fp32, because an fp16 cosine times a key's mean of hundreds would change scores noticeably.
    """
    number = torch.arange(positions + REACHES[0], device=inv_freq.device)
    number = torch.cat((torch.arange(OFFSETS, device=inv_freq.device), number[::STEP]))
    return _cos_sin(inv_freq, number, head_dim)


def _cos_sin(inv_freq: Tensor, number: Tensor, head_dim: int) -> Tensor:
    """Return cos and sin fp32 [M, F, 2] of positions `number` [M]; dims that are not rotated have
    angle 0."""
    pairs = torch.zeros(padded_width(head_dim // 2), device=inv_freq.device)
    pairs[: len(inv_freq)] = inv_freq
    angles = number[:, None].float() * pairs
    return torch.stack((angles.cos(), angles.sin()), -1)


def rope_table(inv_freq: Tensor, positions: int, head_dim: int) -> Tensor:
    """Return cos and sin of positions 0 .. as two fp16 numbers in an int32:
    [positions + longest reach, F].

    Dims that are not rotated have angle 0. Layers with these frequencies share one table.
    """
    number = torch.arange(positions + REACHES[0], device=inv_freq.device)
    return _cos_sin(inv_freq, number, head_dim).half().view(torch.int32)[..., 0]


def halves_of(maps: KeyMaps, width: int) -> Tensor:
    """Return A with mu as the last column, split into both halves of all pairs: fp32
    [Hk, 2, F, width + 1].

    Zero beyond the pairs and beyond a latent; multiplied by `KeyMaps.scaling` where dims are
    rotated.
    """
    d, half = maps.up.shape[1], maps.rotary // 2
    up, mean = maps.up.float(), maps.mean.float()
    factor = torch.ones(d, device=up.device)
    factor[: 2 * half] = maps.scaling
    both = torch.cat((up, mean[..., None]), -1) * factor[:, None]
    rest = (d - 2 * half) // 2
    both = torch.cat((both[:, :half], both[:, 2 * half : 2 * half + rest],
                      both[:, half : 2 * half], both[:, 2 * half + rest :]), 1)  # fmt: skip
    padded = both.new_zeros(len(both), 2, padded_width(d // 2), width + 1)
    padded[:, :, : d // 2, : up.shape[-1]] = both[..., :-1].unflatten(1, (2, -1))
    padded[:, :, : d // 2, -1] = both[..., -1].unflatten(1, (2, -1))
    return padded


def pack_maps(
    maps: KeyMaps, groups: LatentGroups, queries: int, dtype: torch.dtype, share: int
) -> Packed:
    """Convert `maps` for the kernels. Done once per layer: waits for the device.

    share: how many KV heads of a `scores_gluon` program read the same latent.
    """
    bits = groups.bits[0]
    codes, words = 16 // bits, sum(groups.pieces)
    padded = halves_of(maps, codes * words)
    by_code = padded[..., :-1].unflatten(-1, (words, codes)).permute(0, 4, 1, 3, 2)
    code_factor = torch.ones(codes, device=padded.device)
    code_factor[1::2] = 16 if bits == 4 else 1  # unpack returns these codes 16 times too large
    packed = (by_code / code_factor[:, None, None, None]).to(dtype if bits == 16 else torch.float16)
    rounded = packed.float()
    total = (rounded * code_factor[:, None, None, None]).sum((1, 3))
    low = 0.0 if groups.zeros else (2**bits - 1) / 2
    middle = total * (-low / 2**24)  # in units of unpacked codes
    sums = torch.cat((padded[..., -1], middle, total), 1).contiguous()
    num_pairs = padded.shape[2]
    if groups.tracked:
        drift = no_drift(num_pairs, queries, padded.device)
    else:
        drift = find_drift(maps.inv_freq, num_pairs, queries)
    up_by_share = packed[..., : drift.fast].unflatten(0, (-1, share)).permute(0, 2, 4, 1, 3, 5)
    return Packed(packed.contiguous(), up_by_share.flatten(3).contiguous(), share, sums, drift)
