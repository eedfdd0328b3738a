"""Find the largest attention weight of every token over a chunk's queries: Triton kernel and
launches.

Shapes as in `prefill`, units and classes as in `prefill.plan`; N = Hq / Hk query heads per KV head;
BM queries of a tile, all of one head; BN tokens of a tile.
"""
# mypy: allow-untyped-defs

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.plan import cdiv
from kvfold.ops.common.recording import launch_once
from kvfold.ops.prefill.plan import classes_of, parts
from kvfold.ops.prefill.rows import KVView
from kvfold.ops.prefill.triton import _load, _multiple

INTEGERS = ("q_b", "q_h", "q_t", "k_b", "k_s", "c_b", "c_g", "B", "U", "T", "H", "S")


@dataclass(frozen=True, kw_only=True)
class PeaksCut:
    """Tuning of the kernel: tokens and queries of a tile, warps, pipeline stages."""

    rows: int = 128
    queries: int = 64
    warps: int = 8
    stages: int = 3


@triton.jit(do_not_specialize=INTEGERS)
def peaks_kernel(
    q, q_b, q_h, q_t, keys, k_b, k_s, bias, counted, c_b, c_g, of_rows, out, units,
    B, U, T, H, S, scale,
    N: tl.constexpr, DK: tl.constexpr, EK: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr,
    WORTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one unit, with all queries.

    bias fp32 [B, H, tiles * BM], H query heads, -inf beyond T; counted int8 [B, G, S]; of_rows: its
    log2, fp32 [B, H, S], used if WORTH; out fp32 [B, Hk, S]; units: see `prefill_kernel`; scale:
    times log2 e. The loop keeps the largest exponent per token and column of a query tile, so that
    exp2 is computed once.
    """
    item = tl.program_id(0)
    unit, b = units + item % U * 8, (item // U % B).to(tl.int64)
    first = item // (U * B) * BN
    kv_head, group = tl.load(unit), tl.load(unit + 1)
    row = first + tl.arange(0, BN)
    in_range = row < S
    wanted = tl.load(counted + b * c_b + group * c_g + row, in_range, 0) != 0
    worth = tl.zeros([BN], tl.float32)
    if tl.max(wanted.to(tl.int32)) > 0:
        k_s, q_h, q_t = _multiple(k_s, ALIGN), _multiple(q_h, ALIGN), _multiple(q_t, ALIGN)
        rank = tl.multiple_of(tl.load(unit + 3).to(tl.int32), ALIGN)
        keys += tl.multiple_of(b * k_b + tl.load(unit + 2), ALIGN) + k_s.to(tl.int64) * first
        k0 = _load(keys, k_s, rank, in_range, 0, DK, BN, EXACT, True)
        k1 = k0
        if EK > 0:
            k1 = _load(keys, k_s, rank, in_range, DK, EK, BN, EXACT, True)
        peak = tl.full([BN, BM], float("-inf"), tl.float32)
        tiles = tl.cdiv(T, BM)
        column = tl.arange(0, DK)
        for i in tl.range(0, N * tiles, num_stages=STAGES):
            head, start = kv_head * N + i // tiles, i % tiles * BM
            t = tl.minimum(tl.arange(0, BM), T - 1 - start)  # beyond T, repeat the last query
            place = b * q_b + head * q_h + start.to(tl.int64) * q_t
            at = q + tl.multiple_of(place, ALIGN) + (t * q_t)[:, None]
            query = tl.load(at + column) if EXACT else tl.load(at + column, column < rank, 0.0)
            s = tl.dot(k0, tl.trans(query))
            if EK > 0:
                more = DK + tl.arange(0, EK)
                query = tl.load(at + more) if EXACT else tl.load(at + more, more < rank, 0.0)
                s = tl.dot(k1, tl.trans(query), s)
            place = tl.multiple_of(((b * H + kv_head * N) * tiles + i) * BM, BM)
            s = s * scale + tl.load(bias + place + tl.arange(0, BM))[None, :]
            if WORTH:
                s += tl.load(of_rows + (b * H + head) * S + row, in_range, 0.0)[:, None]
            peak = tl.maximum(peak, s)
        worth = tl.where(wanted, tl.exp2(tl.max(peak, 1)), 0.0)
    tl.store(out + (b * (H // N) + kv_head) * S + row, worth, in_range)


def peaks(
    q: Tensor, keys: KVView, bias: Tensor, counted: Tensor, owner: tuple[int, ...], scale: float,
    of_rows: Tensor | None = None, *, cut: PeaksCut | None = None,
) -> Tensor:  # fmt: skip
    """Like `ops.prefill.peaks`, with a launch per class of keys."""
    assert q.stride(-1) == 1 and bias.shape == q.shape[:3] and counted.stride(-1) == 1
    (batch, heads, num_queries, _), rows = q.shape, keys.data.shape[1]
    group, no_values = heads // len(owner), (0,) * len(owner)
    out = torch.empty(batch, len(owner), rows, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *keys.data.stride()[:2])
    counted_bytes = counted.view(torch.int8)
    log_worth = out if of_rows is None else of_rows.log2().contiguous()
    for kind in classes_of(keys.starts, keys.ranks, no_values, no_values, owner, q.device):
        width = sum(kind.widths[:2])
        tiling = cut or PeaksCut(rows=128 if width <= 128 else 64)
        launch_once(
            peaks_kernel, (cdiv(rows, tiling.rows) * batch * len(kind.units),),
            q, *strides[:3], keys.data, *strides[3:],
            F.pad(bias, (0, -num_queries % tiling.queries), value=-torch.inf).contiguous(),
            counted_bytes, *counted_bytes.stride()[:2], log_worth, out, kind.units,
            batch, len(kind.units), num_queries, heads, rows, scale * LOG2_E,
            N=group, DK=kind.widths[0], EK=kind.widths[1],
            EXACT=all(rank == width for rank in keys.ranks if sum(parts(rank)) == width),
            ALIGN=gcd(kind.align, *strides, 8),
            WORTH=of_rows is not None, BM=tiling.queries, BN=tiling.rows, STAGES=tiling.stages,
            num_warps=tiling.warps,
        )  # fmt: skip
    return out
