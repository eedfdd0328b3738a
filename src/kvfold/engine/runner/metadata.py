"""Build the attention metadata of a batch: which tokens attend in one call.

Decodes form one call. A prefill chunk is cut in two where its queries begin to count for eviction
scores. On a GPU, chunk parts of similar length are padded and share a call, which saves launches;
on other devices each part is a call. (In `attention` a call is called a part of the step.)

Shapes: N tokens of a batch; B chunk parts of a call, T tokens of the longest.
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

BATCHED_DEVICES = frozenset({"cuda"})  # device types on which prefill chunks form one call
MAX_ENTRIES = 2**15  # most cache entries that such a call reads, padding included


@dataclass(frozen=True)
class _ChunkPart:
    """Part of a prefill chunk: `count` tokens from token `begin` of the batch on.

    end_position: one past the chunk's last position. observed: whether its queries count for
        eviction scores.
    """

    chunk: ScheduledChunk
    begin: int
    count: int
    end_position: int
    observed: bool


def decodes(batch: Batch) -> tuple[ScheduledChunk, ...]:
    """The leading chunks that are single-token decodes."""
    return tuple(takewhile(lambda x: x.is_decode and len(x.tokens) == 1, batch.chunks))


def build_attention_metadata(
    view: PoolView, batch: Batch, positions: Tensor, evicts: Evicts = lambda request: True
) -> list[AttentionMetadata]:
    """One AttentionMetadata per attention call. Each token of the batch is in exactly one.

    positions: int64 [N]. evicts: tells whether a request's entries may be evicted. If
        none of the decoding requests' may, their queries are not observed.
    """
    calls, singles = [], decodes(batch)
    if singles:
        observed = view.observes_decodes and any(evicts(x.request) for x in singles)
        calls.append(
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
    parts = _chunk_parts(view, batch, len(singles), evicts)
    return calls + [_metadata(view, call, positions) for call in _calls(view, parts)]


def _prompts(chunks: tuple[ScheduledChunk, ...]) -> list[int]:
    return [chunk.request.num_prefill for chunk in chunks]


def _chunk_parts(view: PoolView, batch: Batch, num_decode: int, evicts: Evicts) -> list[_ChunkPart]:
    """Parts of the prefill chunks."""
    parts, begin = [], num_decode
    for chunk in batch.chunks[num_decode:]:
        count = len(chunk.tokens)
        num_unobserved = _unobserved(view, chunk) if evicts(chunk.request) else count
        if num_unobserved:
            parts.append(_ChunkPart(chunk, begin, num_unobserved, chunk.end, False))
        if num_unobserved < count:
            parts.append(
                _ChunkPart(chunk, begin + num_unobserved, count - num_unobserved, chunk.end, True)
            )
        begin += count
    return parts


def _unobserved(view: PoolView, chunk: ScheduledChunk) -> int:
    """Number of leading queries of a prefill chunk that count for no eviction score."""
    if view.observing is None:
        return len(chunk.tokens)
    window = view.observing.window
    first = 0 if window is None else chunk.request.num_prefill - window
    return min(max(first - chunk.start, 0), len(chunk.tokens))


def _calls(view: PoolView, parts: list[_ChunkPart]) -> list[list[_ChunkPart]]:
    """Group parts into calls. In a call the longest part is at most twice the shortest; observed
    parts are equally long, because padding repeats a query, which would be counted twice."""
    scorer = None if view.policy is None else view.policy.scorer
    if view.device.type not in BATCHED_DEVICES or isinstance(scorer, Local):
        return [[part] for part in parts]
    calls: list[list[_ChunkPart]] = []
    for part in sorted(parts, key=lambda x: (x.observed, -x.count, x.end_position)):
        if calls and _fits_call(calls[-1], part):
            calls[-1].append(part)
        else:
            calls.append([part])
    return calls


def _fits_call(call: list[_ChunkPart], part: _ChunkPart) -> bool:
    longest = max(x.end_position for x in (*call, part))
    shortest = call[0].count if part.observed else call[0].count / 2
    is_similar = part.observed == call[0].observed and part.count >= shortest
    return is_similar and (len(call) + 1) * longest <= MAX_ENTRIES


def _metadata(view: PoolView, call: list[_ChunkPart], positions: Tensor) -> AttentionMetadata:
    chunks, first = tuple(x.chunk for x in call), call[0]
    token_range = slice(first.begin, first.begin + first.count)
    tokens = None if len(call) == 1 else upload(_padded_tokens(call), view.device)
    return AttentionMetadata.for_step(
        view,
        [chunk.request.open_slot for chunk in chunks],
        positions[token_range if tokens is None else tokens].flatten(),
        first_token=first.begin,
        stop=max(x.end_position for x in call),
        prompt_lengths=_prompts(chunks) if first.observed else None,
        tokens=tokens,
    )


def _padded_tokens(call: list[_ChunkPart]) -> np.ndarray:
    """Indices of the parts' tokens in the batch, int64 [B, T]. Shorter parts are left-padded by
    repeating their first token, so that positions ascend."""
    begin, count = np.array([(x.begin, x.count) for x in call]).T[..., None]
    indices: np.ndarray = begin + np.maximum(np.arange(-count.max(), 0) + count, 0)
    return indices
