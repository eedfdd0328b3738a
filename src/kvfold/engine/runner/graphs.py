"""Run decode steps as CUDA graphs: one launch per step instead of thousands.

Shapes: B sequences with one token each, V tokens of the vocabulary. A graph covers everything from
the tokens to the logits, planning included. Pages, block tables and lengths are read from their
fixed addresses, so a graph sees changes between steps. Graphs are captured for few batch sizes; a
batch is padded to the next one with dummy sequences in the pool's padding slot.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvfold.engine.requests.request import Batch
from kvfold.ops.common.launch import upload

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def sizes_up_to(most: int) -> list[int]:
    """Batch sizes of graphs: few, and so close that less than half of a batch is padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most, 16)]
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """CUDA graphs of decode steps.

    most: largest batch size. padding_slot: the slot of dummy sequences.
    inputs: int64 [3, most]: tokens, positions, slots. logits: [most, V], shared by all graphs.

    `forward`, the function to capture, is passed to each call, to avoid a reference cycle: from
    tokens, positions, slots int64 [B] to logits [B, V]. It must not wait for the device or depend
    on host state.
    """

    def __init__(self, device: torch.device, *, most: int, padding_slot: int) -> None:
        self.device, self.sizes = device, sizes_up_to(most)
        self.dummy = (0, 0, padding_slot)
        self.inputs = torch.tensor([self.dummy] * most, device=device).T.contiguous()
        self.logits: Tensor | None = None
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}

    @staticmethod
    def fits(batch: Batch) -> bool:
        """Whether a batch is one decode token of each sequence."""
        chunks = batch.chunks
        single = all(chunk.is_decode and len(chunk.tokens) == 1 for chunk in chunks)
        return bool(chunks) and single and all(chunk.wants_logits for chunk in chunks)

    def warm_up(self, forward: Forward) -> None:
        """Capture all sizes, so that no request waits for it. The largest comes first: later graphs
        reuse its memory."""
        for size in reversed(self.sizes):
            self._graph(size, forward)

    def dry_run(self, forward: Forward) -> None:
        """Run the steps of the sizes for which kernels differ, without graphs."""
        for size in (x for x in self.sizes if x == self.sizes[-1] or x & (x - 1) == 0):
            self._step(size, forward)

    def run(self, batch: Batch, forward: Forward, tokens: Tensor | None = None) -> Tensor:
        """Logits [B, V], which the next call overwrites. tokens: int64 [B], replaces the batch's
        tokens."""
        chunks = batch.chunks
        size = self.sizes[bisect_left(self.sizes, len(chunks))]
        rows = [(chunk.tokens[0], chunk.start, chunk.request.open_slot) for chunk in chunks]
        rows += [self.dummy] * (size - len(rows))
        graph = self._graph(size, forward)
        self.inputs[:, :size].copy_(upload(np.array(rows).T.copy(), self.device))
        if tokens is not None:
            self.inputs[0, : len(chunks)].copy_(tokens)
        graph.replay()
        assert self.logits is not None
        return self.logits[: len(chunks)]

    def _graph(self, size: int, forward: Forward) -> torch.cuda.CUDAGraph:
        if size not in self.captured:
            # With dummy sequences, warm-up steps do not change the metrics of real ones.
            self.inputs.copy_(torch.tensor(self.dummy)[:, None])
            self.captured[size] = self._capture(size, forward)
        return self.captured[size]

    def _step(self, size: int, forward: Forward) -> None:
        """Run from inputs to logits, for the first `size` sequences."""
        logits = forward(*self.inputs[:, :size])
        if self.logits is None:
            self.logits = logits.new_empty(self.sizes[-1], logits.shape[-1])
        self.logits[:size].copy_(logits)

    def _capture(self, size: int, forward: Forward) -> torch.cuda.CUDAGraph:
        """Capture a step after warm-up runs. Its inputs are dummy sequences."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(size, forward)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(self.captured.values())).pool() if self.captured else None
        with torch.cuda.graph(graph, pool=shared):
            self._step(size, forward)
        return graph
