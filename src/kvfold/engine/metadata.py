"""Batches to the metadata of attention: which tokens attend together.

All decoding sequences do; prefill chunks go one by one, cut where observation of their queries
begins, since that takes more. Shapes: N tokens of a batch.
"""

from itertools import takewhile

from torch import Tensor

from kvfold.attention.metadata import AttentionMetadata, PoolView
from kvfold.engine.request import Batch, ScheduledChunk


def decodes(batch: Batch) -> tuple[ScheduledChunk, ...]:
    """The chunks that come first and are one new token of a decoding request."""
    return tuple(takewhile(lambda x: x.is_decode and len(x.tokens) == 1, batch.chunks))


def metadata_of(view: PoolView, batch: Batch, positions: Tensor) -> list[AttentionMetadata]:
    """Parts of the tokens at `positions` int64 [N], one after another."""
    parts, singles = [], decodes(batch)
    begin = len(singles)
    if singles:
        parts.append(_part(view, singles, positions[:begin], 0, view.observes_decodes, decode=True))
    for chunk in batch.chunks[len(singles) :]:
        end, border = begin + len(chunk.tokens), begin + _unobserved(view, chunk)
        if border > begin:
            parts.append(_part(view, (chunk,), positions[begin:border], begin, False))
        if end > border:
            parts.append(_part(view, (chunk,), positions[border:end], border, True))
        begin = end
    return parts


def _unobserved(view: PoolView, chunk: ScheduledChunk) -> int:
    """Queries at the beginning of a prefill chunk that add to no metric."""
    if view.observing is None:
        return len(chunk.tokens)
    window = view.observing.window
    first = 0 if window is None else chunk.request.num_prefill - window
    return min(max(first - chunk.start, 0), len(chunk.tokens))


def _part(
    view: PoolView,
    chunks: tuple[ScheduledChunk, ...],
    positions: Tensor,
    begin: int,
    observed: bool,
    decode: bool = False,
) -> AttentionMetadata:
    """positions [B * T], from token `begin` on."""
    return AttentionMetadata.of_step(
        view,
        [chunk.request.open_slot for chunk in chunks],
        positions,
        begin=begin,
        stop=max(chunk.start + len(chunk.tokens) for chunk in chunks),
        prompt_lengths=[chunk.request.num_prefill for chunk in chunks] if observed else None,
        decode=decode,
    )
