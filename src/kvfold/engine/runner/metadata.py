"""Batches to the metadata of attention: which tokens attend together.

All decoding sequences do. Prefill chunks are cut where observation of their queries begins, since
that takes more; on a GPU, whose launches would else wait for the host, those of like lengths then
go together, padded, and elsewhere one by one. Shapes: N tokens of a batch; B pieces of chunks that
go together, T tokens of the longest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from torch import Tensor

from kvfold.attention.metadata import AttentionMetadata, PoolView
from kvfold.cache.eviction.scorers.compactor import Local
from kvfold.engine.requests.request import Batch, Request, ScheduledChunk
from kvfold.ops.common.launch import upload

Evicts = Callable[[Request], bool]

TOGETHER = frozenset({"cuda"})  # types of devices
ROWS = 2**15  # rows that pieces which go together read at most, padding included


@dataclass(frozen=True)
class _Piece:
    """`count` tokens of a chunk, from token `begin` of the batch on. stop: the position behind
    all that are stored, the chunk's; observed: whether their queries add to metrics."""

    chunk: ScheduledChunk
    begin: int
    count: int
    stop: int
    observed: bool


def decodes(batch: Batch) -> tuple[ScheduledChunk, ...]:
    """The chunks that come first and are one new token of a decoding request."""
    return tuple(takewhile(lambda x: x.is_decode and len(x.tokens) == 1, batch.chunks))


def metadata_of(
    view: PoolView, batch: Batch, positions: Tensor, evicts: Evicts = lambda request: True
) -> list[AttentionMetadata]:
    """Parts of the tokens at `positions` int64 [N], each of which is in one. evicts: whether a
    request's rows may go; queries of others are not observed where none of those decode beside
    them."""
    parts, singles = [], decodes(batch)
    if singles:
        observed = view.observes_decodes and any(evicts(x.request) for x in singles)
        parts.append(
            AttentionMetadata.for_step(
                view,
                [chunk.request.open_slot for chunk in singles],
                positions[: len(singles)],
                first_token=0,
                stop=max(chunk.end for chunk in singles),
                prompt_lengths=_prompts(singles) if observed else None,
                decode=True,
            )
        )
    pieces = _pieces(view, batch, len(singles), evicts)
    return parts + [_part(view, some, positions) for some in _together(view, pieces)]


def _prompts(chunks: tuple[ScheduledChunk, ...]) -> list[int]:
    return [chunk.request.num_prefill for chunk in chunks]


def _pieces(view: PoolView, batch: Batch, num_decode: int, evicts: Evicts) -> list[_Piece]:
    """Of all chunks but the first, which decode."""
    found, begin = [], num_decode
    for chunk in batch.chunks[num_decode:]:
        count = len(chunk.tokens)
        plain = _unobserved(view, chunk) if evicts(chunk.request) else count
        if plain:
            found.append(_Piece(chunk, begin, plain, chunk.end, False))
        if plain < count:
            found.append(_Piece(chunk, begin + plain, count - plain, chunk.end, True))
        begin += count
    return found


def _unobserved(view: PoolView, chunk: ScheduledChunk) -> int:
    """Queries at the beginning of a prefill chunk that add to no metric."""
    if view.observing is None:
        return len(chunk.tokens)
    window = view.observing.window
    first = 0 if window is None else chunk.request.num_prefill - window
    return min(max(first - chunk.start, 0), len(chunk.tokens))


def _together(view: PoolView, pieces: list[_Piece]) -> list[list[_Piece]]:
    """Pieces that attend in one call: of at least half the length of the longest, and equally long
    where queries count, which must not do so twice."""
    scorer = None if view.policy is None else view.policy.scorer
    if view.device.type not in TOGETHER or isinstance(scorer, Local):
        return [[piece] for piece in pieces]
    found: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda x: (x.observed, -x.count, x.stop)):
        if found and _joins(found[-1], piece):
            found[-1].append(piece)
        else:
            found.append([piece])
    return found


def _joins(some: list[_Piece], piece: _Piece) -> bool:
    longest = max(x.stop for x in (*some, piece))
    least = some[0].count if piece.observed else some[0].count / 2
    alike = piece.observed == some[0].observed and piece.count >= least
    return alike and (len(some) + 1) * longest <= ROWS


def _part(view: PoolView, some: list[_Piece], positions: Tensor) -> AttentionMetadata:
    chunks, first = tuple(x.chunk for x in some), some[0]
    alone = slice(first.begin, first.begin + first.count)
    tokens = None if len(some) == 1 else upload(_tokens(some), view.device)
    return AttentionMetadata.for_step(
        view,
        [chunk.request.open_slot for chunk in chunks],
        positions[alone if tokens is None else tokens].flatten(),
        first_token=first.begin,
        stop=max(x.stop for x in some),
        prompt_lengths=_prompts(chunks) if first.observed else None,
        tokens=tokens,
    )


def _tokens(some: list[_Piece]) -> np.ndarray:
    """Where their tokens are in the batch, int64 [B, T]; short ones begin with their first one more
    than once, so that positions ascend and the last are at the end."""
    begin, count = np.array([(x.begin, x.count) for x in some]).T[..., None]
    found: np.ndarray = begin + np.maximum(np.arange(-count.max(), 0) + count, 0)
    return found
