"""The contract of attention: a layer says in data what it is, asks a context to attend, and gets
what its W_O takes.

Shapes: B sequences, T queries of each, S stored rows, R numbers of a row; Hq / Hk query / KV heads,
d head dim; n latents of one side, r their largest rank; W numbers that W_O takes.
Maps are stacks padded to r with zeros, so that heads of different ranks run in one batched product;
rows are never padded.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kvfold.ops.common.attention import Tables, attention, rotate
from kvfold.ops.maps import OutputMaps, outputs
from kvfold.ops.sinks import beside_sinks
from kvfold.spec import Geometry, Latent, LayerSpec


class Columns:
    """Where one side's latents sit in a row, and how KV heads map to them."""

    def __init__(self, spec: LayerSpec, latents: tuple[Latent, ...]) -> None:
        pairs = sorted((head, i) for i, latent in enumerate(latents) for head in latent.heads)
        self.starts = [spec.columns(latent).start for latent in latents]
        self.ranks = [latent.rank for latent in latents]
        self.heads = [i for _, i in pairs]
        self.widest = max(self.ranks, default=0)
        self.uniform = all(rank == self.widest for rank in self.ranks)

    def head_ranks(self, queries: int) -> list[int]:
        """Ranks of the latents that serve the query heads, `queries` of them a KV head."""
        return [self.ranks[i] for i in self.heads for _ in range(queries)]

    @cached_property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First column in a row and rank of every KV head's numbers."""
        starts = tuple(self.starts[i] for i in self.heads)
        return starts, tuple(self.ranks[i] for i in self.heads)

    def gather(self, rows: Tensor) -> Tensor:
        """rows [B, S, R] -> [B, S, n, widest]; short latents are filled with numbers that meet
        zeros in every map, so a row's other finite numbers serve."""
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
        """[B, T, n, widest] -> [B, T, sum of ranks], padding dropped; as it is where none is."""
        if self.uniform:
            return z
        return torch.cat([z[..., i, :rank] for i, rank in enumerate(self.ranks)], dim=-1)

    def spread(self, z: Tensor) -> Tensor:
        """[B, S, n, r] -> [B, Hk, S, r], a view where a latent serves one head or all."""
        if len(self.ranks) == 1:
            return z.transpose(1, 2).expand(-1, len(self.heads), -1, -1)
        if len(self.ranks) == len(self.heads):
            return z.transpose(1, 2)
        return z[:, :, self.heads].transpose(1, 2)

    def per_head(self, stack: Tensor, head_dim: int) -> Tensor:
        """A stack [n, heads * d, r] as one map per KV head [Hk, d, r]."""
        return stack.unflatten(1, (-1, head_dim)).flatten(0, 1)


