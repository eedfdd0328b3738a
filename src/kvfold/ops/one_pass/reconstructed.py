"""Maps that reconstruct keys, as the one-pass kernel (`reconstructed.cu`) reads them.

Shapes: Hk KV heads, P matrix products of 16 numbers of a latent each, F pairs, the first half of
them (`fast`) reconstructed. Of 32 threads, thread 4 g + c holds column g and numbers 2 c, 2 c + 1,
2 c + 8, 2 c + 9 of a product's second operand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.layout.pages import Group, Segment
from kvfold.ops.common.pieces import latents_of
from kvfold.ops.latent_decode.maps import Drift, KeyMaps, find_drift, halves_of
from kvfold.ops.one_pass.build import Constants
from kvfold.ops.one_pass.rows import fast_pairs

NONE = -1  # no number is loaded in this place


@dataclass(frozen=True, eq=False)
class ReconstructionMaps:
    """A layer's maps.

    data uint8: all tables; constants: what `reconstructed.cu` needs, including each table's offset.
    """

    data: Tensor
    constants: Constants


def drift_of(maps: KeyMaps, head_dim: int, queries: int) -> Drift | None:
    """Return how slow pairs rotate; None if fewer than half of the pairs do so slowly.

    Computed once: waits for the device.
    """
    key = "drift", queries
    if key not in maps.packed:
        maps.packed[key] = find_drift(maps.inv_freq, 2 * fast_pairs(head_dim), queries)
    drift: Drift = maps.packed[key]
    return drift if drift.powers.numel() else None


def pack(maps: KeyMaps, group: Group, head_dim: int, queries: int) -> ReconstructionMaps:
    """Convert a layer's maps for `reconstructed.cu`. Done once per layer: waits for the device."""
    drift = drift_of(maps, head_dim, queries)
    assert drift is not None, "one pass is planned only where half of the pairs rotate slowly"
    numbers, factors = _numbers(latents_of(group, "k")[0])
    rank, fast = int(numbers.max()) + 1, drift.fast
    halves = halves_of(maps, rank)  # [Hk, 2, F, rank + 1]
    up, mean = halves[..., :-1], halves[..., -1].transpose(1, 2)
    loaded = numbers.to(up.device)
    by_product = up[..., loaded.clamp(min=0)] * (loaded != NONE) / factors.to(up.device)
    by_product = by_product.half()  # [Hk, 2, F, P, 16]
    parts = {
        "MAP_FAST": _fast(by_product[:, :, :fast]),
        "MAP_SLOW": _slow(by_product[:, :, fast:]),
        "MAP_FAST_MEAN": mean[:, :fast].contiguous(),
        "MAP_SLOW_MEAN": mean[:, fast:].contiguous(),
        "MAP_POWERS": drift.powers,
    }
    constants = {
        "PAIRS": maps.rope.shape[1], "FAST": fast, "REACH": drift.reach,
        "POWERS": len(drift.powers), "D": head_dim, "HALF": maps.rotary // 2,
    }  # fmt: skip
    tables, end = [], 0
    for name, part in parts.items():
        constants[name] = end
        tables.append(part.contiguous().view(-1).view(torch.uint8))
        end += len(tables[-1])
    return ReconstructionMaps(torch.cat(tables), tuple(constants.items()))


def _numbers(keys: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Return which number of a latent each place of each product holds, int64 [P, 16], NONE where
    none is loaded; and the factor by which unpacking makes it too large, fp32 [P, 16]."""
    places: list[int] = []
    factors: list[float] = []
    column = 0
    for x in keys:
        codes, words = 16 // x.bits, x.row_bytes // 2
        for first in range(0, words, 8):
            for code in range(codes):
                for word in range(first, first + 8):
                    known = word < words
                    places.append(column + word * codes + code if known else NONE)
                    factors.append(2.0 * 2 ** (x.bits * (code % (8 // x.bits))))
        column += x.width
    return torch.tensor(places).view(-1, 16), torch.tensor(factors).view(-1, 16)


def _fast(maps: Tensor) -> Tensor:
    """Arrange the map of fast pairs for the threads: [Hk, 2, F, P, 16] -> [Hk, blocks of 8 pairs,
    P, 32 threads, 2 tile columns, 4].

    A tile's columns are x, y of 4 pairs.
    """
    # F: block, tile, pair; 16: half, c, two
    by_thread = maps.unflatten(2, (-1, 2, 4)).unflatten(-1, (2, 4, 2))
    # [Hk, xy, block, tile, pair, P, half, c, two] -> block, P, pair, xy, c, tile, half, two
    return by_thread.permute(0, 2, 5, 4, 1, 7, 3, 6, 8)


def _slow(maps: Tensor) -> Tensor:
    """Arrange the map of slow pairs for the threads: [Hk, 2, F, P, 16] -> [Hk, P, blocks of 8
    pairs, 32 threads, 2 tile columns, 4].

    A tile's columns are 8 numbers, its rows x, y of 8 pairs.
    """
    by_thread = maps.unflatten(2, (-1, 2, 4)).unflatten(-1, (2, 8))
    # [Hk, xy, block, half, c, P, tile, g] -> P, block, g, c, tile, half, xy
    return by_thread.permute(0, 5, 2, 7, 4, 6, 3, 1)
