"""From a text to a packed context: read it, compress it, measure what it lost.

Shapes: N tokens of the context, n tokens of a sample, V tokens of the vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.cache.eviction.policies import get
from kvfold.cache.eviction.scorers.rescoring import as_rescoring
from kvfold.cache.pool import PoolFull
from kvfold.engine.requests.request import Batch, CacheParams, Request
from kvfold.engine.runner.replay import Replay
from kvfold.engine.runner.runner import ModelRunner
from kvfold.layout.pages import Ints
from kvfold.utils.errors import SettingError

Report = Callable[[str, int, int], None]  # what is being done, done, total
SAMPLES, LENGTH = 4, 64  # pieces of the context that are repeated, and tokens of each


def check_pages(runner: ModelRunner) -> None:
    """Raises SettingError where a sequence's pages do not hold its rows, and nothing else."""
    if runner.sliding:
        raise SettingError(
            "a `context` cannot be packed for a model with a sliding window, which drops its rows "
            "as a sequence goes on: take another model"
        )
    if runner.pool.layout.residual:
        raise SettingError(
            "a `context` cannot be packed where its last rows wait unquantised: leave `residual` "
            "and `format` out"
        )
    if runner.pool.low_rank is not None:
        raise SettingError(
            "a `context` cannot be packed where rows have two widths: compress the model without "
            "`hybrid`, and set `evict`"
        )


class Packer:
    """Reads contexts through a runner, `chunk` tokens at a time. The engine must rest meanwhile."""

    def __init__(
        self, runner: ModelRunner, tokenizer: Any, chunk: int, progress: Report | None
    ) -> None:
        self.runner, self.pool, self.chunk = runner, runner.pool, chunk
        self.say = progress or (lambda name, done, total: None)
        policy = runner.policy
        if policy is None or as_rescoring(policy) is None:
            policy = get("kvzip")
        # What asks for a piece is the same whatever evicts.
        self.asking = Replay(runner.attention.view, policy, tokenizer, runner._forward)

    def pack(
        self, ids: list[int], factor: float, measure: bool
    ) -> tuple[Ints, list[Tensor], dict[str, Any]]:
        """Rows int64 [G] and pages of a context whose rows are to have `factor` times fewer bits,
        and its report."""
        self._check(len(ids), factor)
        layout, share = self.pool.layout, 1 / (factor * self.pool.layout.kept_fraction)
        full = 2 * layout.spec.geometry.full_numbers * len(ids)
        kept = max(int(share * len(ids)) // layout.page, 1) * layout.page  # whole pages
        rows, pages, losses = self._packed(ids, min(1.0, kept / len(ids)), measure)
        return rows, pages, {"factor": factor, "full_bytes": full, **losses}

    def _check(self, size: int, factor: float) -> None:
        check_pages(self.runner)
        if size >= self.pool.max_tokens:
            raise SettingError(
                f"the context has {size} tokens, and a sequence at most `max_tokens` positions, "
                f"which are {self.pool.max_tokens}, a question's too: shorten it, or raise them "
                "where the model has more"
            )
        if factor * self.pool.layout.kept_fraction > 1 and self.runner.policy is None:
            raise SettingError(
                f"`factor={factor}` asks to evict tokens: set `evict`, such as `evict='kvzip'`, "
                "and `keep_tokens=1`"
            )

    def _packed(
        self, ids: list[int], keep: float, measure: bool
    ) -> tuple[Ints, list[Tensor], dict[str, float | None]]:
        """Of a context of which a share `keep` stays."""
        policy = self.runner.policy
        watched = policy is not None and policy.scorer.needs & {"attention", "queries"}
        losses: dict[str, float | None] = {"loss": None, "full_loss": None}
        if measure and watched:  # a sample's queries would count for what is evicted
            with self._read(ids, keep) as whole:
                losses["full_loss"] = self._loss(whole, "repeating")
        with self._read(ids, keep) as sequence:
            if measure and not watched:
                losses["full_loss"] = self._loss(sequence, "repeating")
            self.say("compressing", 0, 1)
            if self.runner.needs_compression(sequence):
                self.runner.compress([sequence])
            self.say("compressing", 1, 1)
            rows, pages = self.pool.dump(sequence.open_slot)
            if measure:
                losses["loss"] = self._loss(sequence, "repeating, compressed")
        return rows, pages, losses

    @contextmanager
    def _read(self, ids: list[int], keep: float) -> Iterator[Request]:
        """A sequence that has read the context."""
        sequence = Request.by_hand(self.pool.allocate_slot())
        sequence.token_ids, sequence.cache = list(ids), CacheParams(keep_tokens=keep)
        sequence.prefill_until(len(ids))
        try:
            while sequence.num_pending:
                self._step(sequence, min(self.chunk, sequence.num_pending), self.runner.run)
                self.say("reading", sequence.num_computed, len(ids))
            yield sequence
        finally:
            self.pool.free_slot(sequence.open_slot)

    def _step(self, sequence: Request, count: int, run: Callable[[Batch], Any]) -> Any:
        try:
            self.pool.extend([sequence.open_slot], [count])
        except PoolFull:
            enough = self.pool.layout.bytes_for(1, len(sequence.token_ids) + count)
            raise SettingError(
                f"`kv_bytes`: a pool of {self.pool.num_bytes} bytes has no room to read a context "
                f"of {len(sequence.token_ids)} tokens beside what runs; {enough} bytes would do"
            ) from None
        found = run(Batch(chunks=(sequence.next_chunk(count),)))
        sequence.advance(count)
        return found

    def _loss(self, sequence: Request, name: str) -> float | None:
        """Nats a token of pieces of the context that the model is asked to repeat; None where there
        are no positions left to do so."""
        size = sequence.num_computed
        starts = [i * size // SAMPLES for i in range(SAMPLES)] if size > LENGTH else [0]
        words = max(len(self._words(sequence, range(start, start + 1))) for start in starts)
        length = min(LENGTH, self.pool.max_tokens - size - words)
        total = count = 0.0
        for done, start in enumerate(starts if length > 0 else ()):
            self.say(name, done, len(starts))
            piece = range(start, min(start + length, size))
            total += self._nats(sequence, piece)
            count += len(piece)
        self.say(name, len(starts), len(starts))
        return total / count if count else None

    def _words(self, sequence: Request, piece: range) -> list[int]:
        return self.asking._words(sequence, piece) or sequence.token_ids[:1]

    def _nats(self, sequence: Request, piece: range) -> float:
        """Of a piece in all; the sequence is then as it was."""
        size, scored = sequence.num_computed, sequence.num_scored
        lengths = self.pool.host_lengths[sequence.open_slot].copy()
        wanted = sequence.token_ids[piece.start : piece.stop]
        words = self._words(sequence, piece)
        sequence.token_ids += [*words, *wanted]
        sequence.prefill_until(len(sequence.token_ids))
        logits = self._step(sequence, len(words) + len(wanted), self.runner.run_all)
        sequence.rewind(size)
        sequence.num_scored = scored
        sequence.prefill_until(size)
        self.pool.truncate(sequence.open_slot, lengths)
        target = torch.tensor(wanted, device=logits.device)
        before = logits[len(words) - 1 : -1]
        return float(cross_entropy(before, target, reduction="sum"))
