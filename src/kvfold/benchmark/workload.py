"""A paged cache as a model in service leaves it, made on the device from random numbers.

Shapes: B sequences, Hq query heads, G groups a layer (one a KV head), N layers, n pages of the
longest sequence, M pages of a kind, P rows a page, d head dim, dk, dv widest key and value rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.benchmark.timing import Step
from kvfold.cache.layout import UNIT, CacheLayout, Group, cache_layout
from kvfold.ops.bits import GAUSSIAN_STEP
from kvfold.ops.decode import has_kernel, plan_layers
from kvfold.ops.pages import METRICS, POSITIONS, SCALES, Kind, plan_pages
from kvfold.spec import SIDES, CacheSpec, Geometry, Latent, LayerSpec

DTYPE = torch.bfloat16
TAIL, SPREAD, MOST = 1.5, 0.5, 8.0  # Pareto's exponent; log-normal's sigma; cut, in smallest/usual

Decode = Callable[..., Tensor]  # of kvfold.ops.decode.decode
Lengths = Literal["uniform", "pareto", "evicted"]


def _shape(kv_heads: int, rope: bool = True) -> Geometry:
    return Geometry(
        hidden_size=4096,
        num_query_heads=32,
        num_kv_heads=kv_heads,
        head_dim=128,
        num_layers=32,
        rope=rope,
        key_norm=False,
        scaling=128**-0.5,
    )


SHAPES = {
    "llama-3.1-8b": _shape(8),
    "llama-2-7b": _shape(32),
    "llama-2-7b-norope": _shape(32, rope=False),
    "tiny": replace(_shape(2), hidden_size=64, num_query_heads=4, head_dim=16, num_layers=2),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What of the cache is kept.

    keys, values: kept over all dims of a head, in turn over the KV heads; bits: of every number;
    lengths: equal, Pareto over sequences, or log-normal over (sequence, group); evict: tokens over
    rows, on average; page: rows a page.
    """

    keys: tuple[float, ...] = (1.0,)
    values: tuple[float, ...] = (1.0,)
    bits: int = 16
    lengths: Lengths = "uniform"
    evict: int = 1
    page: int = 32


