"""Attention of one new token a sequence over pages whose keys are rebuilt from latents.

Shapes: B sequences, G groups of the layer, H KV heads of a group, Hk = G * H, N query heads of a KV
head, Hq = Hk * N; d head dim, w rotary dims, F their pairs (d / 2, to a power of two), r widest key
rank; S slots, n pages of the longest group, M positions.
Keys are `pre`: the key of head h at position p is R_p (A_h z + mu_h), z the latent that serves h.
Values are latents, attended to as they are. A latent may serve one head, some or all, and may be
both key and value.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvfold.ops.common.attention import attention, rotate
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.store.reference import gather
from kvfold.spec import Latent, LayerSpec
from kvfold.spec.layout import Group, Segment

WIDEST = 512  # numbers of a latent that kernels hold on chip


@dataclass(frozen=True, eq=False)
class KeyMaps:
    """What rebuilds a layer's keys.

    up [Hk, d, r], 0 beyond a head's own rank; mean [Hk, d]; inv_freq fp32 [w / 2]: angles a
    position, of the pairs (i, i + w / 2); scaling: of the rotated dims (attention_scaling of
    transformers). packed: what kernels made of them, by their own key.
    """

    up: Tensor
    mean: Tensor
    inv_freq: Tensor
    scaling: float = 1.0
    packed: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def rotary(self) -> int:
        return 2 * len(self.inv_freq)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin fp32 [..., w] of positions [...]."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


@dataclass(frozen=True, eq=False)
class RebuildGroups:
    """A layer's latents as the kernels read them.

    Rows of both tables, int32 [., 8]: words from row to row, width, words to the first row, fp16s
    to its scale, from row to row of scales and from a scale to its zero; then of keys [Hk, 8]
    int32s to the positions and the group, of values [V, 8] the group and the first query head.
    narrowest: key and value; heads: KV heads of a group, of a value latent and of a key latent
    (consecutive ones; else 1); align: words that divide all of the rows' lengths.
    """

    keys: Tensor
    values: Tensor
    widths: tuple[int, int]
    narrowest: tuple[int, int]
    bits: tuple[int, int]
    zeros: bool
    tracked: bool
    page: int
    align: int
    heads: tuple[int, int, int]


def supports(layer: LayerSpec, groups: Sequence[Group]) -> bool:
    """Whether `rebuild_triton` has kernels for these pages: keys rebuilt before RoPE; latents of
    16, 8 or 4 bits a side, at most WIDEST wide, one scale each, in whole 16-bit words; groups and
    value latents of consecutive heads, as many each."""
    found = [_segments(layer, groups, side) for side in ("k", "v")]
    alike = all(
        len({len(heads) for _, heads in each}) == 1
        and all(_consecutive(heads) for _, heads in each)
        for each in ([(None, group.heads) for group in groups], _served(layer.value_latents))
    )
    return (
        layer.keys == "pre"
        and alike
        and all(x is not None for each in found for x in each)
        and all(len({x.bits for x in each if x}) == 1 for each in found)
        and all(x.width <= WIDEST for each in found for x in each if x)
        and all(_plain(group) for group in groups)
    )


def _served(latents: Sequence[Latent]) -> list[tuple[Latent, tuple[int, ...]]]:
    return [(latent, latent.heads) for latent in latents]


def _consecutive(heads: tuple[int, ...]) -> bool:
    return all(b == a + 1 for a, b in pairwise(heads))


def _plain(group: Group) -> bool:
    layout = group.layout
    return (
        (layout.itemsize == 2 or all(x.quantized for x in layout.segments))
        and layout.known_to("latent_decode")
        and not any(x.bits not in (16, 8, 4) or x.width * x.bits % 16 for x in layout.segments)
        and (layout.scale == 2 or not any(x.quantized for x in layout.segments))
    )


def _segments(layer: LayerSpec, groups: Sequence[Group], side: str) -> list[Segment | None]:
    """The segment of every latent of a side; None where it is not exactly one."""
    whole = {(x.start, x.width): x for group in groups for x in group.layout.segments}
    latents = layer.key_latents if side == "k" else layer.value_latents
    return [whole.get((layer.columns(latent).start, latent.rank)) for latent in latents]


@lru_cache(maxsize=4096)
def rebuild_groups(
    layer: LayerSpec, groups: tuple[Group, ...], queries: int, device: torch.device
) -> RebuildGroups:
    """queries: query heads of a KV head."""
    key_segments, value_segments = (_segments(layer, groups, side) for side in ("k", "v"))
    owner = {head: g for g, group in enumerate(groups) for head in group.heads}
    keys = {
        head: (*_where(groups[owner[head]], segment), _positions(groups[owner[head]]), owner[head])
        for latent, segment in zip(layer.key_latents, key_segments, strict=True)
        for head in latent.heads
    }
    values = [
        (*_where(groups[owner[x.heads[0]]], segment), owner[x.heads[0]], x.heads[0] * queries)
        for x, segment in zip(layer.value_latents, value_segments, strict=True)
    ]
    rows = [keys[head] for head in sorted(keys)], sorted(values, key=lambda row: row[-1])
    strides = [row[0] for side in rows for row in side]
    widths = [[row[1] for row in side] for side in rows]
    layout = groups[0].layout
    return RebuildGroups(
        keys=torch.tensor(rows[0], dtype=torch.int32, device=device),
        values=torch.tensor(rows[1], dtype=torch.int32, device=device),
        widths=(max(widths[0]), max(widths[1])),
        narrowest=(min(widths[0]), min(widths[1])),
        bits=(_bits(key_segments), _bits(value_segments)),
        zeros=any(group.layout.zeros for group in groups),
        tracked=layout.tracked,
        page=layout.page,
        align=next(n for n in (16, 8, 4, 2, 1) if all(stride % n == 0 for stride in strides)),
        heads=(len(groups[0].heads), len(layer.value_latents[0].heads), _shared(layer)),
    )


def _shared(layer: LayerSpec) -> int:
    served = [latent.heads for latent in layer.key_latents]
    alike = len({len(heads) for heads in served}) == 1 and all(map(_consecutive, served))
    return len(served[0]) if alike else 1


def _bits(segments: Sequence[Segment | None]) -> int:
    return max(x.bits for x in segments if x)


def _where(group: Group, segment: Segment | None) -> tuple[int, ...]:
    """The first six numbers of a row of `RebuildGroups`."""
    assert segment is not None, "`supports` is False for this layer"
    layout = group.layout
    index = list(layout.segments).index(segment)
    scaled = [x for x in layout.segments if x.quantized]
    before = sum(x.quantized for x in layout.segments[:index])
    scale = layout.blocks.scales.offset // 2 + before
    per_row = len(scaled) * (2 if layout.zeros else 1)
    words = segment.width * segment.bits // 16
    return words, segment.width, layout.block_offsets[index] // 2, scale, per_row, len(scaled)


def _positions(group: Group) -> int:
    return group.layout.blocks.positions.offset // 4


def decode_reference(
    q: Tensor,
    arena: Tensor,
    tables: Tensor,
    lengths: Tensor,
    layer: LayerSpec,
    groups: Sequence[Group],
    slots: Tensor,
    scale: float,
    maps: KeyMaps,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the rows of every group, k rebuilt from its latent (Palu §4),
    gathering all rows and rebuilding all keys. The kernels are `rebuild_triton.decode`.

    q [B, Hq, d], rotated at its own position; arena uint8; tables int32 [S, G, n]; lengths int
    [S, G]; slots int64 [B]; dtype: of the sums, q's if None. Rows without stored positions are at
    their index. Returns [B, Hq, widest value rank], 0 beyond a head's own rank and for a group
    without rows.
    """
    counts, of = lengths[slots], dtype or q.dtype
    pages = LayerPages(arena, tables, lengths, tuple(groups))
    stored = gather(pages, slots, counts, q.dtype)
    owner = torch.tensor([g for _, g in sorted(_owners(groups))], device=q.device)
    rows, up, mean = stored.rows.to(of), maps.up.to(of), maps.mean.to(of)
    z = _per_head(rows, layer, layer.key_latents, up.shape[-1])
    k = torch.einsum("bhtr,hdr->bhtd", z, up) + mean[:, None]
    cos, sin = (x.to(of) for x in maps.tables(stored.positions[:, owner]))
    k = rotate(k, cos, sin)
    v = _per_head(rows, layer, layer.value_latents, max(x.rank for x in layer.value_latents))
    empty = (counts[:, owner] == 0)[..., None, None]
    mask = (stored.valid[:, owner, None] | empty).repeat_interleave(q.shape[1] // len(owner), 1)
    if not mask.shape[-1]:
        return q.new_zeros(*q.shape[:2], v.shape[-1])
    return attention(q[:, :, None].to(of), k, v, mask, scale)[0][:, :, 0].to(q.dtype)


def _owners(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """(KV head, its group)."""
    return [(head, g) for g, group in enumerate(groups) for head in group.heads]


def _per_head(rows: Tensor, layer: LayerSpec, latents: Sequence[Latent], width: int) -> Tensor:
    """Latents of rows [B, T, R] as every KV head reads them [B, Hk, T, width]."""
    num_heads = sum(len(latent.heads) for latent in latents)
    out = rows.new_zeros(rows.shape[0], num_heads, rows.shape[1], width)
    for latent in latents:
        out[:, list(latent.heads), :, : latent.rank] = rows[:, None, :, layer.columns(latent)]
    return out
