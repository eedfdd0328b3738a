"""Decode attention in score space: one new token per sequence over its cached pages.

Serves keys on which scores can be computed as they are stored (`plain`, `post_rope` and `absorbed`
keys). Keys that must be reconstructed from latents before RoPE are served by `ops.latent_decode`.

Kernels, in order of preference; the first that supports a layer's layout is chosen:

name          layout                                        device        file
triton        a KV head has its own entries; one bit width  CUDA          triton.py, kernels.py
              and one scale for keys, one for values
triton_split  entries shared by KV heads, or segments of    CUDA          triton_split.py, then
              several bit widths: scores, then values                     scores_triton.py (or
                                                                         scores_wide.py) and
                                                                         common/values_triton.py
one pass      as triton_split, values shared by all heads;  Hopper        ops/one_pass, chosen in
              at least `one_pass.ROWS` entries                            triton_split.plan_layers
reference     all others: gathers all entries               any           reference.py
numba         all that `common.parts` supports              CPU           numba.py, chosen by
                                                                         attention.numba_decode
page lists    floats, and codes with a scale per entry      CPU           cpu.py, chosen by
                                                                         attention.cpu_paged

Words that all kernel files use:

token entry   what one group stores for one token: keys, values, scales. `row` in names.
page          a fixed number of entries of one group, consecutive in memory
tile          the entries (BLOCK of them) that a program multiplies at a time
item          a (sequence, group) or (sequence, latent) pair: one softmax
split         the consecutive tiles of one program, `slice` in names: a long sequence is divided
              among several programs, and `common.combine` merges their partial results
span          SPAN entries that share one maximum score, `top` in names
segment       consecutive numbers of a latent that have one bit width and one scale; `run` in names
tier          the (numbers, bits) of such a segment, in the layout's settings
piece         the numbers of a segment that a program multiplies at a time
code word     a 16-bit word that holds 2, 4 or 8 codes (or, unquantised, one 16-bit number)
scale         step between two codes. With a zero point: number = scale * code + zero; without:
              number = scale * (code - (2^bits - 1) / 2)

Shapes: B sequences, G groups of the layer, Hq query heads, S slots (sequences of the pool), n pages
of the longest group.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from kvfold.layout.pages import CacheLayout, Group, LayerGroups
from kvfold.ops.backend import Operation
from kvfold.ops.common import pieces
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.plan import columns_of
from kvfold.ops.decode.groups import unsupported_reason
from kvfold.ops.decode.limits import LIMITED, Limits

__all__ = ["DECODE", "Limits", "decode", "one_pass_page", "plan_layers", "two_passes", "why_not"]


# Each kernel's module has `plan_layers` and `decode` with the signatures of the functions below.
def _unsupported_by_triton(groups: tuple[Group, ...], limited: bool = False) -> str | None:
    return LIMITED if limited else unsupported_reason(groups)


def _unsupported_by_split(groups: tuple[Group, ...], limited: bool = False) -> str | None:
    return pieces.unsupported_reason("decode", groups)


DECODE = Operation(
    __name__, {"triton": _unsupported_by_triton, "triton_split": _unsupported_by_split}
)


def why_not(groups: Sequence[Group], device_type: str, limited: bool = False) -> str | None:
    """Say why `decode` would gather all entries of such pages in plain PyTorch (the reference);
    None if a kernel supports them.

    limited: whether scores are limited, see `Limits`.
    """
    return DECODE.why_not(device_type, tuple(groups), limited)


def two_passes(layout: CacheLayout, queries: int) -> str | None:
    """Say why a Hopper GPU needs two passes for some layer; None if it decodes all layers in one
    pass.

    One pass is used only from `one_pass.ROWS` entries on. queries: query heads per KV head.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    from kvfold.ops import one_pass
    from kvfold.ops.latent_decode.groups import unsupported_reason as unsupported_by_triton

    for i, layer in enumerate(layout.spec.layers):
        groups, reconstructed = layout.groups_of_layer(i), layer.keys == "pre_rope"
        head_dim = layout.spec.geometry.head_dim if reconstructed else None
        if reconstructed and unsupported_by_triton(layer, groups) is None:
            return "key latents of one bit width, which other kernels reconstruct keys from"
        reason = pieces.unsupported_reason("latent_decode" if reconstructed else "decode", groups)
        if reason := reason or one_pass.unsupported_reason(groups, queries, head_dim):
            return reason
    return None


def one_pass_page(layout_of: Callable[[int], CacheLayout], queries: int) -> int | None:
    """Return the page size, in entries, with which one pass decodes all layers fastest; None if it
    does not support them.

    layout_of: makes the layout with a page size.
    """
    pages = (64, 32, 16)  # smaller ones if two pages do not fit into shared memory
    return next((page for page in pages if two_passes(layout_of(page), queries) is None), None)


def plan_layers(
    layers: Sequence[Sequence[Group]],
    lengths: Tensor,
    queries: int,
    rows: int,
    limited: bool = False,
) -> list[Any]:
    """Divide a step's work among programs, for several layers with equally many groups.

    lengths int [B, groups of all layers]: entries per group of the sequences of this step,
    including the entries that the step itself adds; queries: query heads per KV head; rows: upper
    bound of a layer's entries, summed over its groups and sequences; limited: whether all of these
    layers are decoded with `Limits`. Returns per layer what `decode` takes as `plan`, or None if
    nothing is planned. Does not wait for the device.
    """
    options = {"limited": True} if limited else {}

    def make(module: ModuleType, served: list[int]) -> list[Any]:
        counts = columns_of(lengths, len(layers), served)
        served_layers = [layers[i] for i in served]
        plans: list[Any] = module.plan_layers(served_layers, counts, queries, rows, **options)
        return plans

    data = [(LayerGroups.of(x), limited) for x in layers]
    return DECODE.plan(lengths.device.type, data, make)


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: Any = None,
    limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute softmax(q k^T * scale) v over the entries of every group.

    q [B, Hq, widest key rank], zero beyond a head's rank, in the order of KV heads; slots int64
    [B]; plan: of `plan_layers`, by default made here; limits: softcap and window of the scores;
    then every group that has entries must have one that the query sees.
    Returns [B, Hq, widest value rank], zero beyond a head's rank and for a group without entries,
    and the log2 of the sum of 2^score (scores in log2), fp32 [B, Hq], -inf for a group without
    entries.
    """
    module = DECODE.choose(q.device.type, pages.groups, limits is not None).module
    if limits is None:
        return module.decode(q, pages, slots, scale, plan)
    return module.decode(q, pages, slots, scale, plan, limits)
