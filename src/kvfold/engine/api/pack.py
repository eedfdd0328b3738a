"""Pack a text: prefill it, compress its cache, and measure the loss.

Shapes: N tokens of the context, n tokens of a sample, V tokens of the vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.cache.eviction.policies import get
from kvfold.cache.eviction.scorers.rescoring import as_rescoring
from kvfold.cache.pool import PoolFull
from kvfold.engine.requests.request import Batch, CacheParams, Request
from kvfold.engine.runner.rescoring import Rescorer
from kvfold.engine.runner.runner import ModelRunner
from kvfold.layout.pages import Ints
from kvfold.ops.store import append
from kvfold.utils.errors import SettingError

Report = Callable[[str, int, int], None]  # progress: name of the phase, done, total
SAMPLES, LENGTH = 4, 64  # samples of the context that the model repeats, and tokens of each


def check_pages(runner: ModelRunner) -> None:
    """Raises SettingError if a sequence's pages do not hold all its cache entries, and only
    these."""
    if runner.sliding:
        raise SettingError(
            "a `context` cannot be packed for a model with a sliding window, which drops old "
            "entries: use another model"
        )
    if runner.pool.layout.residual:
        raise SettingError(
            "a `context` cannot be packed if its last entries are unquantised: leave `residual` "
            "and `format` out"
        )
    if runner.pool.layout.window:
        raise SettingError(
            f"a `context` cannot be packed with `window={runner.pool.layout.window}`: its pages do"
            " not hold the exact keys and values of its last tokens: leave `window` out"
        )
    if runner.pool.layout.spec.hybrid is not None:
        raise SettingError(
            "a `context` cannot be packed with entries of two widths: compress the model without "
            "`hybrid`, and set `evict`"
        )


class Packer:
    """Packs contexts with a runner, `chunk` tokens per step. The engine must not run meanwhile."""

    def __init__(
        self, runner: ModelRunner, tokenizer: Any, chunk: int, progress: Report | None
    ) -> None:
        self.runner, self.pool, self.chunk = runner, runner.pool, chunk
        self.say = progress or (lambda name, done, total: None)
        policy = runner.policy
        if policy is None or as_rescoring(policy) is None:
            policy = get("kvzip")
        # The prompt to repeat a segment does not depend on the policy that evicts.
        self.rescorer = Rescorer(runner.attention.view, policy, tokenizer, runner.forward)

    def pack(
        self, ids: list[int], factor: float, measure: bool
    ) -> tuple[Ints, list[Tensor], dict[str, Any]]:
        """Numbers of entries int64 [G] and pages of a context compressed `factor` times, and a
        report."""
        self._check(len(ids), factor)
        layout, keep = self.pool.layout, 1 / (factor * self.pool.layout.kept_fraction)
        full_bytes = 2 * layout.spec.geometry.full_numbers * len(ids)
        num_kept = max(int(keep * len(ids)) // layout.page, 1) * layout.page  # whole pages
        lengths, pages, losses = self._pack(ids, min(1.0, num_kept / len(ids)), measure)
        return lengths, pages, {"factor": factor, "full_bytes": full_bytes, **losses}

    @torch.inference_mode()
    def store(self, ids: list[int], entries: Iterable[Tensor]) -> tuple[Ints, list[Tensor]]:
        """Lengths and pages of a context whose cache entries [N, R] of each layer, in order, were
        computed elsewhere by the runner's model."""
        self._check(len(ids), 1.0)
        slot = self._allocate_slot()
        try:
            self._extend(slot, len(ids), len(ids))
            index = torch.arange(len(ids), device=self.pool.device)
            slots = torch.full_like(index, slot)
            for layer, rows in enumerate(entries):
                pages = self.runner.attention.view.pages[layer]
                places = index[:, None].expand(-1, len(pages.groups))
                append(pages, rows, slots, places, index.int())
            return self.pool.dump(slot)
        finally:
            self.pool.free_slot(slot)

    def _check(self, size: int, factor: float) -> None:
        check_pages(self.runner)
        if size >= self.pool.max_tokens:
            raise SettingError(
                f"the context has {size} tokens, and `max_tokens` is {self.pool.max_tokens}, for "
                "context and question: shorten the context, or raise `max_tokens` if the model has "
                "more positions"
            )
        if factor * self.pool.layout.kept_fraction > 1 and self.runner.policy is None:
            raise SettingError(
                f"`factor={factor}` asks to evict tokens: set `evict`, such as `evict='kvzip'`, "
                "and `keep_tokens=1`"
            )

    def _pack(
        self, ids: list[int], keep: float, measure: bool
    ) -> tuple[Ints, list[Tensor], dict[str, float | None]]:
        """Pack a context of which the share `keep` of the tokens stays."""
        policy = self.runner.policy
        is_observed = policy is not None and policy.scorer.needs & {"attention", "queries"}
        losses: dict[str, float | None] = {"loss": None, "full_loss": None}
        if measure and is_observed:  # else the sample's queries would count for eviction scores
            with self._prefilled(ids, keep) as full_sequence:
                losses["full_loss"] = self._loss(full_sequence, "repeating")
        with self._prefilled(ids, keep) as sequence:
            if measure and not is_observed:
                losses["full_loss"] = self._loss(sequence, "repeating")
            self.say("compressing", 0, 1)
            if self.runner.needs_compression(sequence):
                self.runner.compress([sequence])
            self.say("compressing", 1, 1)
            lengths, pages = self.pool.dump(sequence.open_slot)
            if measure:
                losses["loss"] = self._loss(sequence, "repeating, compressed")
        return lengths, pages, losses

    @contextmanager
    def _prefilled(self, ids: list[int], keep: float) -> Iterator[Request]:
        """A sequence that has prefilled the context."""
        sequence = Request.unscheduled(self._allocate_slot())
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
        self._extend(sequence.open_slot, count, len(sequence.token_ids))
        result = run(Batch(chunks=(sequence.next_chunk(count),)))
        sequence.advance(count)
        return result

    def _allocate_slot(self) -> int:
        """The slot of a context. Raises SettingError if running requests have all of them."""
        try:
            return self.pool.allocate_slot()
        except PoolFull:
            raise SettingError(
                f"`max_sequences`: {self.pool.num_slots} requests are running, as many as may run "
                "at once, and a context takes the place of one while it is packed: pack it when one"
                " has ended, or raise `max_sequences`"
            ) from None

    def _extend(self, slot: int, count: int, size: int) -> None:
        """Make room for `count` more tokens of a context of `size` tokens."""
        try:
            self.pool.extend([slot], [count])
        except PoolFull:
            enough = self.pool.kv_bytes_for(size + count)
            raise SettingError(
                f"`kv_bytes`: a pool of {self.pool.num_bytes} bytes has no room for a context of "
                f"{size} tokens in addition to running requests; {enough} bytes suffice"
            ) from None

    def _loss(self, sequence: Request, name: str) -> float | None:
        """Mean cross-entropy (nats/token) of repeating samples of the context; None if there are no
        positions left for that."""
        size = sequence.num_computed
        starts = [i * size // SAMPLES for i in range(SAMPLES)] if size > LENGTH else [0]
        num_words = max(len(self._question(sequence, range(start, start + 1))) for start in starts)
        length = min(LENGTH, self.pool.max_tokens - size - num_words)
        total = count = 0.0
        for done, start in enumerate(starts if length > 0 else ()):
            self.say(name, done, len(starts))
            sample = range(start, min(start + length, size))
            total += self._nats(sequence, sample)
            count += len(sample)
        self.say(name, len(starts), len(starts))
        return total / count if count else None

    def _question(self, sequence: Request, sample: range) -> list[int]:
        return self.rescorer._question(sequence, sample) or sequence.token_ids[:1]

    def _nats(self, sequence: Request, sample: range) -> float:
        """Total cross-entropy (nats) of repeating a sample. Restores the sequence afterwards."""
        size, scored = sequence.num_computed, sequence.num_scored
        lengths = self.pool.host_lengths[sequence.open_slot].copy()
        targets = sequence.token_ids[sample.start : sample.stop]
        question = self._question(sequence, sample)
        sequence.token_ids += [*question, *targets]
        sequence.prefill_until(len(sequence.token_ids))
        logits = self._step(sequence, len(question) + len(targets), self.runner.run_all)
        sequence.rewind(size)
        sequence.num_scored = scored
        sequence.prefill_until(size)
        self.pool.truncate(sequence.open_slot, lengths)
        target_ids = torch.tensor(targets, device=logits.device)
        logits_before = logits[len(question) - 1 : -1]
        return float(cross_entropy(logits_before, target_ids, reduction="sum"))
