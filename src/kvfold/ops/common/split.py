"""Plan two-pass attention: how the work is split, and the workspace that both passes share.

Shapes: B sequences, G groups of a layer, L layers, V tiles of values; S slices (see `plan`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.layout.pages import Group, LayerGroups
from kvfold.ops.common.launch import multiprocessors
from kvfold.ops.common.pieces import value_heads, value_pieces
from kvfold.ops.common.plan import Slices, columns_of, padded_queries
from kvfold.ops.common.plan_triton import plan_slices
from kvfold.ops.common.tuning import Tuning

SPAN = 16  # tokens that share a maximum score
VALUES = Tuning(block=64, stages=3, warps=4, slices=2)
OVERHEAD = 2048  # cost of starting an item, in bits read per token


@dataclass(frozen=True)
class Workspace:
    """Scratch buffers between the two passes, reused by all layers.

    weights fp16 [spans, heads of a group, SPAN]: softmax weights, relative to the span's maximum.
    tops fp32 [spans, heads of a group]: the maximum score of every span of SPAN tokens.
    part, part_ml: as in `DecodePlan`; rows: most token entries of a layer, all its groups together.
    """

    weights: Tensor
    tops: Tensor
    part: Tensor
    part_ml: Tensor
    rows: int


@dataclass(frozen=True)
class SplitPlan:
    """One layer's plan of both passes.

    scores, values: slices of the first and the second pass; bases int32 [B * G]: first span of
        every (sequence, group); cuts: tuning of both passes; wide: whether keys are too wide to
        hold at once, so that they are scored tile by tile.
    """

    scores: Slices
    values: Slices
    bases: Tensor
    room: Workspace
    cuts: tuple[Tuning, Tuning]
    wide: bool = False


def plan_split(
    layers: Sequence[Sequence[Group]],
    keys: Sequence[tuple[Tensor, Tensor]],
    lengths: Tensor,
    queries: int,
    rows: int,
    scores: Tuning,
    weighed: Tuning = VALUES,
) -> list[SplitPlan]:
    """Plan both passes of layers with equally many groups.

    keys: per layer (table, cost), both int32: table[:, 0] is the group of every key line (a KV head
        or a key latent), cost its cost per tile; lengths int [B, groups of all layers]; rows: most
        token entries of a layer, all its groups together.
    """
    device, first = lengths.device, layers[0]
    values = [value_pieces(LayerGroups.of(x), queries, device) for x in layers]
    counts = lengths.unflatten(1, (len(layers), -1))  # [B, L, G]
    spans = (-(-counts.transpose(0, 1) // SPAN)).flatten(1)
    bases = (spans.cumsum(1) - spans).int()
    of_keys = _slices([(table[:, 0], cost) for table, cost in keys], lengths, scores)
    of_values = _slices([(x.table[:, 6], x.cost) for x in values], lengths, weighed)
    parts = max(x.starts.shape[0] - 1 + len(x.counts) for x in of_values)
    columns = padded_queries(value_heads(first) * queries)
    width = max(words * 16 // bits for x in values for bits, words in x.forms)
    heads, most = len(first[0].heads) * queries, rows // SPAN + counts[:, 0].numel()
    room = Workspace(
        weights=torch.empty(most, heads, SPAN, dtype=torch.float16, device=device),
        tops=torch.empty(most, heads, device=device),
        part=torch.empty(parts, columns, width, device=device),
        part_ml=torch.empty(parts, 2, columns, device=device),
        rows=rows,
    )
    plans = zip(of_keys, of_values, bases, strict=True)
    return [SplitPlan(*x, room, (scores, weighed)) for x in plans]


def _slices(
    items: Sequence[tuple[Tensor, Tensor]], lengths: Tensor, tuning: Tuning
) -> list[Slices]:
    """Plan the slices of one pass. items: per layer the group and the cost of every table line.
    Layers with equally many lines are planned in one launch."""
    by_size = defaultdict(list)
    for i, (owners, _) in enumerate(items):
        by_size[len(owners)].append(i)
    slices_of: dict[int, Slices] = {}
    for layers in by_size.values():
        owners, cost = (torch.stack(x) for x in zip(*(items[i] for i in layers), strict=True))
        counts = columns_of(lengths, len(items), layers).unflatten(1, (len(layers), -1))
        item_lengths = counts.gather(2, owners.long().expand(len(counts), -1, -1)).flatten(1)
        number = tuning.slices * multiprocessors(lengths.device)
        slices, _ = plan_slices(item_lengths, None, cost, tuning.block, OVERHEAD, number, 1)
        slices_of |= {i: slices.layer(place) for place, i in enumerate(layers)}
    return [slices_of[i] for i in range(len(items))]
