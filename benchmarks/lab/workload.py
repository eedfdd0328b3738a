"""Synthetic caches of the lab's variants: other lengths than equal ones, other ways to attend.

Shapes: as in `kvfold.bench.workload`.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvfold.bench import workload
from kvfold.bench.synthetic_cache import equal_lengths
from kvfold.bench.timing import Step
from kvfold.bench.variants import Variant, variant_layout
from kvfold.bench.workload import Decode, Workload, entry_bytes
from kvfold.layout import Geometry
from kvfold.layout.pages import CacheLayout
from lab.ablations import decompressed, recut
from lab.variants import How, LabVariant

TAIL, SPREAD, MOST = 1.5, 0.5, 8.0  # Pareto's exponent; log-normal's sigma; cut, in smallest/usual


def draw_lengths(
    variant: Variant, batch: int, tokens: int, layout: CacheLayout, seed: int
) -> Tensor:
    """Token entries int64 [B, N G] by a variant's lengths, on the host: `tokens` / `evict` on
    average."""
    if not isinstance(variant, LabVariant) or variant.lengths == "uniform":
        return equal_lengths(variant, batch, tokens, layout)
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, len(layout.groups))
    if variant.lengths == "pareto":
        uniform = torch.rand(batch, 1, generator=generator, dtype=torch.float64)
        weights = (1 - uniform).pow(-1 / TAIL).clamp(max=MOST).expand(shape)
    else:
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights = (SPREAD * normal).exp().clamp(max=MOST)
    most = tokens if variant.evict > 1 else None
    rows = weights / weights.mean() * (tokens / variant.evict)
    return rows.round().long().clamp(1, most)


class LabWorkload(Workload):
    """A workload whose attention may be an ablation's."""

    @property
    def how(self) -> How:
        return self.variant.how if isinstance(self.variant, LabVariant) else "stream-k"

    def step(self, decode: Decode) -> Step:
        return decompressed(self) if self.how == "decompressed" else super().step(decode)

    def plan_layers(self) -> list[Any]:
        return super().plan_layers() if self.how == "stream-k" else self._recut_plans

    @cached_property
    def _recut_plans(self) -> list[Any]:
        """Cut on the host, and so once, before a CUDA graph is captured."""
        layers = zip(super().plan_layers(), self.layout.layer_groups, self.groups, strict=True)
        return [
            recut(plan, self.rows[:, where], [entry_bytes(x) for x in groups], self.how)
            for plan, where, groups in layers
        ]


def build_workload(
    geometry: Geometry,
    variant: Variant,
    *,
    batch: int,
    tokens: int,
    num_layers: int,
    seed: int = 0,
    **options: Any,
) -> Workload:
    """As `kvfold.bench.workload.build_workload`, of `tokens` tokens on average."""
    layout = variant_layout(geometry, variant, num_layers)
    return workload.build_workload(
        geometry,
        variant,
        batch=batch,
        tokens=tokens,
        num_layers=num_layers,
        seed=seed,
        rows=draw_lengths(variant, batch, tokens, layout, seed),
        kind=LabWorkload,
        **options,
    )
