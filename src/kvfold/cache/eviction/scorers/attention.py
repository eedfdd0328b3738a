"""Score an entry by the attention it receives. The sum of attention over queries is the entry's
*metric*.

Shapes: B sequences, Hq query heads, Hk KV heads, n queries, G groups of one sequence (of one layer
in `attention_scores`), T entry slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import EntriesView, Groups, Need, Scorer, by_group
from kvfold.cache.eviction.policy import Policy, check_tokens


@dataclass(frozen=True, kw_only=True)
class Attention(Scorer):
    """Attention that the entry received from the observed queries: its sum, or the sum of squares.

    power: 1 sums attention, 2 sums squared attention (KV-Compress §4.3).
    exclude: v of KV-Compress eq. 19: a query counts for keys at least v positions before it.
    pool: width of the max-pool over neighbours in position order, odd (eq. 8); 1 is off.
    continual: queries of generated tokens add to the metric too (eq. 20). Without it generated
        tokens have no metric, so compress only once, after the prompt: a second round would evict
        them first.
    needs_weights: True if a subclass overrides `contribution`. It then needs the attention weights,
        which kernels do not write, so plain PyTorch computes all observed queries.
    """

    needs = frozenset[Need]({"attention"})
    needs_weights: ClassVar[bool] = False

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
        check_tokens(self, "exclude")

    def score(self, view: EntriesView) -> Tensor:
        """The metrics, max-pooled over neighbours. Stored metrics stay plain sums, because eq. 20
        adds generated queries to them later."""
        return _max_pool(view.metrics, view.positions, view.valid, self.pool, view.in_order)

    def num_too_young(self, window: int | None) -> int:
        return max(super().num_too_young(window), self.exclude)

    def contribution(
        self, weights: Tensor, keys: Tensor, queries: Tensor, generated: Tensor, layer: int
    ) -> Tensor:
        """What each query adds to the metric of each entry, fp32, same shape as weights
        [B, Hq, n, T].

        keys int [B, Hk, T], queries int [B, n]: positions; generated int [B, n]: how many tokens
        after the last prompt token a query is, 0 in the prompt; layer: of the queries.
        """
        return weights.float() ** self.power


class Observation(NamedTuple):
    """The attention that a policy observes: of the prompt's last `window` queries (None: all), and
    of generated ones if the scorer is continual."""

    scorer: Attention
    window: int | None = None


def as_observation(policy: Policy | None) -> Observation | None:
    """What a policy observes if its scorer uses attention, else None. Raises ValueError for a
    scorer that needs attention and is no Attention."""
    if policy is None or "attention" not in policy.scorer.needs:
        return None
    if not isinstance(policy.scorer, Attention):
        raise ValueError(
            f"{policy.name!r} needs attention, which is observed as Attention's fields say; got a "
            f"{type(policy.scorer).__name__}: derive it from Attention"
        )
    return Observation(policy.scorer, policy.window)


def attention_scores(
    weights: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    prompt_lengths: Tensor,
    observation: Observation,
    groups: Groups,
    layer: int = 0,
) -> Tensor:
    """Attention that these queries add to the metrics of one layer's entries: fp32 [B, G, T].

    weights [B, Hq, n, T]: attention probabilities, zero where nothing is attended; key_positions
    int [B, Hk, T]; query_positions int [B, n], negative for padding; prompt_lengths int [B];
    groups: the KV heads of each of the layer's groups. Summed over the counted queries and over
    all query heads of the group's KV heads: the cache is not repeated (KV-Compress §4.1, eq. 9-11,
    19, 20). Chunks of a prompt add up. Never waits for the device.
    """
    heads, scorer = key_positions.shape[1], observation.scorer
    counted = observed(query_positions, prompt_lengths, observation)[:, None, :, None]
    if scorer.exclude:
        distance = query_positions[:, None, :, None] - key_positions[:, :, None]
        counted = counted & (distance >= scorer.exclude)
    generated = (query_positions - prompt_lengths[:, None] + 1).clamp(min=0)
    inputs = weights.detach(), key_positions, query_positions, generated
    added = scorer.contribution(*inputs, layer)
    by_head = added.reshape(len(weights), heads, -1, *weights.shape[2:]).sum(2)
    return by_group(by_head.where(counted, 0.0).sum(2), groups)


def observed(query_positions: Tensor, prompt_lengths: Tensor, observation: Observation) -> Tensor:
    """Which queries count, bool [B, n]: those in the prompt's observation window, and generated
    ones if the scorer is continual."""
    window = prompt_lengths if observation.window is None else observation.window
    first = (prompt_lengths - window).clamp(min=0)
    in_window = query_positions >= first[:, None]
    if observation.scorer.continual:
        return in_window
    return in_window & (query_positions < prompt_lengths[:, None])


def _max_pool(
    metrics: Tensor, positions: Tensor, valid: Tensor, width: int, in_order: bool
) -> Tensor:
    """Maximum metric of the `width` nearest entries in order of position, for each entry. Evicted
    positions leave no gap."""
    if width == 1:
        return metrics
    pool = partial(F.max_pool1d, kernel_size=width, stride=1, padding=width // 2)
    return _in_order(pool, metrics.where(valid, -torch.inf), positions, valid, in_order)


def mean_pool(x: Tensor, positions: Tensor, valid: Tensor, width: int, in_order: bool) -> Tensor:
    """Mean of x [B, G, T] over the `width` (odd) nearest entries in order of position, for each
    entry; only valid entries count. Evicted positions leave no gap."""
    pool = partial(F.avg_pool1d, kernel_size=width, stride=1, padding=width // 2)
    values_and_counts = x.where(valid, 0.0), valid.float()
    sums, counts = (
        _in_order(pool, value, positions, valid, in_order) for value in values_and_counts
    )
    return sums / counts.clamp(min=1 / width)


def _in_order(
    pool: Callable[[Tensor], Tensor], x: Tensor, positions: Tensor, valid: Tensor, in_order: bool
) -> Tensor:
    """Apply `pool` to the entries of x [B, G, T], sorted by position."""
    if in_order:
        return pool(x)
    last = torch.iinfo(positions.dtype).max  # empty slots come last, next to no valid entry
    order = positions.where(valid, last).argsort(dim=-1)
    return torch.empty_like(x).scatter_(-1, order, pool(x.gather(-1, order)))
