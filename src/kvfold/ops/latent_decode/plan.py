"""Plans of the kernel `triton`: how both passes are tuned and divided, and their shared workspace.

Shapes as in `latent_decode`; L layers; GP query heads of a value latent, padded; I items of a pass,
S splits of it (see `common.plan`).
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
SPAN = 16  # entries that share a maximum score
HOPPER_BLOCK = 64  # entries per tile of `scores_gluon`: rows of a warp group's matrix product


@lru_cache
def table() -> list[tuple[dict[str, Any], Tuning]]:
    """Return all measurements, made on an H200."""
    return load(FILE)


def tuning_for(kernel: str, size: int, bits: int, exact: bool = False) -> Tuning:
    """Return a kernel's tuning: the first entry of tuning.json that covers this size.

    size: for `scores_triton` code words of a key latent; for `scores_gluon` its codes; for
        `values_triton` numbers of an accumulator; bits: of a code; exact: whether all latents of a
        layer are as wide as the widest.
    """
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
    """Tuning of both passes.

    heads: KV heads per program of `scores_gluon`; 0: `scores_triton` computes the scores.
    """

    scores: Tuning
    values: Tuning
    heads: int = 0

    def share(self, groups: LatentGroups) -> int:
        """Return how many of `heads` read the same latent in a layer."""
        return self.heads if self.heads and groups.heads[2] % self.heads == 0 else 1

    @classmethod
    def of(
        cls, layers: Sequence[LatentGroups], queries: int, head_dim: int, biased: bool = False
    ) -> "Passes":
        """Return the fastest tuning for latents as wide as these layers'.

        queries: query heads per KV head; biased: whether a layer's means need the arithmetic of
            `scores_triton` (see `KeyMaps.biased`).
        """
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
    """Return the number of KV heads per program of `scores_gluon`, or 0 if it does not support the
    layers.

    It supports entries without stored positions, codes of up to 256 numbers, head dims 64 to 128, 3
    to 8 query heads per KV head, and sm_90 only.
    """
    plain = all(x.align % 4 == 0 and not x.tracked for x in layers)
    if not has_gluon(layers[0].keys.device) or not plain:
        return 0
    if not 64 <= head_dim <= 128 or not 2 < queries <= 8:
        return 0
    # Wider maps of two heads would not fit into shared memory, nor wider codes into registers.
    wide = any(sum(x.pieces) * 16 // x.bits[0] > 256 for x in layers)
    if wide and any(x.bits[0] < 16 for x in layers):
        return 0
    return 1 if wide or any(x.heads[0] % 2 for x in layers) else 2


@dataclass(frozen=True)
class Workspace:
    """Buffers between the passes, reused by all layers.

    weights [rows / SPAN, query heads of a group, SPAN], tops fp32
    [rows / SPAN, query heads of a group]: maximum score of a span; part, part_ml as in
    `decode_kernel`; rows: most entries of a layer.
    """

    weights: Tensor
    tops: Tensor
    part: Tensor
    part_ml: Tensor
    rows: int


@dataclass(frozen=True)
class LatentPlan:
    """One layer's splits of both passes.

    bases int32 [B * G]: number of the first span of every (sequence, group).
    """

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
    """Allocate the workspace. runs: sequences times groups; parts: splits and items of the value
    pass (see `Slices`)."""
    groups = layers[0]
    device, (group_heads, value_heads, _) = groups.keys.device, groups.heads
    spans = rows // SPAN + runs
    # Codes: at least as many words as a matrix product has rows.
    width = max(*(padded_width(x.widths[1]) for x in layers), 256 // groups.bits[1])
    weight_dtype = dtype if groups.bits[1] == 16 else torch.float16
    part = torch.empty(parts, padded_queries(value_heads * queries), width, device=device)
    return Workspace(
        weights=torch.empty(spans, group_heads * queries, SPAN, dtype=weight_dtype, device=device),
        tops=torch.empty(spans, group_heads * queries, device=device),
        part=part,
        part_ml=part.new_empty(parts, 2, part.shape[1]),
        rows=rows,
    )
