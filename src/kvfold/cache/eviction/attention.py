"""Eviction policies that score a token by the attention it receives. The sum of attention over
queries is the token's *metric*.

Shapes: B sequences, Hq query heads, Hk KV heads, n queries, G groups of one sequence (of one layer
in `attention_mass`), T row slots. A row is the entry of one token in one group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import Groups, Need, Policy, RowsView, by_group


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy(Policy):
    """Score a row by the attention that it received.

    power: 1 sums attention, 2 sums squared attention (KV-Compress §4.3).
    exclude: v of KV-Compress eq. 19: a query counts for keys at least v positions before it.
    pool: width of the max-pool over neighbours in position order, odd (eq. 8); 1 is off.
    continual: queries of generated tokens add to the metric too (eq. 20). Without it generated
        tokens have no metric, so compress only once, after the prompt: a second round would evict
        them first.
    reweighs: True if a subclass overrides `worth`. It then needs the attention weights, which
        kernels do not write, so plain PyTorch computes all observed queries.
    """

    needs = frozenset[Need]({"attention"})
    reweighs: ClassVar[bool] = False

    power: Literal[1, 2] = 1
    exclude: int = 0
    pool: int = 1
    continual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power not in (1, 2):
            raise ValueError(f"power must be 1 (sum) or 2 (sum of squares), got {self.power}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool must be odd to have a middle, got {self.pool}; 1 is off")
        self._check_tokens("exclude")

    def score(self, view: RowsView) -> Tensor:
        """The metrics, max-pooled over neighbours. Stored metrics stay plain sums, because eq. 20
        adds generated queries to them later."""
        return _max_pool(view.metrics, view.positions, view.valid, self.pool, view.in_order)

    def protected_recent(self, tokens: int) -> int:
        return max(super().protected_recent(tokens), self.exclude)

    def worth(self, weights: Tensor, keys: Tensor, queries: Tensor, generated: Tensor) -> Tensor:
        """What each query adds to the metric of each row, fp32, same shape as weights
        [B, Hq, n, T].

        keys int [B, Hk, T], queries int [B, n]: positions; generated int [B, n]: how many tokens
        after the last prompt token a query is, 0 in the prompt.
        """
        return weights.float() ** self.power

    def of_layer(self, layer: int) -> "AttentionPolicy":
        """The policy for queries of one layer: the same object, unless layers differ."""
        return self


def observing(policy: Policy | None) -> AttentionPolicy | None:
    """The policy as an AttentionPolicy if it uses attention, else None. Raises ValueError for a
    policy that needs attention and is no AttentionPolicy."""
    if policy is None or "attention" not in policy.needs:
        return None
    if not isinstance(policy, AttentionPolicy):
        raise ValueError(
            f"{policy.name!r} needs attention, which is observed as AttentionPolicy's fields say; "
            f"got a {type(policy).__name__}: derive it from AttentionPolicy"
        )
    return policy


def attention_mass(
    weights: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    prompt_lengths: Tensor,
    policy: AttentionPolicy,
    groups: Groups,
) -> Tensor:
    """Attention that these queries add to the metrics of one layer's rows: fp32 [B, G, T].

    weights [B, Hq, n, T]: attention probabilities, zero where nothing is attended; key_positions
    int [B, Hk, T]; query_positions int [B, n], negative for padding; prompt_lengths int [B];
    groups: the KV heads of each of the layer's groups. Summed over the counted queries and over
    all query heads of the group's KV heads: the cache is not repeated (KV-Compress §4.1, eq. 9-11,
    19, 20). Chunks of a prompt add up. Never waits for the device.
    """
    heads = key_positions.shape[1]
    counted = observed(query_positions, prompt_lengths, policy)[:, None, :, None]
    if policy.exclude:
        distance = query_positions[:, None, :, None] - key_positions[:, :, None]
        counted = counted & (distance >= policy.exclude)
    generated = (query_positions - prompt_lengths[:, None] + 1).clamp(min=0)
    worth = policy.worth(weights.detach(), key_positions, query_positions, generated)
    by_head = worth.reshape(len(weights), heads, -1, *weights.shape[2:]).sum(2)
    return by_group(by_head.where(counted, 0.0).sum(2), groups)


def observed(query_positions: Tensor, prompt_lengths: Tensor, policy: AttentionPolicy) -> Tensor:
    """Which queries count, bool [B, n]: those in the prompt's observation window, and generated
    ones if the policy is continual."""
    window = prompt_lengths if policy.window is None else policy.window
    first = (prompt_lengths - window).clamp(min=0)
    in_window = query_positions >= first[:, None]
    return (
        in_window if policy.continual else in_window & (query_positions < prompt_lengths[:, None])
    )


def _max_pool(
    metrics: Tensor, positions: Tensor, valid: Tensor, width: int, in_order: bool
) -> Tensor:
    """Maximum metric of the `width` nearest rows in order of position, for each row. Evicted
    positions leave no gap."""
    if width == 1:
        return metrics
    pool = partial(F.max_pool1d, kernel_size=width, stride=1, padding=width // 2)
    return _in_order(pool, metrics.where(valid, -torch.inf), positions, valid, in_order)


def mean_pool(x: Tensor, positions: Tensor, valid: Tensor, width: int, in_order: bool) -> Tensor:
    """Mean of x [B, G, T] over the `width` (odd) nearest rows in order of position, for each row;
    only valid rows count. Evicted positions leave no gap."""
    pool = partial(F.avg_pool1d, kernel_size=width, stride=1, padding=width // 2)
    values_and_counts = x.where(valid, 0.0), valid.float()
    sums, counts = (
        _in_order(pool, value, positions, valid, in_order) for value in values_and_counts
    )
    return sums / counts.clamp(min=1 / width)


def _in_order(
    pool: Callable[[Tensor], Tensor], x: Tensor, positions: Tensor, valid: Tensor, in_order: bool
) -> Tensor:
    """Apply `pool` to the rows of x [B, G, T], sorted by position."""
    if in_order:
        return pool(x)
    last = torch.iinfo(positions.dtype).max  # empty slots come last, next to no valid row
    order = positions.where(valid, last).argsort(dim=-1)
    return torch.empty_like(x).scatter_(-1, order, pool(x.gather(-1, order)))
