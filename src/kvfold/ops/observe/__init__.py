"""Eviction metrics: what rows were attended to, from queries that were kept, or from the weights
that decoding in two passes leaves behind.

Shapes: B sequences, Hq query heads, W kept queries of each, G groups of the layer, S slots, n pages
of the longest group, T rows. Queries see rows in score space only, as in `ops.decode`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvfold.layout.pages import Group
from kvfold.ops.backend import Operation
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode import groups as score_space


def unread(groups: Sequence[Group]) -> str | None:
    """As of the decode kernels, whose pages these are, with metrics."""
    if not all(group.layout.tracked for group in groups):
        return "rows without metrics: they are not tracked"
    return score_space.unsupported_reason(groups)


# Each has `observe`, which is called as the one below.
OBSERVE = Operation(__name__, {"triton": unread})


def why_not(groups: Sequence[Group], device_type: str) -> str | None:
    """Why `observe` gathers all rows of such pages, in plain PyTorch; None where it does not."""
    return OBSERVE.why_not(device_type, tuple(groups))


def observe(
    q: Tensor, lse: Tensor, positions: Tensor, pages: LayerPages, slots: Tensor, scale: float,
    *, power: int, exclude: int = 0,
) -> None:  # fmt: skip
    """Add sum p^power of these queries to the metrics of the rows they see, p = exp2(s - lse).

    q [B, Hq, W, widest key rank] in score space, zeros beyond a head's own rank; lse fp32
    [B, Hq, W]: log2-sum-exp2 of the scaled scores over what the query attended to; positions int
    [B, W], negative: not counted; pages: tracked; slots int64 [B], distinct. Summed over the query
    heads of a group (KV-Compress §4.1, eq. 9-11, 19, 20). A row at position j counts for a query at
    i where j <= i - exclude: rows stored after a query have larger positions, so that a late call
    sees what the query saw. The reference waits for the device, to know the longest group.
    """
    module = OBSERVE.choose(q.device.type, pages.groups).module
    module.observe(q, lse, positions, pages, slots, scale, power=power, exclude=exclude)


def observe_weights(
    plan: Any, lse: Tensor, positions: Tensor, pages: LayerPages, slots: Tensor,
    *, power: int, exclude: int = 0,
) -> None:  # fmt: skip
    """Add sum p^power of decoded queries to the metrics of the rows they saw, as `observe` does,
    from the weights that their decode left. Never waits for the device.

    plan: what `decode` or `latent_decode` was given, in two passes (a `SplitPlan` or `LatentPlan`),
    before another layer is; lse fp32 [B, Hq]: what it returned; positions int [B]: of the queries;
    pages: tracked; slots int64 [B], distinct but for what nobody reads.
    """
    from kvfold.ops.observe import weights_triton

    how = {"power": power, "exclude": exclude}
    weights_triton.observe_weights(plan, lse, positions, pages, slots, **how)
