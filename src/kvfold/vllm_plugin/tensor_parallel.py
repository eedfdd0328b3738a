"""The heads, latents and maps of one process under tensor parallelism.

Each process has consecutive query heads. A latent whose heads belong to several processes is stored
whole by each of them; its up-projections are split by head.

Shapes: Hq / Hk query / KV heads of the model, d head dim, n latents of one side, r their largest
rank.
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
class ProcessShare:
    """The part of process `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def query_heads(self, geometry: Geometry) -> range:
        """The query heads of this process."""
        count = geometry.num_query_heads // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def kv_heads(self, geometry: Geometry) -> range:
        """The KV heads that those query heads read."""
        queries, group = self.query_heads(geometry), geometry.queries_per_kv
        return range(queries.start // group, (queries.stop - 1) // group + 1)

    def local_geometry(self, geometry: Geometry) -> Geometry:
        """A geometry with the heads of this process only."""
        heads = len(self.kv_heads(geometry)), len(self.query_heads(geometry))
        return replace(geometry, num_kv_heads=heads[0], num_query_heads=heads[1])

    def local_layer(self, geometry: Geometry, layer: LayerSpec) -> LayerSpec:
        """What this process stores of a layer, its heads counted from 0."""
        first = self.kv_heads(geometry).start
        latents = [
            replace(layer.latents[i], heads=tuple(head - first for head in heads))
            for i, heads in self._local_latents(geometry, layer.latents)
        ]
        return replace(layer, latents=tuple(latents))

    def local_spec(self, spec: CacheSpec) -> CacheSpec:
        """What this process stores."""
        if self.size == 1:
            return spec
        layers = tuple(self.local_layer(spec.geometry, layer) for layer in spec.layers)
        return replace(spec, geometry=self.local_geometry(spec.geometry), layers=layers)

    def check(self, geometry: Geometry, layer: LayerSpec, index: int) -> None:
        """Raises ValueError if a process cannot compute its part of a layer by itself."""
        heads, size = geometry.num_kv_heads, self.size
        problem = None
        if geometry.num_query_heads % size or (heads % size and size % heads):
            problem = f"{geometry.num_query_heads} query and {heads} KV heads do not divide evenly"
        for latents in (layer.key_latents, layer.value_latents) if problem is None else ():
            if len({len(local) for _, local in self._local_latents(geometry, latents)}) > 1:
                problem = f"it splits the heads of layer {index} that share latents unevenly"
        joint = layer.keys == "post_rope" or (geometry.key_norm and layer.keys != "plain")
        key_latents = self._local_latents(geometry, layer.key_latents)
        for i, local in key_latents if joint and not problem else ():
            if local != layer.key_latents[i].heads:
                problem = f"keys of layer {index} are mapped together after they are normalised"
        if problem is not None:
            raise ValueError(
                f"tensor_parallel_size={size}: {problem}; take another size, or pipeline"
                " parallelism"
            )

    def local_tensors(self, whole: FoldedAttention, part: FoldedAttention) -> dict[str, Tensor]:
        """The tensors of `part`, by name: this process's slices of `whole`. The outputs of all
        processes add up to the output of `whole`."""
        if self.size == 1:
            return whole.state_dict()
        g, spec = whole.geometry, whole.spec
        queries, heads, group = self.query_heads(g), self.kv_heads(g), g.queries_per_kv
        head_widths = [g.head_dim] * g.num_query_heads
        folded = whole.key_columns.head_ranks(group) if whole.query_folded else head_widths
        fused = spec.values == "fused"
        outputs = whole.value_columns.head_ranks(group) if fused else head_widths
        tensors = {}
        for name, x in whole.state_dict().items():
            module, _, _ = name.partition(".")
            if module == "q_proj":
                x = _take_parts(x, folded, queries)
            elif module == "k_proj":
                x = _take_parts(x, [g.head_dim] * g.num_kv_heads, heads)
            elif module == "down_proj":
                x = self._slice_latents(x, g, whole.linear_latents)
            elif name == "key_shift":
                x = self._slice_latents(x, g, spec.key_latents)
            elif name == "key_mean":
                x = x[heads.start : heads.stop]
            elif name in ("key_up", "key_down", "value_up"):
                side = spec.value_latents if name == "value_up" else spec.key_latents
                x = self._slice_stack(x, g, side)
            elif name == "o_proj.weight":
                x = _take_parts(x, outputs, queries, dim=1)
            elif name == "o_proj.bias" and self.rank:
                x = torch.zeros_like(x)  # rank 0 adds the bias
            tensors[name] = x
        return tensors

    def local_maps(self, maps: Maps, geometry: Geometry, layer: LayerSpec) -> Maps:
        """This process's part of a layer's maps.

        Value latents whose heads belong to several processes stay whole, because their entries
        depend on the values of all of those heads.

        Raises ValueError for key latents of several heads.
        """
        if self.size == 1:
            return maps
        if len(maps.key_down) != geometry.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={self.size}: the maps' key latents are of several heads, of"
                " which each process has some; take pipeline parallelism, or recipe 'swift' or"
                " 'lean'"
            )
        heads = slice(self.kv_heads(geometry).start, self.kv_heads(geometry).stop)
        latents = [i for i, _ in self._local_latents(geometry, layer.value_latents)]
        dv = maps.value_mean.shape[1]
        ups = []
        for i, local in self._local_latents(geometry, layer.value_latents):
            places = [layer.value_latents[i].heads.index(head) for head in local]
            ups.append(maps.value_up[i].unflatten(0, (-1, dv))[places].flatten(0, 1))
        parts = {"key_mean": maps.key_mean[heads]} if isinstance(maps, RopeMaps) else {}
        return replace(
            maps,
            key_down=maps.key_down[heads],
            key_up=maps.key_up[heads],
            key_shift=maps.key_shift[heads],
            value_down=maps.value_down[latents],
            value_up=torch.stack(ups),
            value_shift=maps.value_shift[latents],
            value_mean=maps.value_mean[heads],
            **parts,
        )

    def gathered_heads(self, geometry: Geometry, layer: LayerSpec) -> list[int] | None:
        """The heads whose values this process needs for its value latents, as indices into the
        all-gathered KV heads of all processes; None if they are its own heads."""
        latents = self._local_latents(geometry, layer.value_latents)
        heads = sorted(head for i, _ in latents for head in layer.value_latents[i].heads)
        if heads == list(self.kv_heads(geometry)):
            return None
        copies = max(1, self.size // geometry.num_kv_heads)  # processes that have the same head
        return [head * copies for head in heads]

    def _local_latents(
        self, geometry: Geometry, latents: Sequence[Latent]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """(index, heads of this process) of the latents that this process stores."""
        heads = self.kv_heads(geometry)
        pairs = ((i, tuple(h for h in x.heads if h in heads)) for i, x in enumerate(latents))
        return [(i, local) for i, local in pairs if local]

    def _slice_latents(self, x: Tensor, geometry: Geometry, latents: Sequence[Latent]) -> Tensor:
        """Slice x [sum of ranks, ..], the ranks of one latent after another."""
        indices = [i for i, _ in self._local_latents(geometry, latents)]
        return _take_parts(x, [latent.rank for latent in latents], indices)

    def _slice_stack(self, x: Tensor, geometry: Geometry, latents: Sequence[Latent]) -> Tensor:
        """Slice x [n, heads * d, r], one matrix per latent."""
        local_latents, d = self._local_latents(geometry, latents), geometry.head_dim
        widest = max(latents[i].rank for i, _ in local_latents)
        parts = []
        for i, local in local_latents:
            heads = [latents[i].heads.index(head) for head in local]
            parts.append(x[i].unflatten(0, (-1, d))[heads].flatten(0, 1)[:, :widest])
        return torch.stack(parts)


def _take_parts(x: Tensor, widths: list[int], indices: Iterable[int], dim: int = 0) -> Tensor:
    parts = x.split(widths, dim)
    return torch.cat([parts[i] for i in indices], dim)
