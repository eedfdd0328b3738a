"""Filled caches whose rows are in score space, and attention over them written out in float64.

Shapes: S slots, B sequences, G groups, N query heads of each, R numbers of a row, T rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

from kvfold.layout.latents import SIDES
from kvfold.layout.pages import CacheLayout, Group, Latent
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.pieces import latents_of, widest_value
from kvfold.ops.store import reference as store
from store_cases import DEVICE, Store, numbers, one_layer, sizes, stored
from tolerance import attention_errors

Ranks = list[tuple[int, int]]


def per_head(ranks: Ranks, **options) -> CacheLayout:
    """(key, value) rank of every KV head."""
    latents = [
        Latent(side=side, heads=(head,), rank=rank[i])
        for i, side in enumerate(SIDES)
        for head, rank in enumerate(ranks)
    ]
    return one_layer(latents, **options)


def mixed(*bits: tuple[int, int], **options) -> CacheLayout:
    """16 keys and 16 values of every head, in so many bits."""
    latents = [
        Latent(side=side, heads=(head,), rank=16, tiers=((16, each[i]),))
        for i, side in enumerate(SIDES)
        for head, each in enumerate(bits)
    ]
    return one_layer(latents, page=16, **options)


def heads_of(
    q: Tensor, rows: Tensor, groups: tuple[Group, ...], lengths: Tensor
) -> Iterator[tuple[int, slice, Tensor, Tensor, Tensor]]:
    """(b, its query heads, q [N, dk], k [T, dk], v [T, dv]) of every KV head, float64.

    q [B, Hq, widest key]; rows [B, T, R] as they come back; lengths [B, G].
    """
    size = q.shape[1] // sum(len(group.heads) for group in groups)
    for g, head in ((g, head) for g, group in enumerate(groups) for head in group.heads):
        columns = {
            side: [
                column
                for x in groups[g].layout.segments
                if x.side == side and head in x.heads
                for column in range(x.start, x.start + x.width)
            ]
            for side in "kv"
        }
        heads = slice(head * size, (head + 1) * size)
        for b in range(len(q)):
            mine = rows[b, : int(lengths[b, g])].double()
            k, v = mine[:, columns["k"]], mine[:, columns["v"]]
            yield b, heads, q[b, heads, : k.shape[1]].double(), k, v


def written_out(
    q: Tensor, rows: Tensor, groups: tuple[Group, ...], lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """float64 outputs [B, Hq, widest value], log2-sum-exp2s [B, Hq] and weights [B, Hq, T]."""
    widest = widest_value(groups)
    out = torch.zeros(*q.shape[:2], widest, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    weights = out.new_zeros(*out.shape[:2], rows.shape[1])
    for b, heads, mine, k, v in heads_of(q, rows, groups, lengths):
        scores = mine @ k.T * scale
        weights[b, heads, : len(k)] = scores.softmax(-1)
        out[b, heads, : v.shape[1]] = weights[b, heads, : len(k)] @ v
        lse[b, heads] = scores.logsumexp(-1) * log2(e)
    return out, lse, weights


def most_off(
    q: Tensor, rows: Tensor, sizes: Tensor, groups: tuple[Group, ...], lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """How far outputs [B, Hq, widest value] and log2-sum-exp2s [B, Hq] may be off in float32.
    sizes [B, T, R]: what rows are summed from."""
    out = torch.zeros(*q.shape[:2], widest_value(groups), dtype=torch.float64)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    both = [heads_of(q, x, groups, lengths) for x in (rows, sizes)]
    for (b, heads, mine, k, v), (*_, of_k, of_v) in zip(*both, strict=True):
        if len(k):
            found = attention_errors(mine, k, v, scale, (of_k, of_v))
            out[b, heads, : v.shape[1]], lse[b, heads] = found.out, found.lse
    return out, lse


@dataclass
class Case:
    """A filled cache and what attention over it gives.

    Rows that nobody owns are NaN, pages that nobody owns are far away, and so are the lengths of
    slots that are not asked for.
    """

    args: tuple  # of `decode`
    out: Tensor
    lse: Tensor
    weights: Tensor
    slack: tuple[Tensor, Tensor]  # of `out` and of `lse`, computed in float32

    def is_near(self, out: Tensor) -> Tensor:
        """Is a sequence's output [Hq, widest value] what float32 gives? bool [B]."""
        return ((out.cpu().double() - self.out).abs() <= self.slack[0]).flatten(1).all(1)

    @classmethod
    def of(
        cls, layout: CacheLayout, lengths: list[list[int]], queries: int, dtype: torch.dtype,
        *, seed: int = 0, peak: float | None = None, page_offset: int = 0,
        level: tuple[float, float] | None = None, first: float = 1.0,
    ) -> "Case":  # fmt: skip
        """lengths [B, G]. peak: the largest score; None: what chance makes of it.
        page_offset: how far away all pages are, in units. level: a constant of all keys of a head,
        and of its queries there; first: how much larger a first row's numbers are (see
        `hard_heads`)."""
        groups, page = layout.groups, layout.page
        chance = torch.Generator().manual_seed(seed)
        counts = torch.tensor(lengths, dtype=torch.int32)
        num, size = len(counts) + 1, max(1, int(counts.max()))
        spare = -(-size // page) * page  # first row of a page for what no group owns
        on = Store.of(layout, num, spare + page, seed)
        slots = torch.randperm(num, generator=chance)[:-1]
        token = torch.arange(size)
        index = torch.where(token < counts[..., None], token, spare).mT.flatten(0, 1)
        rows = numbers(seed, dtype, len(counts), size, on.width)
        rows[:, 0] *= first
        arena, tables = on.arena.cpu(), on.tables.cpu()
        q = queries_of(groups, queries, dtype, len(counts), seed)
        if level is not None:
            rows[..., [own[0].start for x in groups for own in latents_of(x, "k")]] = level[0]
            q[..., 0] = level[1]
        positions = torch.randperm(3 * len(index), generator=chance)[: len(index)].int()
        owner = slots.repeat_interleave(size)
        pages = on.pages._replace(arena=arena, tables=tables)
        store.append(pages, rows.flatten(0, 1), owner, index, positions)
        all_lengths = torch.full((num, len(groups)), 2**30, dtype=torch.int32)
        all_lengths[slots] = counts
        far = torch.arange(tables.shape[2]) * page >= all_lengths[..., None]
        tables = torch.where(far, 2**30, tables + page_offset)
        arena = torch.cat((arena.new_full((64 * page_offset,), 255), arena))
        whole = torch.stack([stored(rows.float(), group).double() for group in groups]).sum(0)
        scale = 0.1
        if peak is not None:
            scores = [x @ k.T for _, _, x, k, _ in heads_of(q, whole, groups, counts)]
            scale = peak / max(float(x.abs().max()) for x in scores if x.numel())
        place = arena.to(DEVICE), tables.to(DEVICE), all_lengths.to(DEVICE)
        beyond = torch.cat((slots, torch.tensor([2**40]))).to(DEVICE)
        found = written_out(q, whole, groups, counts, scale)
        each = torch.stack([sizes(rows.float(), group).double() for group in groups]).sum(0)
        slack = most_off(q, whole, each, groups, counts, scale)
        return cls((q.to(DEVICE), LayerPages(*place, groups), beyond[:-1], scale), *found, slack)


def queries_of(
    groups: tuple[Group, ...], size: int, dtype: torch.dtype, batch: int, seed: int
) -> Tensor:
    """Random queries [B, Hq, widest key], 0 beyond a head's rank."""
    ranks = torch.zeros(sum(len(group.heads) for group in groups), dtype=torch.int64)
    for latent in (own for group in groups for own in latents_of(group, "k")):
        ranks[list(latent[0].heads)] = sum(x.width for x in latent)
    widest = int(ranks.max())
    q = numbers(seed + 1, dtype, batch, len(ranks) * size, widest)
    return q * (torch.arange(widest) < ranks.repeat_interleave(size)[:, None])


def error(found: Tensor, want: Tensor) -> float:
    """Largest error of a head, over the norm of what it should be."""
    difference = (found.cpu().double() - want).norm(dim=-1)
    return float((difference / want.norm(dim=-1).clamp(min=1e-9)).max())
