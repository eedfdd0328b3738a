"""A process's share of a model's heads, where several serve it together (tensor parallelism).

Heads are dealt out in order. A latent that heads of several processes share is stored by each of
them, whole; its maps are cut by head. Shapes: Hq / Hk query / KV heads of the model, d head dim, n
latents of one side, r their largest rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.layout import CacheSpec, Geometry, Latent, LayerSpec
from kvfold.maps.layer_maps import Maps
from kvfold.maps.rope_maps import RopeMaps
from kvfold.models.folded import FoldedAttention


@dataclass(frozen=True)
class Share:
    """That of process `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def queries(self, geometry: Geometry) -> range:
        """Its query heads."""
        count = geometry.num_query_heads // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def heads(self, geometry: Geometry) -> range:
        """The KV heads that they read."""
        queries, each = self.queries(geometry), geometry.queries_per_kv
        return range(queries.start // each, (queries.stop - 1) // each + 1)

    def of_geometry(self, geometry: Geometry) -> Geometry:
        heads = len(self.heads(geometry)), len(self.queries(geometry))
        return replace(geometry, num_kv_heads=heads[0], num_query_heads=heads[1])

    def of_layer(self, geometry: Geometry, layer: LayerSpec) -> LayerSpec:
        """What it stores, its heads counted from 0."""
        heads = self.heads(geometry)
        latents = [
            replace(layer.latents[i], heads=tuple(head - heads.start for head in own))
            for i, own in self._kept(geometry, layer.latents)
        ]
        return replace(layer, latents=tuple(latents))

    def of_spec(self, spec: CacheSpec) -> CacheSpec:
        if self.size == 1:
            return spec
        layers = tuple(self.of_layer(spec.geometry, layer) for layer in spec.layers)
        return replace(spec, geometry=self.of_geometry(spec.geometry), layers=layers)

    def check(self, geometry: Geometry, layer: LayerSpec, index: int) -> None:
        """Raises ValueError where no such share of a layer can be computed by itself."""
        heads, size = geometry.num_kv_heads, self.size
        problem = None
        if geometry.num_query_heads % size or (heads % size and size % heads):
            problem = f"{geometry.num_query_heads} query and {heads} KV heads do not divide evenly"
        for latents in (layer.key_latents, layer.value_latents) if problem is None else ():
            if len({len(own) for _, own in self._kept(geometry, latents)}) > 1:
                problem = f"it cuts the heads of layer {index} that share latents unevenly"
        mapped = layer.keys == "post_rope" or (geometry.key_norm and layer.keys != "plain")
        for i, own in self._kept(geometry, layer.key_latents) if mapped and not problem else ():
            if own != layer.key_latents[i].heads:
                problem = f"keys of layer {index} are mapped together once they are normalised"
        if problem is not None:
            raise ValueError(
                f"tensor_parallel_size={size}: {problem}; take another size, or pipeline"
                " parallelism"
            )

    def of_tensors(self, whole: FoldedAttention, part: FoldedAttention) -> dict[str, Tensor]:
        """The tensors of `part`, which is of this share, by name. Outputs of all shares add up to
        the whole's."""
        if self.size == 1:
            return whole.state_dict()
        g, spec = whole.geometry, whole.spec
        queries, heads, each = self.queries(g), self.heads(g), g.queries_per_kv
        whole_queries = [g.head_dim] * g.num_query_heads
        folded = whole.key_columns.head_ranks(each) if whole.query_folded else whole_queries
        fused = spec.values == "fused"
        outputs = whole.value_columns.head_ranks(each) if fused else whole_queries
        found = {}
        for name, x in whole.state_dict().items():
            module, _, _ = name.partition(".")
            if module == "q_proj":
                x = _take(x, folded, queries)
            elif module == "k_proj":
                x = _take(x, [g.head_dim] * g.num_kv_heads, heads)
            elif module == "down_proj":
                x = self._of_latents(x, g, whole.linear_latents)
            elif name == "key_shift":
                x = self._of_latents(x, g, spec.key_latents)
            elif name == "key_mean":
                x = x[heads.start : heads.stop]
            elif name in ("key_up", "key_down", "value_up"):
                side = spec.value_latents if name == "value_up" else spec.key_latents
                x = self._of_stack(x, g, side)
            elif name == "o_proj.weight":
                x = _take(x, outputs, queries, dim=1)
            elif name == "o_proj.bias" and self.rank:
                x = torch.zeros_like(x)  # the first adds it
            found[name] = x
        return found

    def of_maps(self, maps: Maps, geometry: Geometry, layer: LayerSpec) -> Maps:
        """A layer's maps beside the weights, for this process. Its value latents stay whole where
        heads of several processes share them: what they store is made from all of those heads.
        Raises ValueError for key latents that heads share."""
        if self.size == 1:
            return maps
        if len(maps.key_down) != geometry.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={self.size}: the maps' key latents are of several heads, of"
                " which each process has some; take pipeline parallelism, or recipe 'swift' or"
                " 'lean'"
            )
        heads = slice(self.heads(geometry).start, self.heads(geometry).stop)
        kept = [i for i, _ in self._kept(geometry, layer.value_latents)]
        dv = maps.value_mean.shape[1]
        ups = []
        for i, own in self._kept(geometry, layer.value_latents):
            places = [layer.value_latents[i].heads.index(head) for head in own]
            ups.append(maps.value_up[i].unflatten(0, (-1, dv))[places].flatten(0, 1))
        parts = {"key_mean": maps.key_mean[heads]} if isinstance(maps, RopeMaps) else {}
        return replace(
            maps,
            key_down=maps.key_down[heads],
            key_up=maps.key_up[heads],
            key_shift=maps.key_shift[heads],
            value_down=maps.value_down[kept],
            value_up=torch.stack(ups),
            value_shift=maps.value_shift[kept],
            value_mean=maps.value_mean[heads],
            **parts,
        )

    def gathered(self, geometry: Geometry, layer: LayerSpec) -> list[int] | None:
        """Where the heads that this process's value latents are made from lie among those of all
        processes, one after another; None where they are its own."""
        kept = [layer.value_latents[i].heads for i, _ in self._kept(geometry, layer.value_latents)]
        heads = sorted(head for latent in kept for head in latent)
        if heads == list(self.heads(geometry)):
            return None
        copies = max(1, self.size // geometry.num_kv_heads)  # processes that have the same head
        return [head * copies for head in heads]

    def _kept(
        self, geometry: Geometry, latents: Sequence[Latent]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """The latents that it stores, and the heads of each that are its own."""
        heads = self.heads(geometry)
        found = ((i, tuple(h for h in x.heads if h in heads)) for i, x in enumerate(latents))
        return [(i, own) for i, own in found if own]

    def _of_latents(self, x: Tensor, geometry: Geometry, latents: Sequence[Latent]) -> Tensor:
        """x [sum of ranks, ..], latent after latent."""
        kept = [i for i, _ in self._kept(geometry, latents)]
        return _take(x, [latent.rank for latent in latents], kept)

    def _of_stack(self, x: Tensor, geometry: Geometry, latents: Sequence[Latent]) -> Tensor:
        """x [n, heads * d, r]."""
        kept, d = self._kept(geometry, latents), geometry.head_dim
        widest = max(latents[i].rank for i, _ in kept)
        parts = []
        for i, own in kept:
            heads = [latents[i].heads.index(head) for head in own]
            parts.append(x[i].unflatten(0, (-1, d))[heads].flatten(0, 1)[:, :widest])
        return torch.stack(parts)


def _take(x: Tensor, widths: list[int], kept: Iterable[int], dim: int = 0) -> Tensor:
    parts = x.split(widths, dim)
    return torch.cat([parts[i] for i in kept], dim)
