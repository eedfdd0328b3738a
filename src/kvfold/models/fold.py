"""Fold a model: projections of its latents become the weights of attention modules that store cache
entries.

Shapes: D width, Hk KV heads, G query heads per KV head, d head dim; a latent represents n numbers
and stores r. Computes in fp64 and casts to the model's dtype at the end.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.layout import CacheSpec, Latent
from kvfold.models.adapter import Family, HFAttention, Projections
from kvfold.models.families import family_of
from kvfold.models.foldable import check_weights
from kvfold.ops.common.rotation import rotation


class LatentMaps(NamedTuple):
    """Projections down, up [n, r] and mean [n] of one latent: z = down^T (c - mean) is stored, and
    mean + up z is its reconstruction."""

    down: Tensor
    up: Tensor
    mean: Tensor


class FoldedTensors:
    """The tensors of a folded attention by parameter name.

    weights: projections of the attention that it replaces.
    maps: per latent in the spec's order; None stores a latent as it is.
    """

    def __init__(
        self, weights: Projections, folded: HFAttention, maps: Sequence[LatentMaps | None]
    ) -> None:
        self.weights, self.folded = weights, folded
        self.geometry, self.spec = folded.geometry, folded.spec
        self.down: dict[Latent, Tensor] = {}
        self.up: dict[Latent, Tensor] = {}
        self.mean: dict[Latent, Tensor] = {}
        for latent, latent_maps in zip(self.spec.latents, maps, strict=True):
            if latent_maps is None:
                eye = torch.eye(latent.rank, dtype=weights.k.dtype, device=weights.k.device)
                latent_maps = LatentMaps(eye, eye, eye.new_zeros(latent.rank))
            self.down[latent], self.up[latent], self.mean[latent] = latent_maps

    def tensors(self) -> dict[str, Tensor]:
        return {**self._query(), **self._rows(), **self._keys(), **self._outputs()}

    def _query(self) -> dict[str, Tensor]:
        w, g = self.weights, self.geometry
        if not self.folded.query_folded:
            return {"q_proj.weight": w.q, "q_proj.bias": w.q_bias}
        heads = (g.num_kv_heads, g.queries_per_kv, g.head_dim)
        q, b = w.q.unflatten(0, heads), w.q_bias.unflatten(0, heads)
        ups = list(enumerate(self._head_ups("k")))
        parts = [torch.einsum("gdx,dr->grx", q[head], up).flatten(0, 1) for head, up in ups]
        biases = [(b[head] @ up).flatten() for head, up in ups]
        return {"q_proj.weight": torch.cat(parts), "q_proj.bias": torch.cat(biases)}

    def _rows(self) -> dict[str, Tensor]:
        """The parts of cache entries that W_K and W_V produce directly: down^T (W x + b - mean)."""
        w, folded, d = self.weights, self.folded, self.geometry.head_dim
        if not folded.linear_width:
            return {}
        blocks, biases = [], []
        for latent in folded.linear_latents:
            down, mean = self.down[latent], self.mean[latent]
            span = slice(latent.heads[0] * d, (latent.heads[-1] + 1) * d)
            sources = {"k": (w.k, w.k_bias), "v": (w.v, w.v_bias)}
            if folded.keys_computed:
                sources["k"] = (torch.zeros_like(w.k), torch.zeros_like(w.k_bias))
            weight = torch.cat([sources[s][0][span] for s in latent.side])
            bias = torch.cat([sources[s][1][span] for s in latent.side])
            blocks.append(down.mT @ weight)
            biases.append(down.mT @ (bias - mean))
        return {"down_proj.weight": torch.cat(blocks), "down_proj.bias": torch.cat(biases)}

    def _keys(self) -> dict[str, Tensor]:
        """Key projections that act at run time."""
        w, folded, latents = self.weights, self.folded, self.spec.key_latents
        tensors: dict[str, Tensor] = {}
        if folded.keys_computed:
            tensors |= {"k_proj.weight": w.k, "k_proj.bias": w.k_bias}
        if folded.query_mapped or folded.keys_reconstructed:
            tensors["key_up"] = self._stack([self._part(x, "k", self.up) for x in latents])
        if folded.keys_mapped:
            downs = [self._part(x, "k", self.down) for x in latents]
            tensors["key_down"] = self._stack(downs)
            shifts = [
                torch.zeros_like(self.mean[x][:1]).expand(x.rank)
                if x.side == "kv"  # the linear part already subtracts the mean
                else -down.mT @ self.mean[x]
                for x, down in zip(latents, downs, strict=True)
            ]
            tensors["key_shift"] = torch.cat(shifts)
        if folded.keys_reconstructed:
            means = [self._part(x, "k", self.mean) for x in latents]
            tensors["key_mean"] = torch.cat(means).unflatten(0, (self.geometry.num_kv_heads, -1))
        return tensors

    def _outputs(self) -> dict[str, Tensor]:
        """The output projection with value projections and the value mean folded in (attention
        weights add up to one)."""
        w, g, spec = self.weights, self.geometry, self.spec
        latents = spec.value_latents
        mean = torch.cat([self._part(x, "v", self.mean) for x in latents])
        per_query = mean.unflatten(0, (g.num_kv_heads, 1, g.head_dim))
        per_query = per_query.expand(-1, g.queries_per_kv, -1).flatten()
        tensors = {"o_proj.weight": w.o, "o_proj.bias": w.o_bias + w.o @ per_query}
        if spec.has_value_up:
            tensors["value_up"] = self._stack([self._part(x, "v", self.up) for x in latents])
        if spec.values == "fused":
            o = w.o.unflatten(1, (g.num_kv_heads, g.queries_per_kv, g.head_dim))
            parts = [
                torch.einsum("xgd,dr->xgr", o[:, head], up).flatten(1)
                for head, up in enumerate(self._head_ups("v"))
            ]
            tensors["o_proj.weight"] = torch.cat(parts, dim=1)
        return tensors

    def _part(self, latent: Latent, side: str, maps: dict[Latent, Tensor]) -> Tensor:
        """The key or value rows of a latent's map [heads * d, r], or of its mean [heads * d]."""
        whole = maps[latent]
        return whole if latent.side != "kv" else whole.chunk(2)[0 if side == "k" else 1]

    def _head_ups(self, side: str) -> list[Tensor]:
        """The up-projection [d, r] of each KV head, in head order."""
        latents = self.spec.key_latents if side == "k" else self.spec.value_latents
        return [
            part
            for latent in latents
            for part in self._part(latent, side, self.up).split(self.geometry.head_dim)
        ]

    def _stack(self, maps: list[Tensor]) -> Tensor:
        widest = max(x.shape[1] for x in maps)
        return torch.stack([torch.nn.functional.pad(x, (0, widest - x.shape[1])) for x in maps])


