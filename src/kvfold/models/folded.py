"""Attention that stores rows instead of keys and values, for every family.

Shapes: B batch, T new tokens, S cached tokens, D width, Hq / Hk query / KV heads, d head dim,
R row width, n latents of one side, r their largest rank. Maps are kept as stacks padded to r with
zeros, so that heads of different ranks run in one batched product; rows are never padded.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.models.pieces import Pieces
from kvfold.ops.common.attention import attention, rotate
from kvfold.spec import Geometry, Latent, LayerSpec


@dataclass(frozen=True, kw_only=True)
class RowView:
    """What `attend` reads: rows [B, S, R] of all visible tokens, the RoPE tables of their positions
    (cos, sin [B or 1, 1 or Hk, S, rotary dims]; None where keys are not rebuilt), and a mask as in
    `ops.attention`. Where heads differ in their tokens, slot s of each is another one."""

    rows: Tensor
    tables: tuple[Tensor, Tensor] | None
    mask: Tensor | None


class FoldedAttention(nn.Module):
    """The family-independent part: `project` makes rows, `attend` reads them.

    A family subclass inherits its own attention class too, and adapts `forward`.
    """

    pieces = Pieces()  # an engine's steps put compiled ones in their place

    def __init__(self, config: Any, geometry: Geometry, spec: LayerSpec, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.config, self.geometry, self.spec, self.layer_idx = config, geometry, spec, layer_idx
        self.is_causal, self.scaling = True, geometry.scaling
        self.num_key_value_groups = geometry.queries_per_kv
        self._build_maps()

    # -- parameters ---------------------------------------------------------------------------

    def _build_maps(self) -> None:
        g, spec = self.geometry, self.spec
        width = g.num_query_heads * g.head_dim
        self.q_proj = _linear(g.hidden_size, self._query_width())
        if self.keys_online:
            self.k_proj = _linear(g.hidden_size, g.kv_width)
        if down := sum(latent.rank for latent in self.linear_latents):
            self.down_proj = _linear(g.hidden_size, down)
        if spec.keys in ("post", "pre") or not (spec.keys == "plain" or self.query_folded):
            self.key_up = nn.Parameter(self._stack(spec.key_latents))
        if self.keys_online and spec.keys != "plain":
            self.key_down = nn.Parameter(self._stack(spec.key_latents))
            self.key_shift = nn.Parameter(torch.zeros(sum(x.rank for x in spec.key_latents)))
        if spec.keys == "pre":
            self.key_mean = nn.Parameter(torch.zeros(g.num_kv_heads, g.head_dim))
        if spec.values == "rebuilt":
            self.value_up = nn.Parameter(self._stack(spec.value_latents))
        fused = spec.values == "fused"
        self.o_proj = _linear(self._fused_width() if fused else width, g.hidden_size)
        self._build_indices()

    def _stack(self, latents: tuple[Latent, ...]) -> Tensor:
        widest = max(latent.rank for latent in latents)
        return torch.zeros(len(latents), len(latents[0].heads) * self.geometry.head_dim, widest)

    def _query_width(self) -> int:
        g = self.geometry
        if not self.query_folded:
            return g.num_query_heads * g.head_dim
        return g.queries_per_kv * sum(x.rank * len(x.heads) for x in self.spec.key_latents)

    def _fused_width(self) -> int:
        latents = self.spec.value_latents
        return self.geometry.queries_per_kv * sum(x.rank * len(x.heads) for x in latents)

    def _build_indices(self) -> None:
        """Column numbers as plain lists: buffers on the meta device would not survive loading."""
        spec, group = self.spec, self.geometry.queries_per_kv
        self.key_columns = Columns.of(spec, spec.key_latents)
        self.value_columns = Columns.of(spec, spec.value_latents)
        self._head_ranks = {
            side: [r for r in _per_head(latents) for _ in range(group)]
            for side, latents in (("k", spec.key_latents), ("v", spec.value_latents))
        }

    @property
    def keys_online(self) -> bool:
        """Key maps act on computed keys (after a norm or RoPE) instead of sitting in W_K."""
        return self.spec.keys in ("plain", "post") or self.geometry.key_norm

    @property
    def query_folded(self) -> bool:
        """W_Q carries the key map: only where that does not cost more than mapping queries."""
        latents, g = self.spec.key_latents, self.geometry
        heads = sum(x.rank * len(x.heads) for x in latents)
        online = g.kv_width * g.hidden_size + g.head_dim * heads
        folded = g.hidden_size * heads
        return self.spec.keys == "absorbed" and not g.key_norm and folded <= online

    @property
    def linear_latents(self) -> tuple[Latent, ...]:
        """Latents that W_K and W_V produce directly (a joint latent's value part counts)."""
        skip = "k" if self.keys_online else ""
        return tuple(latent for latent in self.spec.latents if latent.side != skip)

    @property
    def value_width(self) -> int:
        """Numbers of the widest latent of values: of an attention output that `output` takes."""
        return self.value_columns.widest

    # -- contract -----------------------------------------------------------------------------

    def normalize_queries(self, q: Tensor) -> Tensor:
        return q

    def normalize_keys(self, k: Tensor) -> Tensor:
        return k

    def project(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """New tokens' queries and stored rows.

        x [B, T, D]; tables cos, sin [B or 1, T, rotary dims]. Returns q [B, Hq, T, d or r] in the
        space the scores are taken in, and rows [B, T, R].
        """
        q = self._queries(x, tables)
        rows = self.down_proj(x) if hasattr(self, "down_proj") else x.new_zeros(*x.shape[:2], 0)
        if not self.keys_online:
            return q, rows
        return q, self._online_rows(x, tables, rows)

    def attend(
        self, q: Tensor, view: RowView, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of q [B, Hq, T, .] over the stored rows, through W_O: [B, T, D], weights."""
        g, heads = self.geometry, self.geometry.num_kv_heads
        k = self.score_keys(view)
        v = self.value_columns.gather(view.rows)
        early = self.rebuilds_values_first(q.shape[2], view.rows.shape[1])
        if early:
            v = _apply(v, self.value_up).reshape(*v.shape[:2], heads, g.head_dim)
        v = v.transpose(1, 2) if v.shape[2] in (1, heads) else self.value_columns.spread(v)
        out, weights = attention(q, k, v, view.mask, self.scaling, need_weights)
        return self.output(out, early), weights

    def output(self, out: Tensor, rebuilt: bool = False) -> Tensor:
        """Attention outputs [B, Hq, T, d or r] through W_O: [B, T, D]. rebuilt: values were mapped
        before attention already."""
        return self.o_proj(self._outputs(out, rebuilt))

    def _queries(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        g = self.geometry
        q = self.q_proj(x)
        if self.query_folded:
            return _split_ragged(q, self._head_ranks["k"])
        q = self.normalize_queries(q.unflatten(-1, (g.num_query_heads, g.head_dim)))
        mapped = self.spec.keys in ("post", "absorbed")
        up = self.key_columns.per_head(self.key_up, g.head_dim) if mapped else None
        return self.pieces.queries(q, tables if g.rope else None, up)

    def _online_rows(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, rest: Tensor) -> Tensor:
        """Rows [B, T, R] from x [B, T, D] and what is mapped from it already, rest [B, T, .]."""
        g, spec = self.geometry, self.spec
        k = self.normalize_keys(self.k_proj(x).unflatten(-1, (g.num_kv_heads, g.head_dim)))
        tables = tables if g.rope and spec.keys in ("post", "plain") else None
        if spec.keys == "plain":
            return self.pieces.rows(k, tables, None, rest)
        k = self.pieces.turn(k, tables).flatten(-2).unflatten(-1, (len(spec.key_latents), -1))
        z = torch.einsum("btnc,ncr->btnr", k, self.key_down)
        z = self.key_columns.compact(z)
        if spec.latents[0].side == "kv":
            return rest + self.pieces.rows(z, None, self.key_shift, rest[..., :0])
        return self.pieces.rows(z, None, self.key_shift, rest)

    def score_keys(self, view: RowView) -> Tensor:
        """Keys in score space [B, Hk, S, d or r]."""
        g = self.geometry
        z = self.key_columns.gather(view.rows)
        if self.spec.keys != "pre":
            return self.key_columns.spread(z)
        k = _apply(z, self.key_up).reshape(*z.shape[:2], g.num_kv_heads, g.head_dim)
        k = (k + self.key_mean).transpose(1, 2)
        if view.tables is None:
            return k
        return rotate(k, *view.tables)

    def rebuilds_values_first(self, queries: int, cached: int) -> bool:
        """Map values before attention where that costs less than wider attention (long chunks)."""
        if self.spec.values != "rebuilt":
            return False
        g, rank = self.geometry, self.value_up.shape[-1]
        first = cached * self.value_up[..., 0].numel() * rank
        saved = queries * cached * g.num_query_heads * (rank - g.head_dim)
        return saved > first

    def _outputs(self, out: Tensor, rebuilt: bool) -> Tensor:
        """Attention outputs [B, Hq, T, d or r] as W_O's input [B, T, .]."""
        g = self.geometry
        if self.spec.values == "fused":
            return _join_ragged(out, self._head_ranks["v"])
        if self.spec.values == "rebuilt" and not rebuilt:
            up = self.value_columns.per_head(self.value_up, g.head_dim)
            out = out.unflatten(1, (g.num_kv_heads, g.queries_per_kv))
            out = torch.einsum("bhgtr,hdr->bhgtd", out, up).flatten(1, 2)
        return out.transpose(1, 2).flatten(-2)


class Columns:
    """Where one side's latents sit in a row, and how KV heads map to them."""

    def __init__(self, starts: list[int], ranks: list[int], heads: list[int]) -> None:
        self.starts, self.ranks, self.heads = starts, ranks, heads
        self.widest = max(ranks, default=0)
        self.uniform = all(r == self.widest for r in ranks)

    @classmethod
    def of(cls, spec: LayerSpec, latents: tuple[Latent, ...]) -> "Columns":
        starts = [spec.columns(latent).start for latent in latents]
        pairs = sorted((head, i) for i, latent in enumerate(latents) for head in latent.heads)
        return cls(starts, [latent.rank for latent in latents], [i for _, i in pairs])

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


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without random numbers: folding or loading fills it."""
    device = torch.get_default_device()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a side that keeps nothing has no outputs, by design
        return nn.utils.skip_init(nn.Linear, inputs, outputs, device=device)


def _apply(z: Tensor, stack: Tensor) -> Tensor:
    """z [B, S, n, r] through [n, heads * d, r] -> [B, S, n, heads * d]."""
    return torch.einsum("bsnr,ncr->bsnc", z, stack)


def _per_head(latents: tuple[Latent, ...]) -> list[int]:
    """Rank of the latent that serves each KV head, in head order."""
    pairs = sorted((head, latent.rank) for latent in latents for head in latent.heads)
    return [rank for _, rank in pairs]


def _split_ragged(x: Tensor, widths: list[int]) -> Tensor:
    """[B, T, sum] -> [B, H, T, widest], zero-padded."""
    widest = max(widths)
    if all(width == widest for width in widths):
        return x.unflatten(-1, (len(widths), widest)).transpose(1, 2)
    parts = [nn.functional.pad(p, (0, widest - p.shape[-1])) for p in x.split(widths, dim=-1)]
    return torch.stack(parts, dim=1)


def _join_ragged(x: Tensor, widths: list[int]) -> Tensor:
    """[B, H, T, widest] -> [B, T, sum], padding dropped."""
    if all(width == x.shape[-1] for width in widths):
        return x.transpose(1, 2).flatten(-2)
    return torch.cat([x[:, head, :, :width] for head, width in enumerate(widths)], dim=-1)
