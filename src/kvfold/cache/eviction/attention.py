"""Policies that look at attention: which queries count, and how their attention is summed into a
*metric* of each row.

Shapes: B sequences, Hq query heads, Hk KV heads, n queries, G groups of one sequence (of one layer
in `attention_mass`), T row slots.
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
    """A row is worth the attention that it got.

    power: 1 sums attention, 2 squared attention (KV-Compress §4.3).
    exclude: v of KV-Compress eq. 19: a query counts for keys at least v positions before it.
    pool: width of the max-pool over neighbours in position order, odd (eq. 8); 1 is off.
    continual: queries of generated tokens add to the metric too (eq. 20). Without it generated
        tokens have none, so compress once only, after the prompt: a later round evicts them first.

    reweighs: whether `worth` is its own. It then needs weights as they are, which kernels do not
    write: plain PyTorch serves all queries that are observed.
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
        """The metrics, pooled. Pooling is done here, over all that was observed so far, so that
        metrics stay sums; eq. 20 adds generated queries after it."""
        return _max_pool(view.metrics, view.positions, view.valid, self.pool, view.in_order)

    def protected_recent(self, tokens: int) -> int:
        return max(super().protected_recent(tokens), self.exclude)

    def worth(self, weights: Tensor, keys: Tensor, queries: Tensor, generated: Tensor) -> Tensor:
        """What each query adds to each row, fp32 as weights [B, Hq, n, T].

        keys int [B, Hk, T], queries int [B, n]: positions; generated int [B, n]: how many tokens
        after the prompt's last a query is, 0 in the prompt.
        """
        return weights.float() ** self.power

    def of_layer(self, layer: int) -> "AttentionPolicy":
        """The policy as queries of a layer are observed by it: the same, unless layers differ."""
        return self


def observing(policy: Policy | None) -> AttentionPolicy | None:
    """The policy, if it looks at attention. Raises ValueError for one that cannot say of which
    queries."""
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
    19, 20). Prompts may come in chunks, whose masses add up. Never waits for the device.
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
    """bool [B, n]: queries in the prompt's observation window, and generated ones if continual."""
    window = prompt_lengths if policy.window is None else policy.window
    first = (prompt_lengths - window).clamp(min=0)
    seen = query_positions >= first[:, None]
    return seen if policy.continual else seen & (query_positions < prompt_lengths[:, None])


def _max_pool(
    metrics: Tensor, positions: Tensor, valid: Tensor, width: int, in_order: bool
) -> Tensor:
    """Largest metric of the `width` rows around each, in order of position, gaps closed."""
    if width == 1:
        return metrics
    how = partial(F.max_pool1d, kernel_size=width, stride=1, padding=width // 2)
    return _in_order(how, metrics.where(valid, -torch.inf), positions, valid, in_order)


def mean_pool(x: Tensor, positions: Tensor, valid: Tensor, width: int, in_order: bool) -> Tensor:
    """Mean of x [B, G, T] over the valid ones of the `width` (odd) rows around each, in order of
    position, gaps closed."""
    how = partial(F.avg_pool1d, kernel_size=width, stride=1, padding=width // 2)
    pair = x.where(valid, 0.0), valid.float()
    sums, counts = (_in_order(how, y, positions, valid, in_order) for y in pair)
    return sums / counts.clamp(min=1 / width)


def _in_order(
    pool: Callable[[Tensor], Tensor], x: Tensor, positions: Tensor, valid: Tensor, in_order: bool
) -> Tensor:
    """`pool` along the rows of x [B, G, T] as their positions ascend."""
    if in_order:
        return pool(x)
    behind = torch.iinfo(positions.dtype).max  # slots without a row are nobody's neighbours
    order = positions.where(valid, behind).argsort(dim=-1)
    return torch.empty_like(x).scatter_(-1, order, pool(x.gather(-1, order)))
