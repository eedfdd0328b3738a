"""What it gains to repair rows that stay after an eviction, so that they attend as all rows did.

    python benchmarks/repair.py --repair keys --queries prompt --model reference:gqa --length 1024 \
        --ctx 1152 --policies kvzip-keys kvzip --text wiki.txt --json repair.json

As asked_after.py, with a step behind each eviction, after Attention Matching (its code:
adamzweiger/compaction). Of every KV head and its queries, M are the weights of the rows that stay
as shares of all rows', and w = argmin |M w - 1|^2: log w would make good for what left. Then v =
argmin |A v - y|^2, A the attention to rows that stay and y what attention to all of them gave. Both
are held to what is there by a ridge. --repair `values`: v alone; `bias`: log w is added to scores,
as no kernel does; `keys`: log w times u is added to keys, u being what has products closest to 1
with the queries, which takes no bytes. --queries: of the second reading, or the prompt's own,
turned to positions after it.
Rows of keys and values as the model made them, a sequence at a time, in PyTorch.

Shapes: m queries of a KV head, T rows of the context, S that stay, d of a head.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import asked_after
import torch
from torch import Tensor

from kvfold.attention.base import LayerMaps
from kvfold.attention.paged import PagedContext
from kvfold.attention.replay import ReplayContext
from kvfold.attention.rows import gather_rows, member_of
from kvfold.engine.runner import ModelRunner
from kvfold.ops.common.pages import LayerPages, plan_pages, words_of
from kvfold.ops.store import StoredRows, append, read_tracked
from kvfold.ops.store.reference import _track_address

QUERIES = 512  # of a KV head that are matched
AFTER = 128  # positions after the prompt that its queries are turned to
WEIGHTS, VALUES = 0.1, 1.0  # ridges, as shares of the mean of the matrix's diagonal
MOST = 3.0  # log w, up or down


def nearest(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    """The x [S, .] least in |a x - b|^2 + ridge |x|^2: a fp64 [m, S], b [m, .]."""
    held = ridge * a.square().sum() / a.shape[1]
    few = a if len(a) < a.shape[1] else a.mT
    gram = few @ few.mT
    gram.diagonal().add_(held)
    if few is a:
        return a.mT @ torch.linalg.solve(gram, b)
    return torch.linalg.solve(gram, a.mT @ b)


def repaired(
    q: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], how: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [S, d] and biases [S] of the rows that stay: q [m, d], scaled; before: keys
    and values [T, d] of all rows; after: those that stay."""
    full, (k, v) = q @ before[0].mT, after
    target, bias = full.softmax(-1) @ before[1], torch.zeros_like(k[:, 0])
    if how != "values":
        shares = (q @ k.mT - full.logsumexp(-1, keepdim=True)).exp().double()
        missing = 1 - shares.sum(-1, keepdim=True)
        w = 1 + nearest(shares, missing, WEIGHTS)[:, 0]
        bias = w.log().nan_to_num(-MOST).clamp(-MOST, MOST).float()
    if how == "keys":
        u = nearest(q.double(), torch.ones(len(q), 1, dtype=torch.float64), 0.01)
        k, bias = k + bias[:, None] * u[:, 0].float(), torch.zeros_like(bias)
    weights = (q @ k.mT + bias).softmax(-1).double()
    more = nearest(weights, target.double() - weights @ v.double(), VALUES)
    return k, v + more.float(), bias


