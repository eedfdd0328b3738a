"""How attention in two passes is cut, and the room that they share.

Shapes: B sequences, G groups of a layer, L layers, V pieces of values; S slices (see `plan`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.layout.pages import Group
from kvfold.ops.common.launch import multiprocessors
from kvfold.ops.common.pieces import value_heads, value_pieces
from kvfold.ops.common.plan import Slices, columns_of, padded_queries
from kvfold.ops.common.plan_triton import plan_slices
from kvfold.ops.common.tuning import Tuning

SPAN = 16  # rows that share a top
VALUES = Tuning(block=64, stages=3, warps=4, slices=2)
OVERHEAD = 2048  # cost of beginning an item, in bits of a row


@dataclass(frozen=True)
class Workspace:
    """Room where passes leave what the next one reads; layers take turns.

    weights fp16 [rows / SPAN, heads of a group, SPAN], tops fp32 of the same but rows; part,
    part_ml as `DecodePlan` has them; rows: most of a layer.
    """

    weights: Tensor
    tops: Tensor
    part: Tensor
    part_ml: Tensor
    rows: int


@dataclass(frozen=True)
class SplitPlan:
    """One layer's slices of both passes, and where the spans of every (sequence, group) begin,
    int32 [B * G]; cuts: of both; wide: whether keys are scored piece by piece."""

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
    """Of layers with equally many groups. keys: of every layer a table whose lines, one a KV head
    or key latent, begin with the group of its rows, and the cost of a tile of each, both int32;
    lengths int [B, groups of all layers]; rows: at most as many has a layer, its groups added up.
    """
    device, first = lengths.device, layers[0]
    values = [value_pieces(tuple(x), queries, device) for x in layers]
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
    each = zip(of_keys, of_values, bases, strict=True)
    return [SplitPlan(*x, room, (scores, weighed)) for x in each]


def _slices(
    items: Sequence[tuple[Tensor, Tensor]], lengths: Tensor, tuning: Tuning
) -> list[Slices]:
    """Of every layer, whose items are (sequence, line): the group and the cost of every line.
    Layers of as many lines are planned at once."""
    alike = defaultdict(list)
    for i, (owners, _) in enumerate(items):
        alike[len(owners)].append(i)
    found: dict[int, Slices] = {}
    for own in alike.values():
        owners, cost = (torch.stack(x) for x in zip(*(items[i] for i in own), strict=True))
        counts = columns_of(lengths, len(items), own).unflatten(1, (len(own), -1))
        each = counts.gather(2, owners.long().expand(len(counts), -1, -1)).flatten(1)
        number = tuning.slices * multiprocessors(lengths.device)
        slices, _ = plan_slices(each, None, cost, tuning.block, OVERHEAD, number, 1)
        found |= {i: slices.layer(place) for place, i in enumerate(own)}
    return [found[i] for i in range(len(items))]
