"""What tests of store share with others."""

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvfold.layout import CacheSpec, Geometry, LayerSpec
from kvfold.layout.formats.integers import SCALES_IN, dequantize, lowest, quantize, scale_of
from kvfold.layout.latents import SIDES
from kvfold.layout.pages import CacheLayout, Group, Latent, cache_layout
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.store.reference import StoredRows, append, gather

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


FLOATS = {2: (torch.bfloat16, torch.float16), 4: (torch.float32,)}


def one_layer(latents: list[Latent], **options) -> CacheLayout:
    heads = 1 + max(head for latent in latents for head in latent.heads)
    geometry = Geometry(
        hidden_size=8,
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=8,
        num_layers=1,
        rope=True,
        key_norm=False,
        scaling=1.0,
    )
    layer = LayerSpec(keys="post_rope", values="fused", latents=tuple(latents))
    return cache_layout(CacheSpec(geometry=geometry, layers=(layer,)), **options)


def split(rank: int, bits: list[int]) -> tuple[tuple[int, int], ...]:
    """Tiers of nearly equal width; those of no width are left out."""
    edges = [rank * i // len(bits) for i in range(len(bits) + 1)]
    return tuple((b - a, x) for (a, b), x in zip(pairwise(edges), bits, strict=True) if b > a)


@st.composite
def random_layouts(draw, tracked: bool | None = None) -> CacheLayout:
    """Ragged widths, mixed bits in a latent, a latent per head or one of keys and values."""
    widths = st.sampled_from([1, 2, 5, 8, 9, 16, 33])
    heads = draw(st.integers(1, 4))
    if draw(st.booleans()):
        latents = [Latent(side="kv", heads=tuple(range(heads)), rank=draw(widths))]
    else:
        few = [0, *draw(st.lists(widths, min_size=1, max_size=2))]  # so that groups share a kind
        latents = [
            Latent(side=side, heads=(head,), rank=draw(st.sampled_from(few)))
            for side in SIDES
            for head in range(heads)
        ]
    tiers = draw(st.lists(st.sampled_from([16, 8, 6, 4, 3, 2, 1]), min_size=1, max_size=3))
    return one_layer(
        [replace(latent, tiers=split(latent.rank, tiers)) for latent in latents],
        page=draw(st.sampled_from([1, 16, 32])),
        itemsize=draw(st.sampled_from([2, 4])),
        sub_group=draw(st.sampled_from([None, 8])),
        zeros=draw(st.booleans()),
        tracked=draw(st.booleans()) if tracked is None else tracked,
    )


@dataclass
class Store:
    """An arena of NaN with shuffled pages for `rows` rows of every group of `slots` sequences."""

    groups: tuple[Group, ...]
    arena: Tensor
    tables: Tensor
    width: int

    @classmethod
    def of(cls, layout: CacheLayout, slots: int, rows: int, seed: int) -> "Store":
        pages = -(-rows // layout.page)
        wanted = [
            (s, g, i) for s in range(slots) for g in range(len(layout.groups)) for i in range(pages)
        ]
        random.Random(seed).shuffle(wanted)
        tables = torch.full((slots, len(layout.groups), pages), 2**30, dtype=torch.int32)
        end = 1  # pages need not begin at the arena's start
        for s, g, i in wanted:
            tables[s, g, i] = end
            end += layout.groups[g].layout.page_units
        arena = torch.full((end * 64 + 7,), 255, dtype=torch.uint8)  # NaN in every float
        width = layout.spec.layers[0].row_width
        return cls(layout.groups, arena.to(DEVICE), tables.to(DEVICE), width)

    @property
    def pages(self) -> LayerPages:
        """Lengths are garbage: calls are given those of their sequences."""
        lengths = torch.full_like(self.tables[..., 0], 2**30)
        return LayerPages(self.arena, self.tables, lengths, self.groups)

    def append(self, rows: Tensor, slots: Tensor, index: Tensor, positions: Tensor) -> None:
        tensors = (x.to(DEVICE) for x in (rows, slots, index, positions))
        append(self.pages, *tensors)

    def fill(self, rows: Tensor, positions: Tensor) -> None:
        """Rows [S, T, R] and positions [S, T] as rows 0 to T - 1 of every group."""
        slots, index = torch.cartesian_prod(*map(torch.arange, rows.shape[:2])).unbind(-1)
        index = index[:, None].expand(-1, len(self.groups))
        self.append(rows.flatten(0, 1), slots, index, positions.flatten())

    def gather(self, slots: Tensor, lengths: Tensor, dtype: torch.dtype, **options) -> StoredRows:
        on = (slots.to(DEVICE), lengths.to(DEVICE))
        found = gather(self.pages, *on, dtype, **options)
        return StoredRows(found.rows.cpu(), found.valid.cpu(), found.positions.cpu())

    def forget(self, lengths: Tensor) -> None:
        """Table entries of pages beyond `lengths` [S, G] turn into garbage."""
        page = self.groups[0].layout.page
        index = torch.arange(self.tables.shape[2], device=DEVICE)
        self.tables[index * page >= lengths.to(DEVICE)[..., None]] = 2**30


def stored(rows: Tensor, group: Group) -> Tensor:
    """What `group` keeps of rows [..., R]: its columns as they come back, 0 elsewhere."""
    found = torch.zeros_like(rows)
    for x in group.layout.segments:
        part = rows[..., x.start : x.start + x.width]
        if x.quantized:
            codes, scale, zero = quantize(
                part, x.bits, group.layout.has_zero_points, SCALES_IN[group.layout.scale]
            )
            part = dequantize(codes, scale_of(scale, x.bits), zero, x.bits)
        found[..., x.start : x.start + x.width] = part
    return found


def sizes(rows: Tensor, group: Group) -> Tensor:
    """What the numbers of `stored` are summed from, without signs: step * code and low, which are
    much larger than a number between them where few share a step."""
    found = stored(rows, group).abs()
    for x in group.layout.segments:
        if x.quantized:
            part = rows[..., x.start : x.start + x.width]
            form = group.layout.has_zero_points, SCALES_IN[group.layout.scale]
            codes, scale, zero = quantize(part, x.bits, *form)
            step = scale_of(scale, x.bits)
            size = codes * step[..., None] + lowest(step, zero, x.bits).abs()
            found[..., x.start : x.start + x.width] = size
    return found


def numbers(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
