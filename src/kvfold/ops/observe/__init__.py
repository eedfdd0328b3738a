"""Update eviction metrics with the attention that cached tokens receive.

The attention comes from recent queries (`observe`), or from the weights that two-pass decoding
leaves in its workspace (`observe_weights`).

Shapes: B sequences, Hq query heads, W recent queries per head, G groups of the layer, S slots, n
pages of the longest group, T token entries. Queries are in score space, as in `ops.decode`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvfold.layout.pages import Group
from kvfold.ops.backend import Operation
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode import groups as score_space


def unsupported_reason(groups: Sequence[Group]) -> str | None:
    """Why the kernel cannot read these pages, or None. It reads the pages that the decode kernels
    read, if they store metrics."""
    if not all(group.layout.tracked for group in groups):
        return "rows without metrics: they are not tracked"
    return score_space.unsupported_reason(groups)


# Each module has `observe`, with the arguments of the function below.
OBSERVE = Operation(__name__, {"triton": unsupported_reason})


def why_not(groups: Sequence[Group], device_type: str) -> str | None:
    """Why `observe` falls back to plain PyTorch, which gathers all token entries; None if a kernel
    runs."""
    return OBSERVE.why_not(device_type, tuple(groups))


def observe(
    q: Tensor, lse: Tensor, positions: Tensor, pages: LayerPages, slots: Tensor, scale: float,
    *, power: int, exclude: int = 0,
) -> None:  # fmt: skip
    """Add sum p^power of these queries to the metrics of the tokens they see, p = exp2(s - lse).

    q: [B, Hq, W, largest key rank] in score space, zeros beyond a head's rank.
    lse: fp32 [B, Hq, W], log2-sum-exp2 of the scaled scores that the query attended to.
    positions: int [B, W]; a query with a negative position is not counted.
    pages: tracked. slots: int64 [B], distinct.

    The sum is over the query heads of a group (KV-Compress §4.1, eq. 9-11, 19, 20). A token at
    position j counts for a query at position i if j <= i - exclude. Tokens stored after a query
    have larger positions, so a later call still counts what the query saw. The reference waits for
    the device, to read the longest length.
    """
    module = OBSERVE.choose(q.device.type, pages.groups).module
    module.observe(q, lse, positions, pages, slots, scale, power=power, exclude=exclude)


def observe_weights(
    plan: Any, lse: Tensor, positions: Tensor, pages: LayerPages, slots: Tensor,
    *, power: int, exclude: int = 0,
) -> None:  # fmt: skip
    """Add sum p^power to the metrics of the tokens that decoded queries saw, from the weights that
    their decode left in the workspace. Never waits for the device.

    plan: the `SplitPlan` or `LatentPlan` of the two-pass `decode` or `latent_decode` call that has
        just run: the next layer overwrites its workspace; lse fp32 [B, Hq]: returned by that call;
        positions int [B]: of the queries; pages: tracked; slots int64 [B], distinct except for
        padding that nobody reads.
    """
    from kvfold.ops.observe import weights_triton

    settings = {"power": power, "exclude": exclude}
    weights_triton.observe_weights(plan, lse, positions, pages, slots, **settings)
