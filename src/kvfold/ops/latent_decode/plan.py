"""How both passes of attention over rebuilt keys are cut, and the room that they share.

Shapes as in `latent_decode`; L layers; GP query heads of a value latent, padded; I items of a pass,
S slices of it (see `common.plan`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.ops.backend import has_gluon
from kvfold.ops.common.plan import Slices, padded_queries, padded_width
from kvfold.ops.common.tuning import Tuning, load
from kvfold.ops.latent_decode.groups import LatentGroups

FILE = Path(__file__).with_name("tuning.json")
SPAN = 16  # rows that share a top
HOPPER_BLOCK = 64  # rows of a tile of `scores_gluon`: what a warp group multiplies


@lru_cache
def table() -> list[tuple[dict[str, Any], Tuning]]:
    """All that was measured, on an H200."""
    return load(FILE)


def tuning_for(kernel: str, size: int, bits: int, exact: bool = False) -> Tuning:
    """The first entry of a kernel for as much. size: of `scores_triton`, words of a key row; of
    `scores_gluon`, its codes; of `values_triton`, numbers of an accumulator; bits: of a code;
    exact: no row of a layer is narrower than its widest."""
    return next(
        tuning
        for x, tuning in table()
        if x["kernel"] == kernel
        and (x["most"] is None or size <= x["most"])
        and x["bits"] in (None, bits)
        and (exact or not x["exact"])
    )


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How both passes are cut. heads: KV heads of a program of `scores_gluon`; 0: the other kernel
    scores."""

    scores: Tuning
    values: Tuning
    heads: int = 0

    def share(self, groups: LatentGroups) -> int:
        """How many of `heads` read the same latent, in a layer."""
        return self.heads if self.heads and groups.heads[2] % self.heads == 0 else 1

    @classmethod
    def of(
        cls, layers: Sequence[LatentGroups], queries: int, head_dim: int, biased: bool = False
    ) -> "Passes":
        """The fastest for rows as wide as these layers'; queries: of a KV head; biased: whether a
        layer's means want `scores_triton`'s arithmetic (see `KeyMaps.biased`)."""
        groups = max(layers, key=lambda x: x.widths)
        words, (key_bits, value_bits) = sum(groups.pieces), groups.bits
        numbers = padded_width(groups.widths[1]) * padded_queries(groups.heads[1] * queries)
        heads = 0 if biased else hopper_heads(layers, queries, head_dim)
        if heads:
            exact = all(x.narrowest[0] == x.widths[0] for x in layers)
            scores = tuning_for("scores_gluon", words * 16 // key_bits, key_bits, exact)
        else:
            scores = tuning_for("scores_triton", words, key_bits)
        values = tuning_for("values_triton", numbers, value_bits)
        return cls(scores=scores, values=values, heads=heads)


def hopper_heads(layers: Sequence[LatentGroups], queries: int, head_dim: int) -> int:
    """KV heads of a program of `scores_gluon`; 0 where it does not serve: it takes rows
    without positions, codes of up to 256 numbers, heads of 64 to 128 numbers, 3 to 8 queries a KV
    head, and sm_90."""
    plain = all(x.align % 4 == 0 and not x.tracked for x in layers)
    if not has_gluon(layers[0].keys.device) or not plain:
        return 0
    if not 64 <= head_dim <= 128 or not 2 < queries <= 8:
        return 0
    # Maps of two heads that are wider would not fit; codes become numbers in registers.
    wide = any(sum(x.pieces) * 16 // x.bits[0] > 256 for x in layers)
    if wide and any(x.bits[0] < 16 for x in layers):
        return 0
    return 1 if wide or any(x.heads[0] % 2 for x in layers) else 2


@dataclass(frozen=True)
class Workspace:
    """Room where passes leave what the next one reads; layers take turns.

    weights [rows / SPAN, heads of a group, SPAN], tops fp32 of the same but rows; part, part_ml as
    `DecodePlan` has them; rows: most of a layer.
    """

    weights: Tensor
    tops: Tensor
    part: Tensor
    part_ml: Tensor
    rows: int


@dataclass(frozen=True)
class LatentPlan:
    """One layer's slices of both passes, and where the spans of every (sequence, group) begin,
    int32 [B * G]."""

    scores: Slices
    values: Slices
    bases: Tensor
    room: Workspace
    passes: Passes


def workspace(
    layers: Sequence[LatentGroups],
    queries: int,
    dtype: torch.dtype,
    rows: int,
    runs: int,
    parts: int,
) -> Workspace:
    """runs: sequences times groups; parts: value slices and items (see `Slices`)."""
    groups = layers[0]
    device, (group_heads, value_heads, _) = groups.keys.device, groups.heads
    spans = rows // SPAN + runs
    # Of codes, at least as many words as a product has rows.
    width = max(*(padded_width(x.widths[1]) for x in layers), 256 // groups.bits[1])
    kept = dtype if groups.bits[1] == 16 else torch.float16
    part = torch.empty(parts, padded_queries(value_heads * queries), width, device=device)
    return Workspace(
        weights=torch.empty(spans, group_heads * queries, SPAN, dtype=kept, device=device),
        tops=torch.empty(spans, group_heads * queries, device=device),
        part=part,
        part_ml=part.new_empty(parts, 2, part.shape[1]),
        rows=rows,
    )
