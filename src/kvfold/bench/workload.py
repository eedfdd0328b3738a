"""A paged cache as a model in service leaves it, made on the device from random numbers.

Shapes: B sequences, Hq query heads, Hk KV heads, G groups a layer, N layers, n pages of the longest
sequence, d head dim, dk, dv widest key and value rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.bench.ablations import decompressed, recut
from kvfold.bench.reference import decode_one
from kvfold.bench.synthetic_cache import build_pages, draw_lengths
from kvfold.bench.timing import Step
from kvfold.bench.variants import DTYPE, Variant, variant_layout
from kvfold.layout import Geometry
from kvfold.layout.pages import CacheLayout, Group
from kvfold.ops import decode as score_space
from kvfold.ops import latent_decode
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.latent_decode import KeyMaps
from kvfold.ops.latent_decode.reference import latent_decode as decode_latents

Decode = Callable[..., tuple[Tensor, Tensor]]  # of kvfold.ops.decode.decode


@dataclass(frozen=True, kw_only=True)
class Workload:
    """q [B, Hq, dk], or [B, Hq, d] where keys are rebuilt, in DTYPE, zero beyond a head's rank;
    arena uint8; tables int32 [B, N G, n]; lengths int32 [B, N G], rows their copy on the host;
    slots int64 [B]; row_bytes: what attention must read of a layer, numbers and scales of all rows,
    averaged over layers; dv: widest value rank; maps: what rebuilds keys, of every layer."""

    variant: Variant
    layout: CacheLayout
    q: Tensor
    arena: Tensor
    tables: Tensor
    lengths: Tensor
    rows: Tensor
    slots: Tensor
    row_bytes: float
    dv: int
    maps: tuple[KeyMaps, ...] = ()

    def layer(self, number: int) -> tuple[Tensor, Tensor, tuple[Group, ...]]:
        """(tables, lengths, groups) of a layer; numbers go round."""
        where = self.layout.layer_groups[number % self.num_layers]
        return self.tables[:, where], self.lengths[:, where], self.layout.groups[where]

    def pages(self, number: int) -> LayerPages:
        """Of a layer, as ops take them."""
        return LayerPages(self.arena, *self.layer(number))

    @property
    def num_layers(self) -> int:
        return len(self.layout.layer_groups)

    @property
    def groups(self) -> list[tuple[Group, ...]]:
        return [self.layer(i)[2] for i in range(self.num_layers)]

    @property
    def rank(self) -> int | None:
        """Numbers from which a rebuilt key is made; None where none are."""
        return _widest(self.layout, "k") if self.maps else None

    @property
    def flops(self) -> float:
        """Arithmetic that rebuilds a layer's keys: 2 d r a row and KV head; 0 where none are."""
        if not self.maps:
            return 0.0
        spec = self.layout.spec
        heads = sum(x.rank * len(x.heads) for x in spec.layers[0].key_latents)
        rows = float(self.rows.sum()) / len(self.layout.groups)
        return 2 * spec.geometry.head_dim * heads * rows

    def expected(self) -> Tensor:
        """What layer 0 gives for the first sequence, fp32 [Hq, dv], written out."""
        pages, scale = self.pages(0), self.layout.spec.geometry.scaling
        if not self.maps:
            return decode_one(self.q[0], pages, 0, scale, self.dv)
        place = pages, self.slots[:1], scale, self.maps[0]
        return decode_latents(self.q[:1], *place, dtype=torch.float32)[0][0].float()

    def step(self, decode: Decode) -> Step:
        """`decode` over layer after layer. The first plans for all, as the engine does."""
        if self.variant.how == "decompressed":
            return decompressed(self)
        return self._rebuilt_step() if self.maps else self._direct_step(decode)

    def _direct_step(self, decode: Decode) -> Step:
        geometry, planned = self.layout.spec.geometry, self.has_kernel
        fixed = self.variant.how != "stream-k"
        plans: list[Any] = [None] * self.num_layers

        def run(number: int) -> Tensor:
            if planned and (plans[0] is None or (number == 0 and not fixed)):
                place = self.groups, self.lengths[self.slots], geometry.queries_per_kv
                plans[:] = score_space.plan_layers(*place, self._most_rows)
                plans[:] = self._recut(plans) if fixed else plans
            plan = plans[number % len(plans)]
            return decode(self.q, self.pages(number), self.slots, geometry.scaling, plan=plan)[0]

        return run

    def _recut(self, plans: list[Any]) -> list[Any]:
        rows = [self.rows[:, where] for where in self.layout.layer_groups]
        costs = [[_row_bytes(group) for group in groups] for groups in self.groups]
        each = zip(plans, rows, costs, strict=True)
        return [recut(plan, own, cost, self.variant.how) for plan, own, cost in each]

    def _rebuilt_step(self) -> Step:
        spec, most = self.layout.spec, self._most_rows
        plans: list[Any] = [None] * self.num_layers

        def run(number: int) -> Tensor:
            if number == 0 or plans[0] is None:
                layers = list(zip(spec.layers, self.groups, strict=True))
                counts = self.lengths[self.slots]
                plans[:] = latent_decode.plan_layers(self.q, layers, counts, most, self.maps)
            at, pages = number % len(plans), self.pages(number)
            maps = spec.geometry.scaling, self.maps[at], plans[at]
            return latent_decode.latent_decode(self.q, pages, self.slots, *maps)[0]

        return run

    @property
    def _most_rows(self) -> int:
        """Of the layer with most, over its groups."""
        return max(int(self.rows[:, where].sum()) for where in self.layout.layer_groups)

    @property
    def has_kernel(self) -> bool:
        """Whether what is timed are kernels, not PyTorch."""
        device = self.q.device.type
        if not self.maps:
            return not any(score_space.why_not(groups, device) for groups in self.groups)
        each = zip(self.layout.spec.layers, self.groups, strict=True)
        return not any(latent_decode.why_not(*x, device) for x in each)


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
    rope_base: float = 10000.0,
) -> Workload:
    """`batch` sequences of `tokens` tokens each, on average, in shuffled pages of `num_layers`
    layers. Codes are random bytes, unquantised numbers normal, positions ascend. rope_base: of the
    angles by which rebuilt keys turn."""
    layout = variant_layout(geometry, variant, num_layers)
    rows = draw_lengths(variant, batch, tokens, layout, seed)
    generator = torch.Generator(device).manual_seed(seed)
    arena, tables = build_pages(layout, rows, generator)
    sizes = torch.tensor([_row_bytes(group) for group in layout.groups])
    rebuilt = layout.spec.layers[0].keys == "pre_rope"
    # The table is for all rows, and a tile more.
    positions = int(rows.max()) + 256
    maps = _maps(layout, rope_base, positions, generator) if rebuilt else ()
    return Workload(
        variant=variant,
        layout=layout,
        q=_queries(layout, batch, generator),
        arena=arena,
        tables=tables,
        lengths=rows.to(device, torch.int32),
        rows=rows,
        slots=torch.arange(batch, device=device),
        row_bytes=float((rows * sizes).sum()) / num_layers,
        dv=_widest(layout, "v"),
        maps=maps,
    )


