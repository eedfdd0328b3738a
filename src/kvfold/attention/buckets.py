"""Split a batch into buckets of sequences of similar length, to limit padding.

Shapes: B sequences of one attention call (a part of the step).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.metadata import AttentionMetadata
from kvfold.ops.common.launch import upload

WORTH = 512  # cost of one more bucket, in token entries read


def length_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences by bucket, longest first, no bucket empty. With padding the buckets have
    at most twice the entries of the sequences, plus `WORTH`."""
    buckets: list[list[int]] = []
    rest = sum(lengths)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for num_placed, i in enumerate(order):
        longest = lengths[buckets[-1][0]] if buckets else 0
        padding = longest * (len(order) - num_placed) - rest
        if not buckets or (longest > 2 * lengths[i] and padding > WORTH):
            buckets.append([])
        buckets[-1].append(i)
        rest -= lengths[i]
    return buckets


def attend_in_buckets(
    attend: Callable[[AttentionMetadata, Tensor], Tensor],
    part: AttentionMetadata,
    layer: int,
    q: Tensor,
) -> Tensor:
    """Run attend(part, q) for a layer bucket by bucket: q [B, ...] -> [B, ...]."""
    buckets = length_buckets(part.lengths[layer].tolist())
    if len(buckets) == 1:
        return attend(part, q)
    indices = [upload(np.array(bucket), q.device) for bucket in buckets]
    pairs = zip(buckets, indices, strict=True)
    outputs = torch.cat([attend(_take(part, bucket, index), q[index]) for bucket, index in pairs])
    return torch.empty_like(outputs).index_copy_(0, torch.cat(indices), outputs)


def _take(part: AttentionMetadata, bucket: list[int], index: Tensor) -> AttentionMetadata:
    """A subset of a part's sequences. bucket: their numbers; index: the same on the device."""
    prompts = part.prompt_lengths
    return replace(
        part,
        slots=part.slots[index],
        positions=part.positions[index],
        lengths=part.lengths[:, bucket],
        prompt_lengths=None if prompts is None else prompts[index],
        tokens=None if part.tokens is None else part.tokens[index],
    )
