"""Maps that rebuild keys, as `rebuilt.cu` reads them.

Shapes: Hk KV heads, P products of 16 numbers of a latent, F pairs, the first half of them rebuilt
(`fast`); 32 threads, of which thread 4 g + c has column g and numbers 2 c, 2 c + 1, 2 c + 8,
2 c + 9 of a product's second operand.
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

NONE = -1


@dataclass(frozen=True, eq=False)
class RebuiltMaps:
    """A layer's maps: `data` uint8; constants: what `rebuilt.cu` wants, where parts begin too."""

    data: Tensor
    constants: Constants


def drift_of(maps: KeyMaps, head_dim: int, queries: int) -> Drift | None:
    """How slow pairs turn; None where half of them does not do so slowly. Found once: waits for
    the device."""
    key = "drift", queries
    if key not in maps.packed:
        maps.packed[key] = find_drift(maps.inv_freq, 2 * fast_pairs(head_dim), queries)
    drift: Drift = maps.packed[key]
    return drift if drift.powers.numel() else None


def pack(maps: KeyMaps, group: Group, head_dim: int, queries: int) -> RebuiltMaps:
    """Made once: waits for the device."""
    drift = drift_of(maps, head_dim, queries)
    assert drift is not None, "one pass is planned where half of the pairs turn slowly"
    numbers, factors = _numbers(latents_of(group, "k")[0])
    rank, fast = int(numbers.max()) + 1, drift.fast
    halves = halves_of(maps, rank)  # [Hk, 2, F, rank + 1]
    up, mean = halves[..., :-1], halves[..., -1].transpose(1, 2)
    known = numbers.to(up.device)
    each = up[..., known.clamp(min=0)] * (known != NONE) / factors.to(up.device)
    each = each.half()  # [Hk, 2, F, P, 16]
    parts = {
        "MAP_FAST": _fast(each[:, :, :fast]),
        "MAP_SLOW": _slow(each[:, :, fast:]),
        "MAP_FAST_MEAN": mean[:, :fast].contiguous(),
        "MAP_SLOW_MEAN": mean[:, fast:].contiguous(),
        "MAP_POWERS": drift.powers,
    }
    constants = {
        "PAIRS": maps.rope.shape[1], "FAST": fast, "REACH": drift.reach,
        "POWERS": len(drift.powers), "D": head_dim, "HALF": maps.rotary // 2,
    }  # fmt: skip
    found, end = [], 0
    for name, part in parts.items():
        constants[name] = end
        found.append(part.contiguous().view(-1).view(torch.uint8))
        end += len(found[-1])
    return RebuiltMaps(torch.cat(found), tuple(constants.items()))


def _numbers(keys: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Numbers of a latent by product and place, int64 [P, 16], NONE where none is loaded; and what
    their codes are multiplied by as they are unpacked, fp32."""
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


def _fast(each: Tensor) -> Tensor:
    """[Hk, 2, F, P, 16] -> [Hk, blocks of 8 pairs, P, 32 threads, two columns of tiles, 4]: a
    tile's columns are x, y of 4 pairs."""
    # F: block, tile, pair; 16: half, c, two
    own = each.unflatten(2, (-1, 2, 4)).unflatten(-1, (2, 4, 2))
    # [Hk, xy, block, tile, pair, P, half, c, two] -> block, P, pair, xy, c, tile, half, two
    return own.permute(0, 2, 5, 4, 1, 7, 3, 6, 8)


def _slow(each: Tensor) -> Tensor:
    """[Hk, 2, F, P, 16] -> [Hk, P, blocks of 8 pairs, 32 threads, two columns of tiles, 4]: a
    tile's columns are 8 numbers, its rows x, y of 8 pairs."""
    own = each.unflatten(2, (-1, 2, 4)).unflatten(-1, (2, 8))
    # [Hk, xy, block, half, c, P, tile, g] -> P, block, g, c, tile, half, xy
    return own.permute(0, 5, 2, 7, 4, 6, 3, 1)
