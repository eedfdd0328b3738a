"""A paged cache of random numbers that looks like one in service, and attention steps on it.

Shapes: B sequences, Hq query heads, Hk KV heads, G groups a layer, N layers, n pages of the longest
sequence, d head dim, dk, dv widest key and value rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.bench.synthetic_cache import build_pages, equal_lengths
from kvfold.bench.timing import Step
from kvfold.bench.variants import DTYPE, Variant, variant_layout
from kvfold.layout import Geometry
from kvfold.layout.pages import CacheLayout, Group
from kvfold.ops import decode as score_space
from kvfold.ops import latent_decode
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode.reference import decode as decode_reference
from kvfold.ops.latent_decode import KeyMaps
from kvfold.ops.latent_decode.reference import latent_decode as decode_latents

Decode = Callable[..., tuple[Tensor, Tensor]]  # as kvfold.ops.decode.decode


@dataclass(frozen=True, kw_only=True)
class Workload:
    """q [B, Hq, dk], or [B, Hq, d] where keys are reconstructed, in DTYPE, zero beyond a head's
    rank; arena uint8; tables int32 [B, N G, n]; lengths int32 [B, N G], rows their copy on the
    host; slots int64 [B]. row_bytes: that attention must read of a layer, numbers and scales of all
    tokens, averaged over layers. dv: largest value rank. maps: that reconstruct keys, by layer."""

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
        """(tables, lengths, groups) of a layer; numbers beyond the last layer start again."""
        where = self.layout.layer_groups[number % self.num_layers]
        return self.tables[:, where], self.lengths[:, where], self.layout.groups[where]

    def pages(self, number: int) -> LayerPages:
        """A layer's pages, as operations take them."""
        return LayerPages(self.arena, *self.layer(number))

    @property
    def num_layers(self) -> int:
        return len(self.layout.layer_groups)

    @property
    def groups(self) -> list[tuple[Group, ...]]:
        return [self.layer(i)[2] for i in range(self.num_layers)]

    @property
    def rank(self) -> int | None:
        """Numbers that a reconstructed key is computed from; None without reconstruction."""
        return _widest(self.layout, "k") if self.maps else None

    @property
    def flops(self) -> float:
        """Operations that reconstruct a layer's keys: 2 d rank a token and KV head; 0 without
        reconstruction."""
        if not self.maps:
            return 0.0
        spec = self.layout.spec
        heads = sum(x.rank * len(x.heads) for x in spec.layers[0].key_latents)
        rows = float(self.rows.sum()) / len(self.layout.groups)
        return 2 * spec.geometry.head_dim * heads * rows

    def expected(self) -> Tensor:
        """The first sequence's outputs in layer 0 by the reference in PyTorch, fp32 [Hq, dv]."""
        pages, scale = self.pages(0), self.layout.spec.geometry.scaling
        q, slots = self.q[:1], self.slots[:1]
        if self.maps:
            place = pages, slots, scale, self.maps[0]
            return decode_latents(q, *place, dtype=torch.float32)[0][0].float()
        segments = [x for group in pages.groups for x in group.layout.segments]
        if all(x.quantized for x in segments):
            q = q.float()  # 16-bit rounding would decide between close scores
        return decode_reference(q, pages, slots, scale)[0][0].float()

    def step(self, decode: Decode) -> Step:
        """Attention of one layer, by its number. Layer 0 plans for all layers, as the engine
        does."""
        return self._reconstructing_step() if self.maps else self._direct_step(decode)

    def plan_layers(self) -> list[Any]:
        """The plans of all layers for `decode`."""
        queries = self.layout.spec.geometry.queries_per_kv
        place = self.groups, self.lengths[self.slots], queries
        return score_space.plan_layers(*place, self._most_rows)

    def _direct_step(self, decode: Decode) -> Step:
        scale, planned = self.layout.spec.geometry.scaling, self.has_kernel
        plans: list[Any] = [None] * self.num_layers

        def run(number: int) -> Tensor:
            if planned and (plans[0] is None or number == 0):
                plans[:] = self.plan_layers()
            plan = plans[number % len(plans)]
            return decode(self.q, self.pages(number), self.slots, scale, plan=plan)[0]

        return run

    def _reconstructing_step(self) -> Step:
        spec, most = self.layout.spec, self._most_rows
        plans: list[Any] = [None] * self.num_layers

        def run(number: int) -> Tensor:
            if number == 0 or plans[0] is None:
                layers = list(zip(spec.layers, self.groups, strict=True))
                counts = self.lengths[self.slots]
                plans[:] = latent_decode.plan_layers(self.q, layers, counts, most, self.maps)
            layer, pages = number % len(plans), self.pages(number)
            maps = spec.geometry.scaling, self.maps[layer], plans[layer]
            return latent_decode.latent_decode(self.q, pages, self.slots, *maps)[0]

        return run

    @property
    def _most_rows(self) -> int:
        """Token entries of the layer with most, over its groups."""
        return max(int(self.rows[:, where].sum()) for where in self.layout.layer_groups)

    @property
    def has_kernel(self) -> bool:
        """Whether kernels are timed, not PyTorch."""
        device = self.q.device.type
        if not self.maps:
            return not any(score_space.why_not(groups, device) for groups in self.groups)
        layers = zip(self.layout.spec.layers, self.groups, strict=True)
        return not any(latent_decode.why_not(*x, device) for x in layers)


def layer_bytes(geometry: Geometry, variant: Variant, batch: int, tokens: int) -> int:
    """Estimated bytes of a layer's pages, with one more page per sequence than it needs."""
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
    rows: Tensor | None = None,
    kind: type[Workload] = Workload,
) -> Workload:
    """A cache of `batch` sequences of `tokens` tokens each, in shuffled pages of `num_layers`
    layers.

    Codes are random bytes, unquantised numbers normally distributed, positions ascend. rope_base:
    of the RoPE angles of reconstructed keys. rows [B, N G]: token entries of every sequence and
    group, if not equally many. kind: the class of the result.
    """
    layout = variant_layout(geometry, variant, num_layers)
    if rows is None:
        rows = equal_lengths(variant, batch, tokens, layout)
    generator = torch.Generator(device).manual_seed(seed)
    arena, tables = build_pages(layout, rows, generator)
    sizes = torch.tensor([entry_bytes(group) for group in layout.groups])
    reconstructs = layout.spec.layers[0].keys == "pre_rope"
    # The RoPE table covers all token entries, and a tile more.
    positions = int(rows.max()) + 256
    maps = _maps(layout, rope_base, positions, generator) if reconstructs else ()
    return kind(
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
    """Maps of every layer. A reconstructed key has numbers of about the latent's size."""
    spec, geometry, maps = layout.spec.layers[0], layout.spec.geometry, []
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
        maps.append(KeyMaps(layer=spec, up=up, mean=mean, inv_freq=angles, rope=rope))
    return tuple(maps)


def entry_bytes(group: Group) -> int:
    """Bytes that attention reads per token entry: numbers and scales, not positions or eviction
    scores."""
    layout = group.layout
    codes = sum(x.row_bytes for x in layout.segments)
    return codes + layout.scale * layout.scales_per_row


def _widest(layout: CacheLayout, side: str) -> int:
    return max(x.rank for x in layout.spec.layers[0].latents if side in x.side)


def _queries(layout: CacheLayout, batch: int, generator: torch.Generator) -> Tensor:
    """Normally distributed queries, zero beyond the rank of their head."""
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
