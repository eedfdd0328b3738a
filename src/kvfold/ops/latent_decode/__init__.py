"""Attention of one new token a sequence over pages whose keys are rebuilt from latents (Palu §4).

Shapes: B sequences, G groups of the layer, H KV heads of a group, Hk = G * H, N query heads of a KV
head, Hq = Hk * N; d head dim, w rotary dims, F their pairs (d / 2, to a power of two), r widest key
rank; S slots, n pages of the longest group, M positions.
Keys are `pre_rope`: the key of head h at position p is R_p (A_h z + mu_h), z the latent that serves
it. Values are latents, attended to as they are. A latent may serve one head, some or all, and may
be both key and value.
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
from kvfold.ops.latent_decode.groups import Layer, unread
from kvfold.ops.latent_decode.maps import KeyMaps, exact_table, rope_table

__all__ = ["KeyMaps", "exact_table", "latent_decode", "plan_layers", "rope_table", "why_not"]

# Each has `plan_layers` and `latent_decode`, which are called as those below.
LATENT_DECODE = Operation(__name__, {"triton": unread, "triton_pieces": pieces.unread})


def why_not(layer: LayerSpec, groups: Sequence[Group], device_type: str) -> str | None:
    """Why `latent_decode` rebuilds all keys of such pages, in plain PyTorch; None where it does
    not."""
    return LATENT_DECODE.why_not(device_type, layer, tuple(groups))


def plan_layers(
    q: Tensor, layers: Sequence[Layer], lengths: Tensor, rows: int, maps: Sequence[KeyMaps]
) -> list[Any]:
    """How a step's work is cut, of layers with equally many groups and latents at once: what
    `latent_decode` takes of each, or None where nothing is planned. No host sync.

    q [B, Hq, d]: any of the step; lengths int [B, groups of all layers], the step's own rows
    included; rows: at most as many has a layer, its groups added up; maps: of every layer.
    """

    def make(module: ModuleType, own: list[int]) -> list[Any]:
        counts = columns_of(lengths, len(layers), own)
        mine = [layers[i] for i in own], counts, rows, [maps[i] for i in own]
        plans: list[Any] = module.plan_layers(q, *mine)
        return plans

    return LATENT_DECODE.plan(q.device.type, layers, make)


def latent_decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, maps: KeyMaps, plan: Any = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v over the rows of every group, k rebuilt from its latent.

    q [B, Hq, d], rotated at its own position; slots int64 [B]; plan: of `plan_layers`, else made
    here. Rows without stored positions are at their index. Returns [B, Hq, widest value rank], 0
    beyond a head's own rank and for a group without rows, and the log2-sum-exp2 of the scaled
    scores, fp32 [B, Hq], -inf for a group without rows.
    """
    module = LATENT_DECODE.choose(q.device.type, maps.layer, pages.groups).module
    return module.latent_decode(q, pages, slots, scale, maps, plan)
