"""Sequences of like length attend together: what pads them to the longest then reads few rows in
vain.

Shapes: B sequences of a part.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.metadata import AttentionMetadata
from kvfold.ops.common.launch import upload

WORTH = 512  # rows that take as long to read as another bucket takes to start


def cut(lengths: Sequence[int]) -> list[list[int]]:
    """Buckets of indices, longest first, none empty: padded to their longest, all together have at
    most twice the rows there are, and `WORTH` more."""
    buckets: list[list[int]] = []
    rest = sum(lengths)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for place, i in enumerate(order):
        longest = lengths[buckets[-1][0]] if buckets else 0
        padding = longest * (len(order) - place) - rest
        if not buckets or (longest > 2 * lengths[i] and padding > WORTH):
            buckets.append([])
        buckets[-1].append(i)
        rest -= lengths[i]
    return buckets


def by_length(
    attend: Callable[[AttentionMetadata, Tensor], Tensor],
    part: AttentionMetadata,
    layer: int,
    q: Tensor,
) -> Tensor:
    """attend(part, q) of a layer, a bucket at a time: q [B, ...] -> [B, ...]."""
    buckets = cut(part.lengths[layer].tolist())
    if len(buckets) == 1:
        return attend(part, q)
    where = [upload(np.array(bucket), q.device) for bucket in buckets]
    each = zip(buckets, where, strict=True)
    found = torch.cat([attend(_take(part, bucket, index), q[index]) for bucket, index in each])
    return torch.empty_like(found).index_copy_(0, torch.cat(where), found)


def _take(part: AttentionMetadata, bucket: list[int], index: Tensor) -> AttentionMetadata:
    """Some sequences of a part, which lie anywhere in it. index: the bucket's, on the device."""
    prompts = part.prompt_lengths
    return replace(
        part,
        slots=part.slots[index],
        positions=part.positions[index],
        lengths=part.lengths[:, bucket],
        prompt_lengths=None if prompts is None else prompts[index],
        tokens=None if part.tokens is None else part.tokens[index],
    )