class Rope(Protocol):
    """RoPE of w dims. inv_freq fp32 [w / 2]: angles a position, of the pairs (i, i + w / 2);
    scaling: of the rotated dims."""

    @property
    def inv_freq(self) -> Tensor: ...
    @property
    def scaling(self) -> float: ...

    def tables(self, like: Tensor, positions: Tensor, stop: int | None) -> Tables:
        """cos, sin [.., w] at positions [..] < stop, or any positions [B, T] where stop is None, in
        a tensor's dtype and on its device."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerShape:
    """What a layer's backends are chosen by: its number and what it stores, no tensors.

    window: tokens that a query sees, its own included (None: all); fixed_rope: whether there is
    RoPE, whose angles hold for sequences of any length; has_sinks: whether a learned score stands
    beside those of every query.
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
        """Whether scores are capped, or a window hides rows."""
        return self.softcap is not None or self.window is not None

    @property
    def rebuilds_keys(self) -> bool:
        """Whether keys are mapped, then turned, for every score."""
        return self.spec.keys == "pre_rope"

    @property
    def key_width(self) -> int:
        """Numbers of the widest query and key in score space."""
        if self.rebuilds_keys:
            return self.geometry.head_dim
        return max((latent.rank for latent in self.spec.key_latents), default=0)

    @property
    def value_width(self) -> int:
        """Numbers of the widest value that attention adds up, mapped first where it is mapped."""
        if self.spec.values == "rebuilt":
            return self.geometry.head_width("v")
        return max((latent.rank for latent in self.spec.value_latents), default=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMaps(LayerShape):
    """A layer of a model, as attention sees it: its shape, and what rebuilds what it stores.

    key_up [n, heads * d, r] and key_mean [Hk, d]: of keys that are rebuilt before RoPE, else None;
    value_up [n, heads * d, r]: of values that W_O does not take as they are stored, else None;
    output: W_O [D, W]; rope: of keys that are rebuilt, None where the model has none; score_map
    [Hk, D + 1]: from hidden states and a one to the log of what rows are worth, if it was learned;
    sinks fp32 [Hq]: by query head, the score that stands beside a query's and has no value, where
    `has_sinks`; output_maps: value_up again, with a mean that is added to outputs, where W_O does
    not add it.
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
        """Numbers that W_O takes of a token."""
        heads = self.geometry.num_query_heads
        if self.spec.values != "fused":
            return heads * self.geometry.head_width("v")
        return sum(self.value_columns.head_ranks(self.geometry.queries_per_kv))

    def score_keys(self, rows: Tensor, rope: Tables | None) -> Tensor:
        """Keys of rows [B, S, R] in score space [B, Hk, S, d or r]. rope: cos, sin
        [B or 1, 1 or Hk, S, w] of their positions, where `rope` is set."""
        z = self.key_columns.gather(rows)
        if self.key_up is None or self.key_mean is None:
            return self.key_columns.spread(z)
        k = (self._mapped(z, self.key_up) + self.key_mean).transpose(1, 2)
        return k if rope is None else rotate(k, *rope)

    def mapped_values(self, rows: Tensor) -> Tensor:
        """Values of rows [B, S, R] as the model made them [B, S, Hk, d]."""
        assert self.value_up is not None, "these values are not rebuilt"
        return self._mapped(self.value_columns.gather(rows), self.value_up)

    def output_norms(self, rows: Tensor) -> Tensor:
        """Norms fp32 [B, Hq, S] of what W_O makes of the values of rows [B, S, R], alone, by query
        head. Of compressed values less their mean, which is in W_O's bias."""
        g = self.geometry
        if self.value_up is None:
            v = self.value_columns.spread(self.value_columns.gather(rows))
            widths = self.value_columns.head_ranks(g.queries_per_kv)
        else:
            v = self.mapped_values(rows).transpose(1, 2)
            widths = [g.head_width("v")] * g.num_query_heads
        found = []
        for head, w in enumerate(self.output.float().split(widths, 1)):
            own = v[:, head // g.queries_per_kv, :, : w.shape[1]].float()
            found.append(((own @ (w.mT @ w)) * own).sum(-1).clamp(min=0).sqrt())
        return torch.stack(found, 1)

    def maps_values_first(self, queries: int, cached: int) -> bool:
        """Map values before attention where that costs less than wider attention (long chunks)."""
        if self.value_up is None:
            return False
        g, rank = self.geometry, self.value_up.shape[-1]
        first = cached * self.value_up.numel()
        saved = queries * cached * g.num_query_heads * (rank - g.head_width("v"))
        return saved > first

    def attend(
        self,
        q: Tensor,
        rows: Tensor,
        rope: Tables | None,
        mask: Tensor | None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of q [B, Hq, T, .] over rows [B, S, R] in PyTorch: what W_O takes [B, T, W],
        and weights [B, Hq, T, S]. mask as in `ops.common.attention`."""
        k = self.score_keys(rows, rope)
        first = self.maps_values_first(q.shape[2], rows.shape[1])
        v = self.mapped_values(rows) if first else self.value_columns.gather(rows)
        heads = self.geometry.num_kv_heads
        v = v.transpose(1, 2) if v.shape[2] in (1, heads) else self.value_columns.spread(v)
        out, weights = attention(q, k, v, mask, self.scale, need_weights, self.softcap, self.sinks)
        return self.joined(out, mapped=first), weights

    def beside_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """As of `ops.sinks`, of what a kernel gave: out [B, Hq, T, .] and lse fp32
        [B, Hq, T]. As they are where the layer has no sinks."""
        return (out, lse) if self.sinks is None else beside_sinks(out, lse, self.sinks)

    def joined(self, out: Tensor, mapped: bool = False, into: Tensor | None = None) -> Tensor:
        """Attention outputs [B, Hq, T, d or r] as what W_O takes [B, T, W]. mapped: values were
        mapped before attention already; into [B, T, W]: what may be overwritten with it."""
        g = self.geometry
        if self.output_maps is not None:
            return outputs(self.output_maps, out, into, mapped=mapped)
        if self.spec.values == "fused" and not self.value_columns.uniform:
            ranks = self.value_columns.head_ranks(g.queries_per_kv)
            return torch.cat([out[:, head, :, :rank] for head, rank in enumerate(ranks)], dim=-1)
        if self.value_up is not None and not mapped:
            up = self.value_columns.per_head(self.value_up, g.head_width("v"))
            out = out.unflatten(1, (g.num_kv_heads, g.queries_per_kv))
            out = torch.einsum("bhgtr,hdr->bhgtd", out, up).flatten(1, 2)
        return out.transpose(1, 2).flatten(-2)

    def _mapped(self, z: Tensor, stack: Tensor) -> Tensor:
        """z [B, S, n, r] through [n, heads * d, r] -> [B, S, Hk, d]."""
        full = torch.einsum("bsnr,ncr->bsnc", z, stack)
        return full.reshape(*z.shape[:2], self.geometry.num_kv_heads, -1)


class AttentionContext(ABC):
    """The past of a layer's new tokens: a transformers cache, or pages.

    Contexts that stand in place of a cache answer what models ask of one before they make positions
    and masks, which come from elsewhere here. weights: of the last `attend`, where they were asked
    for.
    """

    is_compileable = False
    weights: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def enter(self, layer: LayerMaps, x: Tensor) -> None:  # noqa: B027 (few look)
        """The hidden states x [B, T, D] that a layer's attention takes, before it attends; for
        contexts that look at them."""

    @abstractmethod
    def attend(self, layer: LayerMaps, q: Tensor, rows: Tensor) -> Tensor:
        """Store rows [B, T, R] of new tokens, and attend with q [B, Hq, T, .] in score space to all
        that they see: what W_O takes [B, T, W]."""
