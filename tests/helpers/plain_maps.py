"""The reference of the differential fuzzer: an original model with maps, applied plainly.

Attention gets all tokens of a sequence at once. Keys and values are projected by
mean + up down^T (x - mean), keys before RoPE between two rotations, and softmax is taken over the
tokens that a query sees. There is no cache, and no code of kvfold computes anything.

Shapes: B sequences, T tokens; H KV heads, d numbers of a key or value.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.layout import LayerSpec
from kvfold.models.fold import LatentMaps

NAME = "plain_reference"
PLAN = "_plain_plan"  # of an attention module, in its __dict__


@dataclass(frozen=True, eq=False)
class Rope:
    """How a layer rotates keys: inv_freq fp32 [w / 2], and whether the numbers of a pair are
    neighbours (else half of w apart)."""

    inv_freq: Tensor
    neighbours: bool

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The first and the second numbers of all pairs."""
        half = len(self.inv_freq)
        first = torch.arange(half) * (2 if self.neighbours else 1)
        return first, first + (1 if self.neighbours else half)

    def order(self, head_dim: int) -> Tensor:
        """The first numbers of all pairs, their second ones, then what is not rotated: how maps of
        keys before RoPE see a key."""
        return torch.cat((*self.pairs, torch.arange(2 * len(self.inv_freq), head_dim)))

    def rotated(self, k: Tensor, positions: Tensor, sign: int) -> Tensor:
        """Keys [B, H, T, d] rotated at positions [B, T], or back, as complex numbers."""
        first, second = self.pairs
        angles = (positions[:, None, :, None].float() * self.inv_freq).double()
        numbers = torch.complex(k[..., first].double(), k[..., second].double())
        numbers = numbers * torch.polar(torch.ones_like(angles), sign * angles)
        k = k.clone()
        k[..., first], k[..., second] = numbers.real.to(k), numbers.imag.to(k)
        return k


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What a layer stores. latents: maps of the spec's latents, in their order; rope: None where
    the layer does not rotate keys; window: tokens that a query sees (None: all)."""

    spec: LayerSpec
    latents: tuple[LatentMaps, ...]
    rope: Rope | None
    window: int | None

    def projected(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, d] as attention would get them back."""
        if self.spec.keys == "plain":
            return k, v
        rope = self.rope if self.spec.keys == "pre_rope" else None
        if rope is not None:
            order = rope.order(k.shape[3])
            k = rope.rotated(k, positions, -1)[..., order]
        k, v = self._through_latents(k, v)
        if rope is not None:
            k = torch.empty_like(k).index_copy_(3, order, k)
            k = rope.rotated(k, positions, 1)
        return k, v

    def _through_latents(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sides = {"k": k.double(), "v": v.double()}
        for latent, maps in zip(self.spec.latents, self.latents, strict=True):
            heads = list(latent.heads)
            parts = [sides[x][:, heads].transpose(1, 2).flatten(2) for x in latent.side]
            whole = (torch.cat(parts, -1) - maps.mean) @ maps.down @ maps.up.mT + maps.mean
            for x, part in zip(latent.side, whole.chunk(len(parts), -1), strict=True):
                sides[x] = sides[x].clone()
                sides[x][:, heads] = part.unflatten(-1, (len(heads), -1)).transpose(1, 2)
        return sides["k"].to(k), sides["v"].to(v)


class Reference:
    """A model that answers as its layers' plans say. It stays changed."""

    def __init__(self, model: PreTrainedModel, modules: list[Any], plans: list[LayerPlan]) -> None:
        self.model = model
        self.visible: Tensor | None = None
        self.weights: list[Tensor] = []  # of every layer of the last forward [B, Hq, T, T]
        for module, plan in zip(modules, plans, strict=True):
            module.__dict__[PLAN] = self, plan
        for x in model.modules():
            config: Any = getattr(x, "config", None)
            if config is not None:
                config._attn_implementation = NAME

    @torch.no_grad()
    def logits(self, ids: Tensor, positions: Tensor | None, visible: Tensor, **more: Any) -> Tensor:
        """Logits [B, T, V] of tokens at positions [B, T] that see others as visible bool [B, T, T]
        and the windows of layers say; None: where the model puts them itself."""
        self.visible, self.weights = visible, []
        try:
            places = {} if positions is None else {"position_ids": positions}
            return self.model(ids, use_cache=False, **places, **more).logits
        finally:
            self.visible = None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Of queries [B, Hq, T, d] and all keys and values, in float64: [B, T, Hq, d]."""
    reference, plan = module.__dict__[PLAN]
    tokens = key.shape[2]
    if position_ids is None:
        position_ids = torch.arange(tokens)[None]
    key, value = plan.projected(key, value, position_ids.expand(len(key), -1))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ key.mT * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = _seen(reference.visible, plan.window, attention_mask, tokens)
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :tokens]  # of padding, which sees nothing
    reference.weights.append(weights)
    return (weights @ value).transpose(1, 2).to(query.dtype), None


def _seen(visible: Tensor | None, window: int | None, mask: Tensor | None, tokens: int) -> Tensor:
    """bool [B or 1, 1, T, T]: by the caller's account, else by transformers' mask of added
    numbers."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    if visible is None:
        return (distance >= 0)[None, None] if mask is None else mask[..., :tokens] > -1
    if window is not None:
        visible = visible & (distance < window)
    return visible[:, None]


ALL_ATTENTION_FUNCTIONS.register(NAME, partial(_attention))
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
