"""Batches to parts: which tokens attend together.

All decoding sequences do; prefill chunks go one by one, cut where observation of their queries
begins, since that takes more. Shapes: N tokens of a batch, B sequences of a part.
"""

from dataclasses import replace
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from kvfold.engine.backends import AttentionContext, AttentionMetadata
from kvfold.engine.request import Batch, ScheduledChunk


def decodes(batch: Batch) -> tuple[ScheduledChunk, ...]:
    """The pieces that come first and are one new token of a decoding sequence."""
    return tuple(takewhile(lambda x: x.is_decode and len(x.tokens) == 1, batch.pieces))


def split(setup: AttentionContext, batch: Batch, positions: Tensor) -> list[AttentionMetadata]:
    """Parts of the tokens at `positions` int64 [N], one after another."""
    parts, singles = [], decodes(batch)
    if singles:
        part = _part(setup, 0, singles, positions[: len(singles)], setup.watches_decodes)
        parts.append(replace(part, decode=True))
    begin = len(singles)
    for piece in batch.pieces[len(singles) :]:
        end, border = begin + len(piece.tokens), begin + _unobserved(setup, piece)
        if border > begin:
            parts.append(_part(setup, begin, (piece,), positions[begin:border], False))
        if end > border:
            parts.append(_part(setup, border, (piece,), positions[border:end], True))
        begin = end
    return parts


def decoding(setup: AttentionContext, slots: Tensor, positions: Tensor) -> AttentionMetadata:
    """One token of every sequence, with nothing from the host: slots, positions int64 [B]."""
    return AttentionMetadata(
        begin=0,
        slots=slots,
        positions=positions[:, None],
        sizes=(),
        rows=_most_rows(setup, len(slots)),
        stop=0,
        # Generated tokens are observed wherever the prompt ended.
        prompt_lengths=torch.zeros_like(slots) if setup.watches_decodes else None,
        decode=True,
    )


def _most_rows(setup: AttentionContext, batch: int) -> int:
    """What `batch` sequences may have in a layer: all memory may be one group's where rows are
    dropped, else every group has as many."""
    pool, layout = setup.pool, setup.pool.layout
    most = max(len(pages.groups) for pages in setup.pages)
    if layout.tracked:
        held = pool.arena.numel() // min(group.layout.page_bytes for group in layout.groups)
    else:
        held = pool.arena.numel() // layout.page_bytes * most
    return min(held * layout.page, batch * pool.max_tokens * most)


def _unobserved(setup: AttentionContext, piece: ScheduledChunk) -> int:
    """How many of a prefill chunk's first queries add to no metric."""
    if (policy := setup.attention_policy) is None:
        return len(piece.tokens)
    first = 0 if policy.window is None else piece.sequence.num_prefill - policy.window
    return min(max(first - piece.start, 0), len(piece.tokens))


def _part(
    setup: AttentionContext,
    begin: int,
    pieces: tuple[ScheduledChunk, ...],
    positions: Tensor,
    watch: bool,
) -> AttentionMetadata:
    """positions [B * T], from token `begin` on."""
    slots = [piece.sequence.open_slot for piece in pieces]
    lengths = [piece.sequence.num_prefill for piece in pieces]
    rows, device = setup.pool.host_lengths[slots], setup.pool.device
    firsts = [where.start for where in setup.pool.layout.layer_groups]
    return AttentionMetadata(
        begin=begin,
        slots=torch.tensor(slots, device=device),
        positions=positions.view(len(pieces), -1),
        sizes=np.maximum.reduceat(rows.max(0), firsts).tolist(),
        rows=int(np.add.reduceat(rows.sum(0), firsts).max()),
        stop=max(piece.start + len(piece.tokens) for piece in pieces),
        prompt_lengths=torch.tensor(lengths, device=device) if watch else None,
    )
