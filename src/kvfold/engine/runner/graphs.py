"""Decode steps as CUDA graphs: one launch a step in place of thousands.

Shapes: B sequences, one token each; V tokens of the vocabulary. A graph holds everything from the
tokens to the logits, planning included; pages, tables and lengths are read where they lie, so that
what changed between steps is seen. There is one for each of few sizes: a batch is filled up to the
next one with sequences that are nobody's.
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
    """Batch sizes of graphs: few, and so close that less than half of any is filled up."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most, 16)]
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """most: sequences of the largest batch; spare: the slot of those that fill a batch up.

    What is captured is given with each call, lest it and this hold each other: a function from
    tokens, positions, slots int64 [B] to logits [B, V], which waits for nothing and depends on
    nothing of the host.
    inputs int64 [3, most]: tokens, positions, slots; logits [most, V] of all graphs alike.
    """

    def __init__(self, device: torch.device, *, most: int, spare: int) -> None:
        self.device, self.sizes = device, sizes_up_to(most)
        self.nobody = (0, 0, spare)
        self.inputs = torch.tensor([self.nobody] * most, device=device).T.contiguous()
        self.logits: Tensor | None = None
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}

    @staticmethod
    def fits(batch: Batch) -> bool:
        """Whether a step is one new token of every sequence."""
        chunks = batch.chunks
        single = all(chunk.is_decode and len(chunk.tokens) == 1 for chunk in chunks)
        return bool(chunks) and single and all(chunk.wants_logits for chunk in chunks)

    def warm_up(self, forward: Forward) -> None:
        """Capture all sizes, lest requests wait for it. The largest comes first: the memory of its
        tensors then does for all."""
        for size in reversed(self.sizes):
            self._graph(size, forward)

    def run(self, batch: Batch, forward: Forward, tokens: Tensor | None = None) -> Tensor:
        """Logits [B, V], which the next step overwrites. tokens: int64 [B] in place of the
        batch's."""
        chunks = batch.chunks
        size = self.sizes[bisect_left(self.sizes, len(chunks))]
        rows = [(chunk.tokens[0], chunk.start, chunk.request.open_slot) for chunk in chunks]
        rows += [self.nobody] * (size - len(rows))
        graph = self._graph(size, forward)
        self.inputs[:, :size].copy_(upload(np.array(rows).T.copy(), self.device))
        if tokens is not None:
            self.inputs[0, : len(chunks)].copy_(tokens)
        graph.replay()
        assert self.logits is not None
        return self.logits[: len(chunks)]

    def _graph(self, size: int, forward: Forward) -> torch.cuda.CUDAGraph:
        if size not in self.captured:
            # Steps that warm up would add to sequences' metrics more than once.
            self.inputs.copy_(torch.tensor(self.nobody)[:, None])
            self.captured[size] = self._capture(size, forward)
        return self.captured[size]

    def _step(self, size: int, forward: Forward) -> None:
        """From inputs to logits, of the first `size` sequences."""
        found = forward(*self.inputs[:, :size])
        if self.logits is None:
            self.logits = found.new_empty(self.sizes[-1], found.shape[-1])
        self.logits[:size].copy_(found)

    def _capture(self, size: int, forward: Forward) -> torch.cuda.CUDAGraph:
        """Of a step that was run to warm up: its inputs are nobody's."""
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
