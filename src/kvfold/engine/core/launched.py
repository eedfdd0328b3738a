"""A step that was launched on the device and whose tokens have not been read yet.

Shapes: N tokens of a step, n of its chunks that sample a token.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kvfold.engine.requests.request import Batch, Request, Runner
from kvfold.engine.runner.edits import logit_edits
from kvfold.engine.runner.sampler import Sampled, SampledToken, sample
from kvfold.ops.common.launch import upload
from kvfold.utils.errors import SettingError

RequestTokens = list[tuple[Request, SampledToken]]


@dataclass(frozen=True, kw_only=True, eq=False)
class LaunchedStep:
    """A batch that was launched, and its sampled tokens, which are being copied to the host.

    sampled: None if no chunk samples a token.
    refused: index of a chunk -> why its settings leave no token to sample.
    """

    batch: Batch
    sampled: Sampled | None
    refused: Mapping[int, SettingError] = field(default_factory=dict)

    @classmethod
    def launch(
        cls, runner: Runner, batch: Batch, eos_ids: Collection[int], tokens: Tensor | None = None
    ) -> "LaunchedStep":
        """Run the model, and sample a token for each chunk that wants one. tokens: see
        `Runner.run`. Raises what the runner raises."""
        logits, chunks = runner.run(batch, tokens), batch.with_logits
        if not chunks:
            return cls(batch=batch, sampled=None)
        requests = [chunk.request for chunk in chunks]
        params = [x.measured_sampling for x in requests]
        seeds = [x.seed for x in requests]
        edits = logit_edits(requests, eos_ids)
        sampled = sample(logits, params, seeds, [chunk.end for chunk in chunks], edits)
        return cls(batch=batch, sampled=sampled, refused={} if edits is None else edits.refused)

    @property
    def num_prefill(self) -> int:
        """Number of prompt tokens in the step."""
        return sum(len(x.tokens) for x in self.batch.chunks[self.batch.num_decode :])

    def input_tokens(self, batch: Batch) -> Tensor:
        """The sampled tokens, int64 [N] on the device, that are the input of the next batch, which
        has one token of each request."""
        assert self.sampled is not None
        row_of = {chunk.request.id: i for i, chunk in enumerate(self.batch.with_logits)}
        rows = [row_of[chunk.request.id] for chunk in batch.chunks]
        tokens = self.sampled.tokens
        if rows == list(range(len(tokens))):
            return tokens
        return tokens[upload(np.array(rows), tokens.device)]

    def sampled_tokens(self) -> RequestTokens:
        """Wait for the device, and return the sampled token of each request that wants one."""
        if self.sampled is None:
            return []
        requests = [chunk.request for chunk in self.batch.with_logits]
        tokens = self.sampled.on_host([x.measured_sampling for x in requests])
        for row, why in self.refused.items():
            tokens[row] = SampledToken(token=None, logprobs=None, refusal=why)
        return list(zip(requests, tokens, strict=True))