def fold_model(
    model: Any, family: type[Family], spec: CacheSpec, maps: Sequence[Sequence[LatentMaps | None]]
) -> None:
    """Replace every attention of a model in place, layer by layer. maps: per layer and latent, as
    in `FoldedTensors`."""
    _fold(model, family, spec, lambda index, weights: maps[index])


def _fold(
    model: Any,
    family: type[Family],
    spec: CacheSpec,
    maps_of: Callable[[int, Projections], Sequence[LatentMaps | None]],
) -> None:
    check_weights(model, family)
    for index, attention in enumerate(list(family.attentions(model))):
        weights = family.projections(attention, spec.geometry)
        with torch.device(weights.q.device):
            folded = family.swap(model, spec, index)
        folded.to(next(attention.parameters()).dtype).requires_grad_(False)
        maps = maps_of(index, weights)
        tensors = FoldedTensors(weights, folded, maps).tensors() | family.norms(attention)
        for name, tensor in tensors.items():
            folded.get_parameter(name).data.copy_(tensor.data)
    family.connect(model)


def fold_plain(
    model: Any, spec: CacheSpec, means: Sequence[tuple[Tensor, Tensor]] | None = None
) -> None:
    """Fold a model without loss, so that it stores what `spec` says: full keys and values, or
    rotated ones for quantisation, minus their `means` [Hk, d] per layer."""

    def maps_of(index: int, weights: Projections) -> Sequence[LatentMaps | None]:
        latents = spec.layers[index].latents
        if means is None:
            return [None] * len(latents)
        return [_rotated(latent, *means[index], like=weights.k) for latent in latents]

    _fold(model, family_of(model.config), spec, maps_of)


def _rotated(latent: Latent, keys: Tensor, values: Tensor, like: Tensor) -> LatentMaps:
    q = rotation(latent.rank).to(like.device)
    sides = {"k": keys, "v": values}
    mean = torch.cat([sides[side][list(latent.heads)].flatten() for side in latent.side])
    return LatentMaps(q, q, mean.to(q))
