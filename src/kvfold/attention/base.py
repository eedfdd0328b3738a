"""The interface between models and attention: a layer describes its projections as data
(`LayerAttention`), and an `AttentionContext` stores its tokens and attends.

Shapes: B sequences, T queries per sequence, S stored rows, R numbers of a row; Hq / Hk query / KV
heads, d head dim; n latents of one side (keys or values), r their largest rank; W input width of
the output projection W_O. Projections are stacked and padded to r with zeros, so that heads of
different ranks run in one batched product; rows are never padded.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kvfold.layout import Geometry, Latent, LayerSpec
from kvfold.ops.common.attention import Tables, attention, rotate
from kvfold.ops.common.head_products import map_latents, up_project
from kvfold.ops.common.recording import Weights, contiguous, copy
from kvfold.ops.maps import OutputMaps, outputs
from kvfold.ops.sinks import with_sinks


class Columns:
    """The columns of a row that hold the latents of one side, and the latent of each KV head."""

    def __init__(self, spec: LayerSpec, latents: tuple[Latent, ...]) -> None:
        pairs = sorted((head, i) for i, latent in enumerate(latents) for head in latent.heads)
        self.starts = [spec.columns(latent).start for latent in latents]
        self.ranks = [latent.rank for latent in latents]
        self.heads = [i for _, i in pairs]
        self.widest = max(self.ranks, default=0)
        self.uniform = all(rank == self.widest for rank in self.ranks)

    def head_ranks(self, queries: int) -> list[int]:
        """The rank of the latent of each query head; queries: query heads per KV head."""
        return [self.ranks[i] for i in self.heads for _ in range(queries)]

    @cached_property
    def head_columns(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First column in a row and rank, for each KV head."""
        starts = tuple(self.starts[i] for i in self.heads)
        return starts, tuple(self.ranks[i] for i in self.heads)

    def gather(self, rows: Tensor) -> Tensor:
        """Latents of rows [B, S, R] as [B, S, n, widest]. Shorter latents are filled up with any
        finite numbers of the row, because the projections are zero there."""
        first, count = self.starts[0], len(self.ranks)
        if self.uniform:
            part = rows[..., first : first + count * self.widest]
            return part.unflatten(-1, (count, self.widest))
        columns = [
            start + (i if i < rank else 0)
            for start, rank in zip(self.starts, self.ranks, strict=True)
            for i in range(self.widest)
        ]
        last = rows.shape[-1] - 1
        index = torch.tensor([min(c, last) for c in columns], device=rows.device)
        return rows.index_select(-1, index).unflatten(-1, (count, self.widest))

    def compact(self, z: Tensor) -> Tensor:
        """Drop the padding: [B, T, n, widest] -> [B, T, sum of ranks]."""
        if self.uniform:
            return z
        return torch.cat([z[..., i, :rank] for i, rank in enumerate(self.ranks)], dim=-1)

    def spread(self, z: Tensor) -> Tensor:
        """Latents of KV heads: [B, S, n, r] -> [B, Hk, S, r], a view if a latent serves one head or
        all."""
        if len(self.ranks) == 1:
            return z.transpose(1, 2).expand(-1, len(self.heads), -1, -1)
        if len(self.ranks) == len(self.heads):
            return z.transpose(1, 2)
        return z[:, :, self.heads].transpose(1, 2)

    def per_head(self, stack: Tensor, head_dim: int) -> Tensor:
        """Split a stack of projections [n, heads * d, r] into one per KV head [Hk, d, r]."""
        return stack.unflatten(1, (-1, head_dim)).flatten(0, 1)