_HALF = Variant(keys=(0.5,), values=(0.5,))
VARIANTS = {
    "bf16-full": Variant(),
    "bf16-half": _HALF,
    "bf16-half-ragged": Variant(keys=(0.25, 0.5, 0.5, 0.75), values=(0.75, 0.5, 0.5, 0.25)),
    "bf16-half-pareto": replace(_HALF, lengths="pareto"),
    "int8-full": Variant(bits=8),
    "int8-half": replace(_HALF, bits=8),
    "int4-full": Variant(bits=4),
    "int4-half": replace(_HALF, bits=4),
    "int4-half-evict8": replace(_HALF, bits=4, lengths="evicted", evict=8, page=16),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """q [B, Hq, dk] in DTYPE, zero beyond a head's rank; arena uint8; tables int32 [B, N G, n];
    lengths int32 [B, N G]; slots int64 [B]; row_bytes: what attention must read of a layer, numbers
    and scales of all rows, averaged over layers; dv: widest value rank."""

    layout: CacheLayout
    q: Tensor
    arena: Tensor
    tables: Tensor
    lengths: Tensor
    slots: Tensor
    row_bytes: float
    dv: int

    def layer(self, number: int) -> tuple[Tensor, Tensor, tuple[Group, ...]]:
        """(tables, lengths, groups) of a layer; numbers go round."""
        where = self.layout.layer_groups[number % len(self.layout.layer_groups)]
        return self.tables[:, where], self.lengths[:, where], self.layout.groups[where]

    def step(self, decode: Decode) -> Step:
        """`decode` over layer after layer. The first plans for all, as the engine does."""
        layers = [self.layer(i) for i in range(len(self.layout.layer_groups))]
        groups = [each for _, _, each in layers]
        geometry = self.layout.spec.geometry
        planned = has_kernel(groups, self.q.device.type)
        plans: list[Any] = [None] * len(layers)

        def run(number: int) -> Tensor:
            if planned and (number == 0 or plans[0] is None):
                plans[:] = plan_layers(groups, self.lengths[self.slots], geometry.queries_per_kv)
            at = number % len(layers)
            tables, lengths, _ = layers[at]
            place = self.arena, tables, lengths, groups[at], self.slots
            return decode(self.q, *place, geometry.scaling, plan=plans[at])

        return run


def variant_layout(geometry: Geometry, variant: Variant, num_layers: int) -> CacheLayout:
    """The pages of `num_layers` equal layers. Rows that are evicted are tracked."""
    latents = [
        Latent(side=side, heads=(h,), rank=int(cycle[h % len(cycle)] * geometry.head_dim))
        for side, cycle in zip(SIDES, (variant.keys, variant.values), strict=True)
        for h in range(geometry.num_kv_heads)
    ]
    whole = {*variant.keys, *variant.values} == {1.0}
    layer = LayerSpec(
        keys="plain" if whole else "post" if geometry.rope else "absorbed",
        values="plain" if whole else "fused",
        latents=tuple(latents),
    )
    spec = CacheSpec(
        geometry=replace(geometry, num_layers=num_layers), layers=(layer,) * num_layers
    )
    return cache_layout(
        spec,
        page=variant.page,
        itemsize=DTYPE.itemsize,
        bits=variant.bits,
        tracked=variant.evict > 1,
    )


def layer_bytes(geometry: Geometry, variant: Variant, batch: int, tokens: int) -> int:
    """Bytes of a layer's pages: an estimate, for a page more than what is needed."""
    pages = batch * (tokens / variant.evict / variant.page + 1)
    return int(pages * variant_layout(geometry, variant, 1).page_bytes)


def build_workload(
    geometry: Geometry,
    variant: Variant,
    *,
    batch: int,
    tokens: int,
    num_layers: int,
    device: torch.device,
    seed: int = 0,
) -> Workload:
    """`batch` sequences of `tokens` tokens each, on average, in shuffled pages of `num_layers`
    layers. Codes are random bytes, unquantised numbers normal, positions ascend."""
    layout = variant_layout(geometry, variant, num_layers)
    rows = _lengths(variant, batch, tokens, layout, seed)
    generator = torch.Generator(device).manual_seed(seed)
    arena, tables = _pages(layout, rows, generator, device)
    sizes = torch.tensor([_row_bytes(group) for group in layout.groups])
    return Workload(
        layout=layout,
        q=_queries(layout, batch, generator, device),
        arena=arena,
        tables=tables,
        lengths=rows.to(device, torch.int32),
        slots=torch.arange(batch, device=device),
        row_bytes=float((rows * sizes).sum()) / num_layers,
        dv=_widest(layout, "v"),
    )


def _lengths(variant: Variant, batch: int, tokens: int, layout: CacheLayout, seed: int) -> Tensor:
    """Rows int64 [B, N G], on the host: `tokens` / `evict` on average."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, len(layout.groups))
    if variant.lengths == "pareto":
        uniform = torch.rand(batch, 1, generator=generator, dtype=torch.float64)
        weights = (1 - uniform).pow(-1 / TAIL).clamp(max=MOST).expand(shape)
    elif variant.lengths == "evicted":
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights = (SPREAD * normal).exp().clamp(max=MOST)
    else:
        weights = torch.ones(shape, dtype=torch.float64)
    most = tokens if variant.evict > 1 else None
    rows = weights / weights.mean() * (tokens / variant.evict)
    return rows.round().long().clamp(1, most)


def _row_bytes(group: Group) -> int:
    """Bytes of a row that attention reads: numbers and scales, no positions, no metrics."""
    layout = group.layout
    codes = sum(x.row_bytes(layout.itemsize) for x in layout.segments)
    return codes + layout.scale * layout.scales_per_row


def _widest(layout: CacheLayout, side: str) -> int:
    return max(x.rank for x in layout.spec.layers[0].latents if x.side == side)


def _queries(
    layout: CacheLayout, batch: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Normal numbers, zero beyond the key rank of a query head's KV head."""
    geometry = layout.spec.geometry
    ranks = torch.tensor([x.rank for x in layout.spec.layers[0].key_latents], device=device)
    ranks = ranks.repeat_interleave(geometry.queries_per_kv)[:, None]
    columns = torch.arange(_widest(layout, "k"), device=device)
    shape = (batch, geometry.num_query_heads, len(columns))
    q = torch.empty(shape, dtype=DTYPE, device=device).normal_(generator=generator)
    return q * (columns < ranks)


def _pages(
    layout: CacheLayout, rows: Tensor, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The arena, filled, and tables that take its pages in random order."""
    owned_pages = -(-rows // layout.page)
    units = torch.tensor([group.layout.page_units for group in layout.groups])
    total = int((owned_pages * units).sum())
    assert total < 2**31, f"{total} units exceed int32 offsets"
    arena = torch.empty(total * UNIT, dtype=torch.uint8, device=device)
    number = torch.arange(int(owned_pages.max()), device=device)
    owned = number < owned_pages.to(device)[..., None]
    tables = torch.zeros(owned.shape, dtype=torch.int32, device=device)
    start = 0
    for where in layout.layer_groups:
        for kind in plan_pages(layout.groups[where], device).kinds:
            groups = kind.numbers + where.start
            mine = owned[:, groups]
            order = torch.randperm(int(mine.sum()), generator=generator, device=device)
            size = kind.layout.page_units
            found = torch.zeros_like(mine, dtype=torch.int32)
            found[mine] = (start + order * size).int()
            tables[:, groups] = found
            pages = arena[start * UNIT : (start + len(order) * size) * UNIT]
            index = torch.empty_like(order)
            index[order] = number.expand_as(mine)[mine]
            _fill(pages.view(-1, size * UNIT), kind, index, generator)
            start += len(order) * size
    assert start == total, f"{start} units filled != {total} allocated"
    return arena, tables


def _fill(pages: Tensor, kind: Kind, index: Tensor, generator: torch.Generator) -> None:
    """Write uint8 pages [M, page_bytes]; index int64 [M]: a page's place in its sequence."""
    steps = []
    for i, segment in enumerate(kind.layout.segments):
        if segment.quantized:
            kind.block(pages, i, torch.uint8).random_(generator=generator)
            steps.append(GAUSSIAN_STEP[segment.bits])
        else:
            kind.block(pages, i, DTYPE).normal_(generator=generator)
    if steps:
        scales = kind.block(pages, SCALES, torch.float16)
        spread = torch.rand(scales.shape, generator=generator, device=pages.device) + 0.5
        scales.copy_(spread * torch.tensor(steps, device=pages.device))
    if kind.layout.tracked:
        kind.block(pages, METRICS, torch.float32).zero_()
        page = kind.layout.page
        row = torch.arange(page, device=pages.device)[:, None]
        kind.block(pages, POSITIONS, torch.int32).copy_(index[:, None, None] * page + row)
