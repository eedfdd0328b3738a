"""Decode steps as CUDA graphs: one launch a step in place of thousands.

Shapes: B sequences, one token each; V tokens of the vocabulary. A graph is captured when a batch
size is first met, and holds everything from the tokens to the logits, planning included; pages,
tables and lengths are read where they lie, so that what changed between steps is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.engine.request import Batch

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Captured:
    """inputs int64 [3, B]: tokens, positions, slots; logits fp32 [B, V], written by a replay."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    logits: Tensor


class DecodeGraphs:
    """forward: tokens, positions, slots int64 [B] -> logits fp32 [B, V], without waiting for the
    device and without anything that depends on the host."""

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self.forward, self.device = forward, device
        self.captured: dict[int, _Captured] = {}

    @staticmethod
    def fits(batch: Batch) -> bool:
        """Whether a step is one new token of every sequence."""
        chunks = batch.chunks
        single = all(chunk.is_decode and len(chunk.tokens) == 1 for chunk in chunks)
        return bool(chunks) and single and all(chunk.wants_logits for chunk in chunks)

    def run(self, batch: Batch) -> Tensor:
        """Logits fp32 [B, V], which the next step of as many sequences overwrites."""
        chunks = batch.chunks
        tokens = [chunk.tokens[0] for chunk in chunks]
        slots = [chunk.request.open_slot for chunk in chunks]
        inputs = torch.tensor([tokens, [chunk.start for chunk in chunks], slots])
        found = self.captured.get(len(chunks))
        if found is None:
            found = self.captured[len(chunks)] = self._capture(inputs.to(self.device))
        found.inputs.copy_(inputs, non_blocking=True)
        found.graph.replay()
        return found.logits

    def _capture(self, inputs: Tensor) -> _Captured:
        """Storing a row twice stores the same, so a step may be run to warm up."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self.forward(*inputs)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(self.captured.values())).graph.pool() if self.captured else None
        with torch.cuda.graph(graph, pool=shared):
            logits = self.forward(*inputs)
        return _Captured(graph, inputs, logits)
