"""Attention of one new token a sequence over its pages: the decode step's hot loop.

Shapes: B sequences, G groups of the layer, Hq query heads, S slots, n pages of the longest group.
Rows in score space only: what is stored is what scores are taken of (`plain`, `post_rope` and
`absorbed` keys). Keys that are made from latents first: `ops.latent_decode`. CPUs have ways of
their own: `ops.decode.numba`, and `ops.decode.cpu`, to which the pages of all layers are listed at
once.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from kvfold.layout.pages import CacheLayout, Group
from kvfold.ops.backend import Operation
from kvfold.ops.common import pieces
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.plan import columns_of
from kvfold.ops.decode.groups import unread
from kvfold.ops.decode.limits import LIMITED, Limits

__all__ = ["DECODE", "Limits", "decode", "one_pass_page", "plan_layers", "two_passes", "why_not"]


# Each has `plan_layers` and `decode`, which are called as those below.
def _unread_at_once(groups: tuple[Group, ...], limited: bool = False) -> str | None:
    return LIMITED if limited else unread(groups)


def _unread_split(groups: tuple[Group, ...], limited: bool = False) -> str | None:
    return pieces.unread("decode", groups)


DECODE = Operation(__name__, {"triton": _unread_at_once, "triton_split": _unread_split})


def why_not(groups: Sequence[Group], device_type: str, limited: bool = False) -> str | None:
    """Why `decode` gathers all rows of such pages, in plain PyTorch; None where it does not.
    limited: with `Limits`."""
    return DECODE.why_not(device_type, tuple(groups), limited)


def two_passes(layout: CacheLayout, queries: int) -> str | None:
    """Why a Hopper GPU does not decode all layers in one pass; None where it does, if rows are
    many. queries: query heads of a KV head."""
    if find_spec("triton") is None:
        return "triton is not installed"
    from kvfold.ops import one_pass
    from kvfold.ops.latent_decode.groups import unread as unread_alone

    for i, layer in enumerate(layout.spec.layers):
        groups, rebuilt = layout.groups_of_layer(i), layer.keys == "pre_rope"
        head_dim = layout.spec.geometry.head_dim if rebuilt else None
        if rebuilt and unread_alone(layer, groups) is None:
            return "latents of one precision to rebuild keys from, which other kernels read"
        reason = pieces.unread("latent_decode" if rebuilt else "decode", groups)
        if reason := reason or one_pass.unread(groups, queries, head_dim):
            return reason
    return None


def one_pass_page(layout_of: Callable[[int], CacheLayout], queries: int) -> int | None:
    """The rows a page with which one pass decodes all layers fastest; None where it does not.
    layout_of: pages of so many rows."""
    pages = (64, 32, 16)  # in fewer where two pages do not fit a multiprocessor
    return next((page for page in pages if two_passes(layout_of(page), queries) is None), None)


def plan_layers(
    layers: Sequence[Sequence[Group]],
    lengths: Tensor,
    queries: int,
    rows: int,
    limited: bool = False,
) -> list[Any]:
    """How a step's work is cut, of layers with equally many groups at once: what `decode` takes of
    each, or None where nothing is planned. No host sync.

    lengths int [B, groups of all layers], of the sequences `decode` is given, the step's own rows
    included; queries: query heads of a KV head; rows: at most as many has a layer, its groups added
    up; limited: whether all of these layers are decoded with `Limits`.
    """
    more = {"limited": True} if limited else {}

    def make(module: ModuleType, own: list[int]) -> list[Any]:
        counts = columns_of(lengths, len(layers), own)
        mine = [layers[i] for i in own]
        plans: list[Any] = module.plan_layers(mine, counts, queries, rows, **more)
        return plans

    return DECODE.plan(lengths.device.type, [(tuple(groups), limited) for groups in layers], make)


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: Any = None,
    limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale) v over the rows of every group.

    q [B, Hq, widest key rank], zeros beyond a head's own rank, KV heads in order; slots int64 [B];
    plan: of `plan_layers`, else made here; limits: of scores, under which every sequence sees a
    row of every group that has some. Returns [B, Hq, widest value rank], 0 beyond a head's own rank
    and for a group without rows, and the log2-sum-exp2 of the scaled scores, fp32 [B, Hq], -inf for
    a group without rows.
    """
    module = DECODE.choose(q.device.type, pages.groups, limits is not None).module
    if limits is None:
        return module.decode(q, pages, slots, scale, plan)
    return module.decode(q, pages, slots, scale, plan, limits)