class Rope(Protocol):
    """Rotary position embedding of w dimensions.

    inv_freq: fp32 [w / 2], angle per position of the pair (i, i + w / 2).
    scaling: factor of the rotated dimensions.
    """

    @property
    def inv_freq(self) -> Tensor: ...
    @property
    def scaling(self) -> float: ...

    def tables(self, like: Tensor, positions: Tensor, stop: int | None) -> Tables:
        """cos, sin [.., w] at positions [..] < stop (or any positions [B, T] if stop is None), with
        the dtype and device of `like`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerShape:
    """What decides which backend serves a layer: its index and what it stores, without tensors.

    window: sliding window in tokens, the query's own included (None: full attention).
    fixed_rope: RoPE angles do not depend on the sequence length.
    has_sinks: the softmax includes a learned score per head (attention sink).
    """

    index: int
    spec: LayerSpec
    geometry: Geometry
    window: int | None
    fixed_rope: bool
    has_sinks: bool = False

    @property
    def softcap(self) -> float | None:
        return self.geometry.softcap

    @property
    def limited(self) -> bool:
        """Whether scores are capped or a sliding window hides rows."""
        return self.softcap is not None or self.window is not None

    @property
    def reconstructs_keys(self) -> bool:
        """Whether keys are reconstructed from latents and rotated for each score."""
        return self.spec.keys == "pre_rope"

    @property
    def key_width(self) -> int:
        """Largest dimension of queries and keys in the space of scores."""
        if self.reconstructs_keys:
            return self.geometry.head_dim
        return max((latent.rank for latent in self.spec.key_latents), default=0)

    @property
    def value_width(self) -> int:
        """Largest dimension of the values that attention sums."""
        if self.spec.values == "rebuilt":
            return self.geometry.head_width("v")
        return max((latent.rank for latent in self.spec.value_latents), default=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerAttention(LayerShape):
    """A layer's attention description: its shape and the projections of its stored latents. A layer
    without compression has one, too.

    key_up [n, heads * d, r], key_mean [Hk, d]: reconstruct keys before RoPE; None if keys are
        scored as stored.
    value_up [n, heads * d, r]: projects values up; None if W_O takes them as stored.
    output: W_O [D, W].
    rope: of reconstructed keys; None if the model has no RoPE.
    score_map [Hk, D + 1]: learned linear map from hidden states and a 1 to the log of an eviction
        score.
    sinks fp32 [Hq]: learned sink score per query head, if `has_sinks`.
    output_maps: value_up with a mean to add to outputs, if W_O does not add it.
    """

    key_columns: Columns
    value_columns: Columns
    key_up: Tensor | None
    key_mean: Tensor | None
    value_up: Tensor | None
    output: Tensor
    rope: Rope | None
    score_map: Tensor | None = None
    sinks: Tensor | None = None
    output_maps: OutputMaps | None = None

    def __post_init__(self) -> None:
        assert self.has_sinks is (self.sinks is not None), "a layer with sinks has their tensor"

    @property
    def scale(self) -> float:
        return self.geometry.scaling

    @property
    def output_width(self) -> int:
        """Input width of W_O."""
        heads = self.geometry.num_query_heads
        if self.spec.values != "fused":
            return heads * self.geometry.head_width("v")
        return sum(self.value_columns.head_ranks(self.geometry.queries_per_kv))

    def score_keys(self, rows: Tensor, rope: Tables | None) -> Tensor:
        """Keys of rows [B, S, R] in the space of scores [B, Hk, S, d or r]. rope: cos, sin
        [B or 1, 1 or Hk, S, w] of their positions, if `rope` is set."""
        z = self.key_columns.gather(rows)
        if self.key_up is None or self.key_mean is None:
            return self.key_columns.spread(z)
        k = (self._mapped(z, self.key_up) + self.key_mean).transpose(1, 2)
        return k if rope is None else rotate(k, *rope)

    def full_values(self, rows: Tensor) -> Tensor:
        """Full values of rows [B, S, R]: [B, S, Hk, d]."""
        assert self.value_up is not None, "these values are not rebuilt"
        return self._mapped(self.value_columns.gather(rows), self.value_up)

    def output_norms(self, rows: Tensor) -> Tensor:
        """Norms fp32 [B, Hq, S] of W_O v for the values of rows [B, S, R], per query head.
        Compressed values lack their mean, which is in W_O's bias."""
        g = self.geometry
        if self.value_up is None:
            v = self.value_columns.spread(self.value_columns.gather(rows))
            widths = self.value_columns.head_ranks(g.queries_per_kv)
        else:
            v = self.full_values(rows).transpose(1, 2)
            widths = [g.head_width("v")] * g.num_query_heads
        norms = []
        for head, w in enumerate(self.output.float().split(widths, 1)):
            head_values = v[:, head // g.queries_per_kv, :, : w.shape[1]].float()
            norms.append(((head_values @ (w.mT @ w)) * head_values).sum(-1).clamp(min=0).sqrt())
        return torch.stack(norms, 1)

    def projects_values_first(self, queries: int, cached: int) -> bool:
        """Whether projecting values up before attention is cheaper than attention over latents
        (long chunks)."""
        if self.value_up is None:
            return False
        g, rank = self.geometry, self.value_up.shape[-1]
        projection = cached * self.value_up.numel()
        saved = queries * cached * g.num_query_heads * (rank - g.head_width("v"))
        return saved > projection

    def attend(
        self,
        q: Tensor,
        rows: Tensor,
        rope: Tables | None,
        mask: Tensor | None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of q [B, Hq, T, .] over rows [B, S, R] in PyTorch. Returns the input of W_O
        [B, T, W] and weights [B, Hq, T, S]. mask as in `ops.common.attention`."""
        k = self.score_keys(rows, rope)
        first = self.projects_values_first(q.shape[2], rows.shape[1])
        v = self.full_values(rows) if first else self.value_columns.gather(rows)
        heads = self.geometry.num_kv_heads
        v = v.transpose(1, 2) if v.shape[2] in (1, heads) else self.value_columns.spread(v)
        out, weights = attention(q, k, v, mask, self.scale, need_weights, self.softcap, self.sinks)
        return self.merge_heads(out, mapped=first), weights

    @cached_property
    def weights(self) -> Weights:
        """The layer's tensors that attention over pages reads, in an order that all layers
        share."""
        tensors = [self.key_up, self.key_mean, self.value_up, self.sinks]
        if (maps := self.output_maps) is not None:
            packed = () if maps.packed is None else (*maps.packed,)
            tensors += [maps.value_up, maps.mean, *packed]
        return Weights(x for x in tensors if isinstance(x, Tensor))

    def with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Add the layer's sinks to the softmax of a kernel's result, out [B, Hq, T, .] and lse fp32
        [B, Hq, T], as `ops.sinks` does. Unchanged for a layer without sinks."""
        return (out, lse) if self.sinks is None else with_sinks(out, lse, self.sinks)

    def merge_heads(self, out: Tensor, mapped: bool = False, into: Tensor | None = None) -> Tensor:
        """Convert attention outputs [B, Hq, T, d or r] to the input of W_O [B, T, W]: project
        values up if necessary and concatenate heads.

        mapped: values were projected up before attention.
        into [B, T, W]: memory that the result may be written to.
        """
        g = self.geometry
        if self.output_maps is not None:
            return outputs(self.output_maps, out, into, mapped=mapped)
        if self.spec.values == "fused" and not self.value_columns.uniform:
            ranks = self.value_columns.head_ranks(g.queries_per_kv)
            return torch.cat([out[:, head, :, :rank] for head, rank in enumerate(ranks)], dim=-1)
        if self.value_up is not None and not mapped:
            up = self.value_columns.per_head(self.value_up, g.head_width("v"))
            projected = up_project(out, up)
            if into is None:
                return contiguous(projected).flatten(2)
            copy(into.view(projected.shape), projected)
            return into
        return out.transpose(1, 2).flatten(-2)

    def _mapped(self, z: Tensor, stack: Tensor) -> Tensor:
        """Project z [B, S, n, r] up with a stack [n, heads * d, r]: [B, S, Hk, d]."""
        full = map_latents(z, stack)
        return full.reshape(*z.shape[:2], self.geometry.num_kv_heads, -1)


class AttentionContext(ABC):
    """Stores the new tokens of a step and attends to all earlier ones, in a transformers cache or
    in pages.

    Contexts are passed to models as their cache. They answer the calls that models make before they
    build positions and masks, which kvfold computes elsewhere. weights: attention weights of the
    last `attend`, if they were requested.
    """

    is_compileable = False
    weights: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def before_attention(self, layer: LayerAttention, x: Tensor) -> None:  # noqa: B027 (few look)
        """Called before a layer attends, with the hidden states x [B, T, D] that enter its
        attention."""

    def keep_exact(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> None:  # noqa: B027
        """Called before `attend` by models with maps, with queries q [1, Hq, T, d], keys
        k [1, Hk, T, d] and values v [1, Hk, T, dv] as the model computed them. Keys lack the
        constants that stored keys lack, so that scores of both can share a softmax."""

    @abstractmethod
    def attend(self, layer: LayerAttention, q: Tensor, rows: Tensor) -> Tensor:
        """Store rows [B, T, R] of new tokens, and attend with q [B, Hq, T, .] in the space of
        scores to all visible tokens. Returns the input of W_O [B, T, W]."""
