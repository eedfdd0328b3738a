"""One sequence on a paged cache, driven by hand: feed, compress, go back.

What evaluation needs and serving does not: logits of every token, a compression at a stated point,
and several continuations of one context.
"""

from collections.abc import Sequence as Tokens
from types import TracebackType

import torch
from torch import Tensor

from kvfold.engine.request import Batch, Request, SamplingParams, ScheduledChunk
from kvfold.engine.runner import ModelRunner


class Session:
    """Tokens go in with `feed`; the sequence's pages are free again after `with`."""

    def __init__(self, runner: ModelRunner, chunk: int = 512) -> None:
        self.runner, self.chunk = runner, chunk

    def __enter__(self) -> "Session":
        self.sequence = Request(id=0, token_ids=[], num_prompt=0, sampling=SamplingParams())
        self.sequence.slot = self.runner.pool.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.runner.pool.close(self.sequence.open_slot)

    def feed(
        self, ids: Tokens[int], *, prompt: int | None = None, chunk: int | None = None
    ) -> Tensor:
        """Append tokens; logits fp32 [len(ids), V] of each.

        prompt: where the prompt ends, in tokens from the sequence's start; its last queries are
        those that a window policy observes. None: as it was. Raises ValueError if the pool is full.
        """
        found, sequence, rest = [], self.sequence, tuple(ids)
        if prompt is not None:
            sequence.num_prefill = prompt
        while rest:
            most = self.runner.pool.layout.most_at(sequence.num_computed)
            step = min(chunk or self.chunk, most)
            part, rest = rest[:step], rest[step:]
            self._extend(len(part))
            piece = ScheduledChunk(
                request=sequence, start=sequence.num_computed, tokens=part, wants_logits=True
            )
            found.append(self.runner.run_all(Batch(chunks=(piece,))))
            sequence.num_computed += len(part)
        return torch.cat(found)

    def _extend(self, count: int) -> None:
        pool, slots = self.runner.pool, [self.sequence.open_slot]
        if not pool.can_extend(slots, [count]):
            raise ValueError(
                f"kv_bytes: a pool of {pool.arena.numel()} bytes has no room for "
                f"{self.sequence.num_computed + count} tokens; uncompressed it holds "
                f"{pool.capacity()}: give it more, or read shorter contexts"
            )
        pool.extend(slots, [count])

    def compress(self) -> None:
        """Evict to the runner's budget, if there is one."""
        if self.runner.needs_compression(self.sequence):
            self.runner.compress([self.sequence])

    def mark(self) -> tuple[int, Tensor]:
        """Where the sequence stands, for `rewind`; a compression in between makes it void."""
        lengths = torch.from_numpy(self.runner.pool.host_lengths[self.sequence.slot].copy())
        return self.sequence.num_computed, lengths

    def rewind(self, mark: tuple[int, Tensor]) -> None:
        """Forget the tokens fed since `mark`."""
        self.sequence.num_computed, lengths = mark
        self.runner.pool.shrink(self.sequence.open_slot, lengths)

    def greedy(self, logits: Tensor, num_tokens: int) -> list[int]:
        """Greedy continuation after the token whose logits [V] are given."""
        found = [int(logits.argmax())]
        while len(found) < num_tokens:
            found.append(int(self.feed(found[-1:])[-1].argmax()))
        return found
