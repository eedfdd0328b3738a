"""A session over the engine's paged cache, with quantisation and eviction, without its scheduler.

Evaluation needs what serving does not: logits of every token, compression at a chosen point, and
several continuations of one context. For the shapes see `session`; B = 1.
"""

from typing import Self

import torch
from torch import Tensor

from kvfold.engine.requests.request import Batch, Request
from kvfold.engine.runner.runner import ModelRunner
from kvfold.evaluation.session import Footprint, Session
from kvfold.utils.errors import SettingError


class PagedSession(Session):
    """One sequence, which `compress` evicts to the runner's budget."""

    whole_windows = False

    def __init__(self, runner: ModelRunner, chunk: int = 512) -> None:
        super().__init__(chunk)
        self.runner = runner
        self.evicts = runner.policy is not None or runner.demotes
        self.can_rewind = runner.can_rewind

    def __enter__(self) -> Self:
        self.sequence = Request.unscheduled(self.runner.pool.allocate_slot())
        return self

    def __exit__(self, *error: object) -> None:
        self.runner.pool.free_slot(self.sequence.open_slot)

    def _append(self, ids: Tensor, last: bool) -> Tensor:
        (tokens,), sequence = ids.tolist(), self.sequence
        if self.runner.demotes and sequence.prefilled:
            self.compress()
        self._extend(len(tokens))
        sequence.token_ids += tokens
        batch = Batch(chunks=(sequence.next_chunk(len(tokens)),))
        logits = self.runner.run_all(batch)
        self.runner.free_outside_windows(batch)
        sequence.advance(len(tokens))
        return logits[None]

    def _end_prompt(self, position: int) -> None:
        self.sequence.prefill_until(position)

    def _most(self) -> int:
        return self.runner.pool.layout.max_tokens_in_step(self.sequence.num_computed)

    def _extend(self, count: int) -> None:
        pool, slots = self.runner.pool, [self.sequence.open_slot]
        if not pool.make_room_to_extend(slots, [count]):
            enough = pool.kv_bytes_for(pool.max_tokens)
            raise SettingError(
                f"`kv_bytes`: a pool of {pool.kv_bytes} bytes has no room for "
                f"{self.sequence.num_computed + count} tokens; uncompressed it holds "
                f"{pool.capacity()}: {enough} bytes would do, or shorter contexts"
            )
        pool.extend(slots, [count])

    def compress(self) -> None:
        if self.runner.needs_compression(self.sequence):
            self.runner.compress([self.sequence])

    def footprint(self) -> Footprint:
        """Count what the pool holds."""
        pool, slot = self.runner.pool, self.sequence.open_slot
        layout, lengths = pool.layout, pool.host_lengths[slot]
        tokens = self.sequence.num_computed
        full = 16 * layout.spec.geometry.full_numbers * tokens
        packed = layout.num_quantized(lengths)
        pages = -(-packed // layout.page) + (packed < lengths)
        tails = [group.layout.residual_block or group.layout for group in layout.groups]
        bits = packed @ [group.layout.row_bits for group in layout.groups]
        if pool.coarse is not None:
            coarse = pool.coarse.host_lengths[slot]
            bits += coarse @ [group.layout.row_bits for group in pool.coarse.layout.groups]
            pages += -(-coarse // pool.coarse.layout.page)
        bits += (lengths - packed) @ [tail.row_bits for tail in tails]
        if layout.exact is not None:
            bits += min(tokens, layout.window) * layout.exact.bits_per_token
        num_bytes = pool.stats().sequence_bytes[slot]
        return Footprint(
            tokens=tokens,
            kept_fraction=float(bits) / full,
            pool_fraction=8 * (num_bytes + 4 * int(pages.sum())) / full,
            cache_bytes=num_bytes,
        )

    def mark(self) -> tuple[int, Tensor]:
        lengths = torch.from_numpy(self.runner.pool.host_lengths[self.sequence.slot].copy())
        return self.sequence.num_computed, lengths

    def rewind(self, mark: tuple[int, Tensor]) -> None:
        position, lengths = mark
        self.sequence.rewind(position)
        self.runner.pool.truncate(self.sequence.open_slot, lengths)
