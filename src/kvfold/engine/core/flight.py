"""A step between its launch and the reading of its tokens, which the next one need not wait for.

Shapes: N tokens of a step, n of its chunks that want a token.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kvfold.engine.requests.request import Batch, Request, Runner
from kvfold.engine.runner.edits import edits_of
from kvfold.engine.runner.sampler import Choice, Sampled, sample
from kvfold.ops.common.launch import upload
from kvfold.utils.errors import SettingError

Chosen = list[tuple[Request, Choice]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Flight:
    """A batch that the device computes or has computed, and the tokens of its chunks that want
    one, which are on their way to the host (None: no chunk does). refused: why no token can come,
    by the index of such a chunk."""

    batch: Batch
    sampled: Sampled | None
    refused: Mapping[int, SettingError] = field(default_factory=dict)

    @classmethod
    def launch(
        cls, runner: Runner, batch: Batch, eos_ids: Collection[int], tokens: Tensor | None = None
    ) -> "Flight":
        """The model, then a choice for every chunk that wants one; tokens: as of `Runner.run`.
        Raises what the runner does."""
        logits, chunks = runner.run(batch, tokens), batch.with_logits
        if not chunks:
            return cls(batch=batch, sampled=None)
        requests = [chunk.request for chunk in chunks]
        params, seeds = [x.sampling for x in requests], [x.seed for x in requests]
        edits = edits_of(requests, eos_ids)
        sampled = sample(logits, params, seeds, [chunk.end for chunk in chunks], edits)
        return cls(batch=batch, sampled=sampled, refused={} if edits is None else edits.refused)

    @property
    def num_prefill(self) -> int:
        """Tokens of prompts."""
        return sum(len(x.tokens) for x in self.batch.chunks[self.batch.num_decode :])

    def tokens(self, batch: Batch) -> Tensor:
        """The sampled ones int64 [N] that are a later batch's tokens, one of each request."""
        assert self.sampled is not None
        place = {chunk.request.id: i for i, chunk in enumerate(self.batch.with_logits)}
        rows = [place[chunk.request.id] for chunk in batch.chunks]
        found = self.sampled.tokens
        if rows == list(range(len(found))):
            return found
        return found[upload(np.array(rows), found.device)]

    def choices(self) -> Chosen:
        """A choice for every request that wants one; waits for the device."""
        if self.sampled is None:
            return []
        requests = [chunk.request for chunk in self.batch.with_logits]
        found = self.sampled.choices([x.sampling for x in requests])
        for row, why in self.refused.items():
            found[row] = Choice(token=None, logprobs=None, refusal=why)
        return list(zip(requests, found, strict=True))
