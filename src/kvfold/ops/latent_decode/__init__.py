"""Decode attention with keys reconstructed from latents before RoPE (Palu §4).

Attends from one new token per sequence to its cached pages.
The key of head h at position p is R_p (A_h z + mu_h), where z is the latent that serves the head.
Values are latents that are attended to as they are. A latent may serve one head, some or all, and
may be both key and value.

Kernels, in order of preference; the first that supports a layer's layout is chosen:

name           layout                                     device    file
triton         latents of one segment (16, 8 or 4 bits),  CUDA      triton.py: scores_triton.py (or
               at most 512 numbers, equally many heads              scores_gluon.py on Hopper), then
               each                                                 values_triton.py
triton_pieces  latents of any width, segments of several  CUDA      triton_pieces.py:
               bit widths                                           scores_pieces.py, then
                                                                    common/values_triton.py
one pass       as triton_pieces, values shared by all     Hopper    ops/one_pass, chosen in
               heads; at least `one_pass.ROWS` entries              triton_pieces.plan_layers
reference      all others: reconstructs all keys          any       reference.py

Words (entry, tile, item, split, segment, piece, code word, scale ..): see `ops.decode`. A *stretch*
is REACH entries over which slow RoPE pairs are approximated, see `maps.Drift`.

Shapes: B sequences, G groups of the layer, H KV heads per group, Hk = G * H, N query heads per KV
head, Hq = Hk * N; d head dim, w rotary dims, F their pairs (d / 2, rounded up to a power of two), r
widest key rank; S slots, n pages of the longest group, M positions.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from kvfold.layout import LayerSpec
from kvfold.layout.pages import Group
from kvfold.ops.backend import Operation
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.plan import columns_of
from kvfold.ops.latent_decode import pieces
from kvfold.ops.latent_decode.groups import Layer, unsupported_reason
from kvfold.ops.latent_decode.maps import KeyMaps, exact_table, rope_table

__all__ = ["KeyMaps", "exact_table", "latent_decode", "plan_layers", "rope_table", "why_not"]

# Each kernel's module has `plan_layers` and `latent_decode` with the signatures below.
LATENT_DECODE = Operation(
    __name__, {"triton": unsupported_reason, "triton_pieces": pieces.unsupported_reason}
)


def why_not(layer: LayerSpec, groups: Sequence[Group], device_type: str) -> str | None:
    """Say why `latent_decode` would reconstruct all keys of such pages in plain PyTorch (the
    reference); None if a kernel supports them."""
    return LATENT_DECODE.why_not(device_type, layer, tuple(groups))


def plan_layers(
    q: Tensor, layers: Sequence[Layer], lengths: Tensor, rows: int, maps: Sequence[KeyMaps]
) -> list[Any]:
    """Divide a step's work among programs, for several layers with equally many groups and latents.

    q [B, Hq, d]: queries of any layer of the step; lengths int [B, groups of all layers]: entries
    per group, including those that the step itself adds; rows: upper bound of a layer's entries,
    summed over its groups and sequences; maps: of every layer. Returns per layer what
    `latent_decode` takes as `plan`, or None if nothing is planned. Does not wait for the device.
    """

    def make(module: ModuleType, served: list[int]) -> list[Any]:
        counts = columns_of(lengths, len(layers), served)
        served_layers = [layers[i] for i in served], counts, rows, [maps[i] for i in served]
        plans: list[Any] = module.plan_layers(q, *served_layers)
        return plans

    return LATENT_DECODE.plan(q.device.type, layers, make)


def latent_decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, maps: KeyMaps, plan: Any = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v over the entries of every group, with keys reconstructed
    from latents.

    q [B, Hq, d], rotated at its position; slots int64 [B]; plan: of `plan_layers`, by default made
    here. Entries without stored positions have their index as position.
    Returns [B, Hq, widest value rank], zero beyond a head's rank and for a group without entries,
    and the log2 of the sum of 2^score (scores in log2), fp32 [B, Hq], -inf for a group without
    entries.
    """
    module = LATENT_DECODE.choose(q.device.type, maps.layer, pages.groups).module
    return module.latent_decode(q, pages, slots, scale, maps, plan)
