"""Perplexity and retrieval through the paged cache, where bits are packed and tokens go.

Shapes: n windows, T tokens of a window.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.engine.runner import ModelRunner
from kvfold.evaluation.perplexity import PerplexityResult, Progress, summarize, token_nll
from kvfold.evaluation.session import Session

AFTER = 64  # tokens fed at a time after a compression


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one sequence of `tokens` tokens holds after its prompt was compressed.

    kept_fraction: bits of stored numbers and quantiser metadata over those of the uncompressed
    16-bit cache. pool_fraction: bytes of pages, with rounding, positions and metrics, and of the
    sequence's page table, over the same. cache_bytes: the pages alone.
    """

    tokens: int
    kept_fraction: float
    pool_fraction: float
    cache_bytes: int


def footprint(session: Session) -> Footprint:
    """Read off the pool."""
    pool, slot = session.runner.pool, session.sequence.open_slot
    layout, rows = pool.layout, pool.host_lengths[slot]
    tokens = session.sequence.num_computed
    full = 16 * layout.spec.geometry.full_numbers * tokens
    packed = layout.packed(rows)
    pages = -(-packed // layout.page) + (packed < rows)
    tails = [group.layout.tail or group.layout for group in layout.groups]
    bits = packed @ [group.layout.row_bits for group in layout.groups]
    bits += (rows - packed) @ [tail.row_bits for tail in tails]
    held = pool.stats().sequence_bytes[slot]
    return Footprint(
        tokens=tokens,
        kept_fraction=float(bits) / full,
        pool_fraction=8 * (held + 4 * int(pages.sum())) / full,
        cache_bytes=held,
    )


def paged_perplexity(
    runner: ModelRunner,
    ids: Tensor,
    *,
    chunk: int = 512,
    scored_from: int | None = None,
    progress: Progress | None = None,
) -> tuple[PerplexityResult, Footprint]:
    """Loss on windows ids int64 [n, T], each through its own pages.

    scored_from: tokens of a window that are only read, then compressed where the runner evicts; the
    rest is fed AFTER tokens at a time and scored. None: half where the runner evicts, else all is
    scored. Footprint of the last window. Raises ValueError for too short windows and logits that
    are not finite.
    """
    if scored_from is None:
        scored_from = ids.shape[1] // 2 if runner.policy is not None else 0
    if not 0 <= scored_from <= ids.shape[1] - 2:
        raise ValueError(
            f"scored_from must leave 2 of a window's {ids.shape[1]} tokens, got {scored_from}; use "
            "longer windows"
        )
    measured = []
    for window in ids:
        with Session(runner, chunk) as session:
            measured.append(_window(session, window, scored_from))
        if progress is not None:
            progress(len(measured), len(ids))
    losses, footprints = zip(*measured, strict=True)
    if not all(map(math.isfinite, losses)):
        raise ValueError(
            "model: its logits are not finite; check its weights for NaN or load it in float32"
        )
    tokens = len(ids) * (ids.shape[1] - max(scored_from, 1))
    last = footprints[-1]
    return summarize(list(losses), tokens, last.cache_bytes, last.tokens), last


def _window(session: Session, window: Tensor, scored_from: int) -> tuple[float, Footprint]:
    """Mean loss in nats of window[scored_from:] (of all but the first token where that is 0)."""
    tokens = window.tolist()
    if scored_from:
        logits = [session.feed(tokens[:scored_from], prompt=scored_from)[-1:]]
        session.compress()
        held = footprint(session)
        logits.append(session.feed(tokens[scored_from:-1], chunk=AFTER))
    else:
        logits = [session.feed(tokens[:-1], prompt=len(tokens))]
        held = footprint(session)
    predicted = torch.cat(logits)
    nll = token_nll(predicted[None], window[None, len(window) - len(predicted) :])
    return float(nll.mean()), held


class PagedReader:
    """Contexts and questions of a needle test on one paged sequence at a time.

    agnostic: the context is compressed before any question is seen. Otherwise context and question
    are one prompt, compressed once its first answer token is out, as the engine does.
    """

    def __init__(self, runner: ModelRunner, chunk: int = 512, *, agnostic: bool = True) -> None:
        self.runner, self.chunk = runner, chunk
        self.shared = runner.can_rewind and (agnostic or runner.policy is None)
        self.session: Session | None = None
        self.footprint: Footprint | None = None

    def prefill(self, ids: list[int]) -> None:
        """Read the context."""
        self.close()
        self.context = ids
        if self.shared:
            self.session = Session(self.runner, self.chunk).__enter__()
            self.session.feed(ids, prompt=len(ids))
            self.session.compress()
            self.footprint = footprint(self.session)

    def answer(self, question: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation of the context and `question`, which is then forgotten."""
        if self.session is not None:
            mark = self.session.mark()
            found = self.session.greedy(self.session.feed(question)[-1], num_tokens)
            self.session.rewind(mark)
            return found
        prompt = [*self.context, *question]
        with Session(self.runner, self.chunk) as session:
            logits = session.feed(prompt, prompt=len(prompt))[-1]
            session.compress()
            self.footprint = footprint(session)
            return session.greedy(logits, num_tokens)

    def close(self) -> None:
        """Free the pages."""
        if self.session is not None:
            self.session.__exit__(None, None, None)
            self.session = None
