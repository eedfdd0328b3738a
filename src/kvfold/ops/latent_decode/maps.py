"""Maps that rebuild keys from latents, as a model has them and as kernels take them.

Shapes as in `latent_decode`; W 16-bit words of a key row, of C codes; K powers of a `Drift`.
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

REACHES = (512, 256, 128, 64)  # rows of a stretch
TOLERANCE = 1e-3  # of a cosine: less than bf16 rounds off
OFFSETS, STEP = 128, 16  # first rows of `exact_table`, and positions from row to row of the others
BIASED = 32.0  # numbers of a key's mean from which fp16 arithmetic is too coarse for it


@dataclass(frozen=True, eq=False)
class KeyMaps:
    """The maps that rebuild a layer's keys.

    layer: its latents; up [Hk, d, r], 0 beyond a head's own rank; mean [Hk, d]; inv_freq fp32
    [w / 2]: angles a position, of the pairs (i, i + w / 2); rope: `rope_table` of these for all
    positions, which layers may share; scaling: of the rotated dims (attention_scaling of
    transformers). exact: `exact_table` of the same, made where it is None. packed: what kernels
    made of them, by their own key.
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
        return 2 * len(self.inv_freq)

    @cached_property
    def angles(self) -> Tensor:
        """`exact_table`."""
        if self.exact is not None:
            return self.exact
        return exact_table(self.inv_freq, self.rope.shape[0] - REACHES[0], self.up.shape[1])

    @cached_property
    def biased(self) -> bool:
        """Whether some number of a mean is BIASED. Waits for the device."""
        return bool(self.mean.abs().max() >= BIASED)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin fp32 [..., w] of positions [...]."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


@dataclass(frozen=True, eq=False)
class Drift:
    """Pairs that turn slowly, from `fast` on: over `reach` rows their cosine and sine are
    polynomials, so that queries go through the map instead of these pairs of every key.

    powers fp32 [K, slow pairs]: coefficients of the offset from the stretch's middle over reach /
    2; even powers make up the cosine, odd ones the sine.
    """

    fast: int
    reach: int
    powers: Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """A layer's maps as kernels take them.

    up A^T [Hk, C, 2, W, F] by code of a word and half of the pairs; beside [Hk / share, C, W, share
    * 2 * fast]: of `share` heads both halves of the pairs that are rebuilt; sums fp32 [Hk, 6, F]:
    halves of mu, of what the codes' middle adds to A z, and of A's sums over the latent. All are
    multiplied by `KeyMaps.scaling` where they are rotated.
    """

    up: Tensor
    beside: Tensor
    share: int
    sums: Tensor
    drift: Drift


def find_drift(inv_freq: Tensor, pairs: int, queries: int) -> Drift:
    """The slower half of `pairs` on the longest stretch that K powers follow; none if none do.

    queries: query heads of a KV head. Waits for the device.
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
    return Drift(pairs, REACHES[0], torch.zeros(num_powers(queries), 0, device=device))


def num_powers(queries: int) -> int:
    """As many as fill the 8 columns of a product, at least 4."""
    return max(4, 8 // power_of_two(queries))


def exact_table(inv_freq: Tensor, positions: int, head_dim: int) -> Tensor:
    """cos and sin fp32 [OFFSETS + ., F, 2] of positions 0 .. OFFSETS - 1, then of every STEP-th of
    as many as `rope_table` has. In fp16 a key's mean of hundreds would be off by what scores feel.
    """
    number = torch.arange(positions + REACHES[0], device=inv_freq.device)
    number = torch.cat((torch.arange(OFFSETS, device=inv_freq.device), number[::STEP]))
    return _turns(inv_freq, number, head_dim)


def _turns(inv_freq: Tensor, number: Tensor, head_dim: int) -> Tensor:
    """cos and sin fp32 [M, F, 2] of positions `number` [M]; dims that are not rotated turn by 0."""
    pairs = torch.zeros(padded_width(head_dim // 2), device=inv_freq.device)
    pairs[: len(inv_freq)] = inv_freq
    angles = number[:, None].float() * pairs
    return torch.stack((angles.cos(), angles.sin()), -1)


def rope_table(inv_freq: Tensor, positions: int, head_dim: int) -> Tensor:
    """cos and sin of positions 0 .. as two fp16s of an int32 [positions + longest reach, F]; dims
    that are not rotated turn by 0. One for all layers with these angles."""
    number = torch.arange(positions + REACHES[0], device=inv_freq.device)
    return _turns(inv_freq, number, head_dim).half().view(torch.int32)[..., 0]


def halves_of(maps: KeyMaps, width: int) -> Tensor:
    """A and mu as the last column, fp32 [Hk, 2, F, width + 1]: both halves of all pairs, 0 beyond
    them and beyond a latent, times `KeyMaps.scaling` where they are rotated."""
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
    """`maps` as kernels take them, made once: waits for the device."""
    bits = groups.bits[0]
    codes, words = 16 // bits, sum(groups.pieces)
    padded = halves_of(maps, codes * words)
    by_code = padded[..., :-1].unflatten(-1, (words, codes)).permute(0, 4, 1, 3, 2)
    each = torch.ones(codes, device=padded.device)
    each[1::2] = 16 if bits == 4 else 1  # unpack leaves these codes as many times as large
    packed = (by_code / each[:, None, None, None]).to(dtype if bits == 16 else torch.float16)
    kept = packed.float()
    total = (kept * each[:, None, None, None]).sum((1, 3))
    low = 0.0 if groups.zeros else (2**bits - 1) / 2
    middle = total * (-low / 2**24)  # in units of unpacked codes
    sums = torch.cat((padded[..., -1], middle, total), 1).contiguous()
    num_pairs = padded.shape[2]
    if groups.tracked:
        drift = no_drift(num_pairs, queries, padded.device)
    else:
        drift = find_drift(maps.inv_freq, num_pairs, queries)
    beside = packed[..., : drift.fast].unflatten(0, (-1, share)).permute(0, 2, 4, 1, 3, 5)
    return Packed(packed.contiguous(), beside.flatten(3).contiguous(), share, sums, drift)
