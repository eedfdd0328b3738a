"""Key latents of any width and several bit widths, as the kernel `triton_pieces` reads them.

A segment is divided into pieces of at most `TILE` code words, which a program multiplies at a time.

Shapes as in `latent_decode`; M pieces of all KV heads; L bit widths; W code words of a piece, of C
codes each; F pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from kvfold.layout import LayerSpec
from kvfold.layout.pages import Group
from kvfold.ops.common import pieces
from kvfold.ops.common.pieces import Forms, Place

TILE = {16: 64, 8: 64, 4: 32, 2: 16}  # by bits: most code words of a piece
HEAD_FIELDS = 4  # group, first query head, stride of scales, offset of positions (in int32)
PIECE_FIELDS = 8  # see `KeyPieces`


@dataclass(frozen=True, eq=False)
class KeyPieces:
    """A layer's keys as `piece_score_kernel` reads them.

    heads int32 [Hk, HEAD_FIELDS + L + 1]: HEAD_FIELDS numbers of the head, then the number of its
        first piece of every bit width, and the end of its last ones.
    pieces int32 [M, PIECE_FIELDS]: stride from entry to entry in 16-bit words, width in numbers,
        offset of the first entry in words, offset of its scale, offset from the scale to its zero
        point, numbers of the map before this piece's, first column in the latent, bits.
    cost int32 [Hk]: of a tile of a KV head. The others as in `common.pieces.Pieces`.
    """

    heads: Tensor
    pieces: Tensor
    forms: Forms
    align: int
    cost: Tensor
    scale: int
    zeros: bool
    tracked: bool


def unsupported_reason(layer: LayerSpec, groups: Sequence[Group]) -> str | None:
    """Why the kernels do not support these pages of keys that are reconstructed before RoPE; None
    if they do. As `common.pieces.unsupported_reason`."""
    if layer.keys != "pre_rope":
        return f"keys are stored {layer.keys}: none are reconstructed"
    return pieces.unsupported_reason("latent_decode", groups, joint=True)


@lru_cache(maxsize=4096)
def key_pieces(groups: tuple[Group, ...], queries: int, device: torch.device) -> KeyPieces:
    """List the pieces of a layer's keys, once. queries: query heads per KV head."""
    segments = [x for group in groups for x in group.layout.segments if "k" in x.side]
    widest = pieces.widest_words(segments)
    forms = tuple((bits, min(TILE[bits], words)) for bits, words in widest)
    heads: dict[int, list[int]] = {}
    lines: list[list[int]] = []
    cost: dict[int, int] = {}
    before = 0
    for g, group in enumerate(groups):
        of_head = {h: x for x in pieces.latents_of(group, "k") for h in x[0].heads}
        layout = group.layout
        for head in group.heads:
            starts, work = [], 0
            for bits, words in forms:
                starts.append(len(lines))
                step, column = words * 16 // bits, 0
                for x in of_head.get(head, ()):
                    if x.bits == bits:
                        place = Place.of(group, x)
                        for begin in range(0, x.width, step):
                            width = min(step, x.width - begin)
                            lines.append([
                                place.words, width, place.start + begin * bits // 16, place.scale,
                                place.zero, before, column + begin, bits,
                            ])  # fmt: skip
                            before += words * 16 // bits
                            work += 16 * words
                    column += x.width
            heads[head] = [
                g, head * queries, layout.scales_per_row, layout.blocks.positions.offset // 4,
                *starts, len(lines),
            ]  # fmt: skip
            cost[head] = work + 256
    order = sorted(heads)
    return KeyPieces(
        heads=torch.tensor([heads[h] for h in order], dtype=torch.int32, device=device),
        pieces=torch.tensor(lines or [[0] * PIECE_FIELDS], dtype=torch.int32, device=device),
        forms=forms,
        align=gcd(8, *(x.row_bytes // 2 for x in segments)),
        cost=torch.tensor([cost[h] for h in order], dtype=torch.int32, device=device),
        scale=next((x.layout.scale for x in groups if x.layout.scales_per_row), 2),
        zeros=any(x.layout.has_zero_points for x in groups),
        tracked=groups[0].layout.tracked,
    )
