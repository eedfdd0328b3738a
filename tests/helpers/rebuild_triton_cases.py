"""What tests of rebuild triton share with others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.layout import CacheSpec, Geometry, Latent, LayerSpec
from kvfold.layout.latents import SIDES
from kvfold.layout.pages import cache_layout
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.latent_decode import KeyMaps, rope_table
from kvfold.ops.store import reference as store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def latents(kind: str, keys: list[int], values: int) -> tuple[Latent, ...]:
    """lean: keys per head, values of all; palu: both per head; small: one latent of all; joint,
    fours: both of all heads (LoRC, Palu's J-LRD), or of four (G-LRD)."""
    heads = tuple(range(len(keys)))
    if kind in ("joint", "fours"):
        share = len(heads) if kind == "joint" else 4
        own = [heads[first : first + share] for first in heads[::share]]
        return tuple(
            Latent(side=side, heads=each, rank=rank)
            for side, rank in zip(SIDES, (keys[0], values), strict=True)
            for each in own
        )
    if kind == "small":
        return (Latent(side="kv", heads=heads, rank=values),)
    found = tuple(Latent(side="k", heads=(h,), rank=r) for h, r in enumerate(keys))
    if kind == "lean":
        return (*found, Latent(side="v", heads=heads, rank=values))
    return found + tuple(Latent(side="v", heads=(h,), rank=values - 16 * h) for h in heads)


class Case:
    """Sequences of random rows, positions in no order, their pages shuffled, the rest NaN."""

    def __init__(self, kind, keys, values, lengths, *, d=32, queries=2, rotary=None, page=16,
                 bits=None, zeros=False, tracked=False, scaling=1.0, seed=0,
                 tiers=None, runs=None, level=None, first=1.0):  # fmt: skip
        """level: a constant of all keys of a head in a pair that hardly rotates, and of its queries
        there; first: how much larger a first row's numbers are (see `hard_heads`)."""
        chance = torch.Generator().manual_seed(seed)
        random = lambda *shape: torch.randn(shape, generator=chance)  # noqa: E731
        heads = len(keys)
        geometry = Geometry(
            hidden_size=8, num_query_heads=heads * queries, num_kv_heads=heads, head_dim=d,
            num_layers=1, rope=True, key_norm=False, scaling=0.1,
        )  # fmt: skip
        own = latents(kind, keys, values)
        if tiers is not None:
            own = tuple(replace(x, tiers=split(x.rank, tiers)) for x in own)
        if runs is not None:  # of keys, of values
            own = tuple(replace(x, tiers=runs[x.side == "v"]) for x in own)
        self.layer = LayerSpec(keys="pre_rope", values="fused", latents=own)
        layout = cache_layout(
            CacheSpec(geometry=geometry, layers=(self.layer,)),
            page=page, bits=bits, zeros=zeros, tracked=tracked,
        )  # fmt: skip
        self.groups, batch = layout.groups, len(lengths)
        counts = torch.tensor(lengths)[:, None] - torch.arange(len(self.groups))
        self.lengths, self.first = counts.clamp(min=0).int(), first
        self._fill(layout.page, batch, max(lengths), chance)
        self.slots = torch.randperm(batch, generator=chance).to(DEVICE)
        rotary = rotary or d
        up = random(heads, d, max([values] if kind == "small" else keys)) * 0.2
        for h, rank in enumerate(keys if kind != "small" else []):
            up[h, :, rank:] = 0
        inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
        inv_freq = inv_freq.to(DEVICE)
        mean, q = random(heads, d), random(batch, heads * queries, d)
        if level is not None:
            slow = rotary // 2 - 1
            mean[:, slow], q[..., slow] = level
        given = up.half().to(DEVICE), mean.half().to(DEVICE), inv_freq
        self.maps = KeyMaps(self.layer, *given, rope_table(inv_freq, 512, d), scaling)
        self.q = q.half().to(DEVICE)

    def _fill(self, page: int, batch: int, longest: int, chance: torch.Generator) -> None:
        num_groups = len(self.groups)
        units = [group.layout.page_units for group in self.groups]
        shape = (batch, num_groups, max(1, -(-longest // page)))
        order = torch.randperm(torch.Size(shape).numel(), generator=chance)
        sizes = torch.tensor(units)[None, :, None].expand(shape).flatten()[order]
        tables = torch.empty_like(order)
        tables[order] = sizes.cumsum(0) - sizes
        self.tables = tables.view(shape).int().to(DEVICE)
        self.arena = torch.full((int(sizes.sum()) * 64,), 0xFF, dtype=torch.uint8, device=DEVICE)
        index = torch.arange(longest)[:, None].expand(-1, num_groups)
        for b in range(batch):
            rows = torch.randn(longest, self.layer.row_width, generator=chance).half()
            rows[:1] *= self.first
            for group, count in zip(self.groups, self.lengths[b].tolist(), strict=True):
                for x in group.layout.segments:
                    rows[count:, x.start : x.start + x.width] = torch.nan
            at = torch.randperm(max(512, longest), generator=chance)[:longest].int()
            args = [x.to(DEVICE) for x in (rows, torch.full((longest,), b), index, at)]
            store.append(self.pages, *args)

    @property
    def pages(self) -> LayerPages:
        return LayerPages(self.arena, self.tables, self.lengths.to(DEVICE), self.groups)

    def run(self, function, **options) -> Tensor:
        return function(self.q, self.pages, self.slots, 0.1, self.maps, **options)


def explicit(case: Case) -> tuple[Tensor, Tensor]:
    """Outputs and weights [B, Hq, T] written out in float64, a head after another."""
    counts = case.lengths.to(DEVICE)[case.slots]
    stored = store.gather(case.pages, case.slots, counts, torch.float16)
    layer, queries = case.layer, case.q.shape[1] // len(case.maps.up)
    widest = max(x.rank for x in layer.value_latents)
    out = torch.zeros(*case.q.shape[:2], widest, dtype=torch.float64, device=DEVICE)
    weights = out.new_zeros(*out.shape[:2], stored.rows.shape[1])
    for b, head in torch.cartesian_prod(*map(torch.arange, case.q.shape[:2])).tolist():
        h = head // queries
        g = next(g for g, group in enumerate(case.groups) if h in group.heads)
        keys, values = (
            next(x for x in side if h in x.heads)
            for side in (layer.key_latents, layer.value_latents)
        )
        rows = stored.rows[b, : counts[b, g]].double()
        up, mean = case.maps.up[h, :, : keys.rank].double(), case.maps.mean[h].double()
        k = rows[:, layer.columns(keys)] @ up.T + mean
        half = case.maps.rotary // 2
        angles = stored.positions[b, g, : counts[b, g], None] * case.maps.inv_freq.double()
        turn = torch.polar(torch.full_like(angles, case.maps.scaling), angles)
        turned = torch.complex(k[:, :half], k[:, half : 2 * half]) * turn
        k = torch.cat((turned.real, turned.imag, k[:, 2 * half :]), -1)
        p = (k @ case.q[b, head].double() * 0.1).softmax(0)
        weights[b, head, : len(p)] = p
        out[b, head, : values.rank] = p @ rows[:, layer.columns(values)]
    return out, weights


def split(rank: int, bits: list[int]) -> tuple[tuple[int, int], ...]:
    """Runs of 16 numbers, the last one of what is left."""
    widths = [min(16, rank - 16 * i) for i in range(len(bits) - 1)]
    found = [*widths, rank - sum(widths)]
    return tuple((n, x) for n, x in zip(found, bits, strict=True) if n > 0)


def _angles(base: float, rotary: int) -> Tensor:
    return (base ** (-torch.arange(0, rotary, 2) / rotary)).to(DEVICE)