@dataclass
class Repair:
    """Watches a runner, and changes rows that stay behind each eviction."""

    how: str
    queries: str
    prompt: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, [Hq, n, d]
    reading: dict[int, Any] = field(default_factory=dict)
    bias: dict[int, Tensor] = field(default_factory=dict)  # fp32 [Hk, rows]

    @contextmanager
    def watch(self) -> Iterator[None]:
        attend, read, compress = PagedContext.attend, ReplayContext._reading, ModelRunner.compress

        def attending(step: PagedContext, layer: LayerMaps, q: Tensor, rows: Tensor) -> Tensor:
            out = attend(step, layer, q, rows)
            if int(step.positions[0]) == 0:
                self.prompt[layer.index] = []
                self.bias.pop(layer.index, None)
            self.prompt[layer.index].append(q[0])
            return self._biased(step, layer, q) if layer.index in self.bias else out

        def reading(context: ReplayContext, layer: LayerMaps, q: Tensor, rows: Tensor) -> Any:
            self.reading[layer.index] = found = read(context, layer, q, rows)
            return found

        def compressing(runner: ModelRunner, requests: list[Any]) -> None:
            compress(runner, requests)
            for request in requests:
                self._change(runner, request)

        with (
            patch.object(PagedContext, "attend", attending),
            patch.object(ReplayContext, "_reading", reading),
            patch.object(ModelRunner, "compress", compressing),
        ):
            yield

    def _biased(self, step: PagedContext, layer: LayerMaps, q: Tensor) -> Tensor:
        """What W_O takes, of one sequence whose scores have biases."""
        slot, g = step.slots[:1], layer.geometry
        stored = gather_rows(step.view, layer, slot, int(step.view.pool.host_lengths.max()))
        member = member_of(step.view.pages[layer.index].groups, q.device)
        before = stored.positions[:, member, None] <= step.positions[:, None]
        mask = torch.zeros(1, g.num_kv_heads, q.shape[2], stored.rows.shape[1])
        own = self.bias[layer.index]
        mask[..., : own.shape[1]] += own[:, None]
        mask = mask.masked_fill(~(stored.valid[:, member, None] & before), -torch.inf)
        return layer.attend(q, stored.rows, None, mask.repeat_interleave(g.queries_per_kv, 1))[0]

    @torch.inference_mode()
    def _change(self, runner: ModelRunner, request: Any) -> None:
        slot = torch.tensor([request.open_slot])
        for index, read in self.reading.items():
            layer, pages = read.layer, runner.attention.view.pages[index]
            assert layer.key_up is None and layer.value_up is None, "of rows as the model made them"
            stored = gather_rows(runner.attention.view, layer, slot, int(pages.lengths[slot].max()))
            q, member = self._asking(runner, read), member_of(read.groups, slot.device)
            heads = layer.geometry.num_kv_heads
            biases = torch.zeros(heads, stored.rows.shape[1])
            for head in range(heads):
                group = member[head % len(member)]
                old = read.stored.valid[0, group] & (
                    read.stored.positions[0, group] < read.positions[0]
                )
                stays = stored.valid[0, group]
                places = [(x.places[0][head], x.places[1][head]) for x in _sides(layer)]
                before = tuple(read.stored.rows[0, old, a : a + n] for a, n in places)
                after = tuple(stored.rows[0, stays, a : a + n] for a, n in places)
                k, v, bias = repaired(q[head] * layer.scale, before, after, self.how)
                for x, (a, n) in zip((k, v), places, strict=True):
                    stored.rows[0, stays, a : a + n] = x
                biases[head, : len(bias)] = bias
            if self.how == "bias":
                self.bias[index] = biases
            rewrite(pages, slot, stored)

    def _asking(self, runner: ModelRunner, read: Any) -> Tensor:
        """Queries [Hk, m, d] of a layer."""
        q = read.q[0]
        if self.queries == "prompt":
            q = torch.cat(self.prompt[read.layer.index], 1)
            start = q.shape[1]
            at = torch.arange(start)
            turn = start + at % AFTER - at
            cos, sin = runner.family.rotary(runner.model)(q, turn[None])
            a, b = q.chunk(2, -1)
            q = q * cos[0] + torch.cat((-b, a), -1) * sin[0]
        q = q.unflatten(0, (read.layer.geometry.num_kv_heads, -1)).flatten(1, 2)
        return q[:, :: -(-q.shape[1] // QUERIES)].float()


def _sides(layer: LayerMaps) -> tuple[Any, Any]:
    return layer.key_columns, layer.value_columns


def rewrite(pages: LayerPages, slot: Tensor, stored: StoredRows) -> None:
    """Write a sequence's rows over those that are there; positions and metrics stay."""
    lengths, size = pages.lengths[slot], stored.rows.shape[1]
    assert lengths.min() > 0, "of groups that keep a row at least"
    metrics, positions, _ = read_tracked(pages, slot, lengths, size)
    index = torch.minimum(torch.arange(size)[:, None], lengths.long() - 1)
    rows = stored.rows[0].clone()
    for number, group in enumerate(pages.groups):  # behind a shorter group its last row once more
        for x in group.layout.segments:
            rows[:, x.start : x.start + x.width] = rows[
                index[:, number], x.start : x.start + x.width
            ]
    append(pages, rows, slot.expand(size), index, torch.zeros(size, dtype=torch.int32))
    words = words_of(pages.arena, torch.int32)
    for kind in plan_pages(pages.groups, slot.device).kinds:
        keep, blocks = stored.valid[:, kind.numbers], kind.layout.blocks
        for block, saved in ((blocks.positions, positions), (blocks.metrics, metrics)):
            where = _track_address(pages.tables, kind, block, slot, keep)[keep]
            words[where] = saved[:, kind.numbers][keep].view(torch.int32)


@dataclass(frozen=True, kw_only=True)
class Case(asked_after.Case):
    """A row of asked_after.py, and how it is repaired."""

    repair: str
    queries: str

    @property
    def name(self) -> str:
        return f"{super().name} {self.repair} {self.queries}" if self.evict else super().name


class Bench(asked_after.Bench):
    how: tuple[str, ...]
    queries: str

    def wanted(self, cases: Iterable[Any]) -> list[Any]:
        each = [(x, how) for x in cases for how in (self.how if x.evict else ("none",))]
        return super().wanted(
            Case(**asdict(case), repair=how, queries=self.queries) for case, how in each
        )

    def row(self, case: Any) -> dict[str, Any]:
        with nullcontext() if case.repair == "none" else Repair(case.repair, case.queries).watch():
            return super().row(case)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--repair", nargs="+", choices=("none", "values", "bias", "keys"))
    parser.add_argument("--queries", choices=("prompt", "reading"), default="prompt")
    own, rest = parser.parse_known_args()
    Bench.how, Bench.queries = tuple(own.repair), own.queries
    with patch.object(asked_after, "Bench", Bench), patch.object(sys, "argv", [sys.argv[0], *rest]):
        asked_after.main()


if __name__ == "__main__":
    main()
