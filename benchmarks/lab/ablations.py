"""Attention without what makes it fast, as ZACK's ablations (§6.5) leave it out.

Shapes: B sequences, Hq query heads, Hk KV heads, G groups (one a head), d head dim, r rank, R
numbers of a row, S rows of the longest group, I = B G items.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.bench.common import Unavailable
from kvfold.bench.variants import Variant
from kvfold.layout import Geometry
from kvfold.ops.backend import use_triton
from kvfold.ops.common.plan import longest_first, whole_items
from kvfold.ops.prefill.plan import Cut, Widths, rescaled_cut
from kvfold.ops.store import gather
from lab.variants import LabVariant

if TYPE_CHECKING:
    from kvfold.bench.timing import Step
    from kvfold.bench.workload import Workload
    from kvfold.ops.decode.triton import DecodePlan


def recut(plan: "DecodePlan", rows: Tensor, cost: list[int], how: str) -> "DecodePlan":
    """`plan` (stream-K) cut by whole heads: `longest-first` on as many slices (ZACK §5.3), or
    `whole`, a slice each in the order of items. rows [B, G] on the host; cost [G]: of a row. Made
    on the host, once.
    """
    tiles = (-(-rows // plan.tuning.block)).flatten().tolist()
    if how == "whole":
        slices = whole_items(tiles)
    else:
        slices = longest_first(tiles, cost * len(rows), plan.slices.starts.shape[0] - 1)
    slices = slices.to(plan.part.device)
    number = slices.starts.shape[0] - 1 + len(tiles)
    return replace(
        plan,
        slices=slices,
        part=plan.part.new_empty(number, *plan.part.shape[1:]),
        part_ml=plan.part_ml.new_empty(number, *plan.part_ml.shape[1:]),
    )


@contextmanager
def tiles_of(variant: Variant, geometry: Geometry, device_type: str) -> Iterator[None]:
    """Within it, the prefill kernel has `variant.tiles` of queries: `fixed`, FlashAttention-2's
    64 by 64 rows for all heads, as ZACK/KE has them, or `zack`, by rank (§5.3). Raises Unavailable
    where no kernel runs."""
    tiles = variant.tiles if isinstance(variant, LabVariant) else "ours"
    if tiles == "ours":
        yield
        return
    if not use_triton(device_type):
        raise Unavailable("there is no kernel to cut here")
    from kvfold.ops.prefill import triton as kernel

    kept = max(map(sum, zip(variant.keys, variant.values or (), strict=True)))
    most = int(kept * geometry.head_dim)

    def cut(widths: Widths, few: bool) -> Cut:
        return rescaled_cut(widths, most) if tiles == "zack" else Cut(pairs=64, warps=4)

    with mock.patch.object(kernel, "cut_for", cut):
        yield


def decompressed(work: "Workload") -> "Step":
    """ZACK/OE: all stored rows mapped back, and attention to whole keys and values. All heads of
    all layers have the same maps, with orthonormal columns, so that scores are those of `work`."""
    geometry, dtype = work.layout.spec.geometry, work.q.dtype
    keys, values = (_orthonormal(geometry.head_dim, n, work.q) for n in (work.q.shape[-1], work.dv))
    q, grouped = (work.q @ keys.T)[:, :, None], geometry.queries_per_kv > 1
    size = int(work.rows.max())

    def step(number: int) -> Tensor:
        pages = work.pages(number)
        stored = gather(pages, work.slots, pages.lengths, dtype, size)
        rows = stored.rows.unflatten(-1, (-1, work.dv))
        k, v = rows.transpose(1, 2).split(len(pages.groups), 1)
        k, v = k @ keys.T, v @ values.T
        out = F.scaled_dot_product_attention(q, k, v, scale=geometry.scaling, enable_gqa=grouped)
        return (out @ values)[:, :, 0]

    return step


def _orthonormal(dim: int, rank: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(dim)
    found = torch.linalg.qr(torch.randn(dim, rank, generator=generator)).Q
    return found.to(like.device, like.dtype)