def _maps(
    layout: CacheLayout, rope_base: float, positions: int, generator: torch.Generator
) -> tuple[KeyMaps, ...]:
    """Maps of every layer, of which a key's numbers are about as large as a latent's."""
    spec, geometry, found = layout.spec.layers[0], layout.spec.geometry, []
    device = generator.device
    ranks = {head: x.rank for x in spec.key_latents for head in x.heads}
    pairs = torch.arange(0, geometry.head_dim, 2, device=device) / geometry.head_dim
    angles = rope_base**-pairs
    rope = latent_decode.rope_table(angles, positions, geometry.head_dim)
    for _ in layout.spec.layers:
        size = geometry.num_kv_heads, geometry.head_dim, max(ranks.values())
        up = torch.zeros(size, dtype=DTYPE, device=device)
        for head, rank in ranks.items():
            up[head, :, :rank].normal_(std=rank**-0.5, generator=generator)
        mean = torch.empty(size[:2], dtype=DTYPE, device=device).normal_(generator=generator)
        found.append(KeyMaps(layer=spec, up=up, mean=mean, inv_freq=angles, rope=rope))
    return tuple(found)


def _row_bytes(group: Group) -> int:
    """Bytes of a row that attention reads: numbers and scales, no positions, no metrics."""
    layout = group.layout
    codes = sum(x.row_bytes for x in layout.segments)
    return codes + layout.scale * layout.scales_per_row


def _widest(layout: CacheLayout, side: str) -> int:
    return max(x.rank for x in layout.spec.layers[0].latents if side in x.side)


def _queries(layout: CacheLayout, batch: int, generator: torch.Generator) -> Tensor:
    """Normal numbers, zero beyond what a query head's score is taken of."""
    geometry, spec, device = layout.spec.geometry, layout.spec.layers[0], generator.device
    width = {head: x.rank for x in spec.key_latents for head in x.heads}
    if spec.keys == "pre_rope":
        width = dict.fromkeys(width, geometry.head_dim)
    ranks = torch.tensor([width[head] for head in sorted(width)], device=device)
    ranks = ranks.repeat_interleave(geometry.queries_per_kv)[:, None]
    columns = torch.arange(int(ranks.max()), device=device)
    shape = (batch, geometry.num_query_heads, len(columns))
    q = torch.empty(shape, dtype=DTYPE, device=device).normal_(generator=generator)
    return q * (columns < ranks)
