"""Attention that stores cache entries of latents instead of keys and values, for all families.

Shapes: B batch, T new tokens, S cached tokens, D width, Hq / Hk query / KV heads, d head dim, R
numbers of an entry, n latents of one side, r their largest rank. Projections are stacked and padded
to r with zeros, so that heads of different ranks run in one batched product; entries are never
padded.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.base import Columns, LayerAttention, LayerShape
from kvfold.layout import CacheSpec, Geometry, Latent, LayerSpec
from kvfold.models.pointwise import PointwiseOps
from kvfold.models.rotary import RotaryTable, fixed_rope


class FoldedAttention(nn.Module):
    """The part that does not depend on the family: `project` computes queries and entries, and
    `o_proj` is the output projection. Attention itself runs in a context, which gets the layer's
    `maps`.

    A family subclass also inherits its transformers attention class, and adapts `forward`.
    """

    pointwise = PointwiseOps()  # an engine replaces them by compiled ones
    merged: Any  # in an engine, a function of x that computes all `products`; None: one by one
    output: Any  # in an engine, the output projection as a function
    rotary: RotaryTable | None = None  # the model's, not a submodule

    def __init__(self, config: Any, geometry: Geometry, spec: LayerSpec, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.merged = self.output = None  # as class attributes they would hide modules so named
        self.config, self.geometry, self.spec, self.layer_idx = config, geometry, spec, layer_idx
        self.window = attention_windows(config)[layer_idx]
        self._build_maps()

    # -- parameters ---------------------------------------------------------------------------

    def _build_maps(self) -> None:
        g, spec = self.geometry, self.spec
        whole = g.num_query_heads * g.head_dim
        folded = self._query_numbers(spec.key_latents) if self.query_folded else whole
        self.q_proj = _linear(g.hidden_size, folded)
        if self.keys_computed:
            self.k_proj = _linear(g.hidden_size, g.kv_width)
        if self.linear_width:
            self.down_proj = _linear(g.hidden_size, self.linear_width)
        if self.query_mapped or self.keys_reconstructed:
            self.key_up = nn.Parameter(self._stack(spec.key_latents))
        if self.keys_mapped:
            self.key_down = nn.Parameter(self._stack(spec.key_latents))
            self.key_shift = nn.Parameter(torch.zeros(sum(x.rank for x in spec.key_latents)))
        if self.keys_reconstructed:
            self.key_mean = nn.Parameter(torch.zeros(g.num_kv_heads, g.head_dim))
        if self.spec.has_value_up:
            self.value_up = nn.Parameter(self._stack(spec.value_latents))
        fused = self._query_numbers(spec.value_latents) if spec.values == "fused" else whole
        self.o_proj = _linear(fused, g.hidden_size)
        self.register_parameter("score_map", None)
        # Column numbers as plain lists: buffers on the meta device would not survive loading.
        self.key_columns = Columns(spec, spec.key_latents)
        self.value_columns = Columns(spec, spec.value_latents)

    def _stack(self, latents: tuple[Latent, ...]) -> Tensor:
        widest = max(latent.rank for latent in latents)
        return torch.zeros(len(latents), len(latents[0].heads) * self.geometry.head_dim, widest)

    def _query_numbers(self, latents: tuple[Latent, ...]) -> int:
        """Numbers of all query heads, each with the rank of its latent."""
        return self.geometry.queries_per_kv * sum(x.rank * len(x.heads) for x in latents)

    def add_score_map(self) -> None:
        """Add an empty linear map [Hk, D + 1] from hidden states and a 1 to the log of an eviction
        score."""
        g = self.geometry
        self.score_map = nn.Parameter(torch.empty(g.num_kv_heads, g.hidden_size + 1))

    # -- mode: which projections are folded into weights, and which act at run time -------------

    @property
    def keys_computed(self) -> bool:
        """Whether full keys are computed before they are projected (after a norm or RoPE), so that
        W_K cannot absorb the projection."""
        return self.spec.keys in ("plain", "post_rope") or self.geometry.key_norm

    @property
    def query_folded(self) -> bool:
        """Whether W_Q absorbs the key projection: only if that costs no more than projecting
        queries."""
        latents, g = self.spec.key_latents, self.geometry
        heads = sum(x.rank * len(x.heads) for x in latents)
        online = g.kv_width * g.hidden_size + g.head_dim * heads
        folded = g.hidden_size * heads
        return self.spec.keys == "absorbed" and not g.key_norm and folded <= online

    @property
    def query_mapped(self) -> bool:
        """Whether queries are projected at run time to score stored keys."""
        return self.spec.keys in ("post_rope", "absorbed") and not self.query_folded

    @property
    def keys_mapped(self) -> bool:
        """Whether computed keys are projected at run time."""
        return self.keys_computed and self.spec.keys != "plain"

    @property
    def keys_reconstructed(self) -> bool:
        """Whether keys are reconstructed from entries and rotated for each score."""
        return self.spec.keys == "pre_rope"

    @property
    def linear_width(self) -> int:
        """Numbers of an entry that W_K and W_V produce directly."""
        return sum(latent.rank for latent in self.linear_latents)

    @property
    def linear_latents(self) -> tuple[Latent, ...]:
        """Latents that W_K and W_V produce directly. Of a joint latent, the value part does."""
        skip = "k" if self.keys_computed else ""
        return tuple(latent for latent in self.spec.latents if latent.side != skip)

    # -- contract -----------------------------------------------------------------------------

    def normalize_queries(self, q: Tensor) -> Tensor:
        return q

    def normalize_keys(self, k: Tensor) -> Tensor:
        return k

    def project(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Compute the new tokens' queries and cache entries.

        x [B, T, D]; tables: RoPE cos, sin [B or 1, T, rotary dims].

        Returns q [B, Hq, T, d or r] in the space in which scores are computed, and entries
        [B, T, R].
        """
        q, k, rows = self._multiplied(x)
        q = self._queries(q, tables)
        return q, rows if k is None else self._computed_rows(k, tables, rows)

    def queries(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Only the queries of `project`."""
        return self._queries(self._multiplied(x)[0], tables)

    @property
    def products(self) -> list[nn.Linear]:
        """The linear layers of a token's hidden state: queries, computed keys, and the numbers that
        are stored directly, as far as the layer has them."""
        names = ("k_proj",) * self.keys_computed + ("down_proj",) * bool(self.linear_width)
        return [self.q_proj, *(getattr(self, name) for name in names)]

    def _multiplied(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Outputs [B, T, .] of `products` for x [B, T, D]: queries, keys (None if they are not
        computed), and directly stored numbers."""
        linears = self.products
        if self.merged is None:
            outputs = [linear(x) for linear in linears]
        else:
            outputs = list(self.merged(x).split([linear.out_features for linear in linears], -1))
        # By index, because torch.compile turns starred targets into a tuple.
        q, k = outputs[0], outputs[1] if self.keys_computed else None
        rows = outputs[-1] if self.linear_width else x.new_zeros(*x.shape[:2], 0)
        return q, k, rows

    @property
    def description(self) -> LayerAttention:
        """The description of the layer for attention backends, with its current tensors."""
        return LayerAttention(
            index=self.layer_idx,
            spec=self.spec,
            geometry=self.geometry,
            window=self.window,
            fixed_rope=self.geometry.rope and fixed_rope(self.config),
            key_columns=self.key_columns,
            value_columns=self.value_columns,
            key_up=self.key_up if self.keys_reconstructed else None,
            key_mean=self.key_mean if self.keys_reconstructed else None,
            value_up=self.value_up if self.spec.has_value_up else None,
            output=self.o_proj.weight,
            score_map=self.score_map,
            rope=self.rotary if self.keys_reconstructed else None,
        )

    def _queries(self, q: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Queries [B, Hq, T, d or r] in the space of scores, from outputs of W_Q [B, T, .]."""
        g = self.geometry
        if self.query_folded:
            return _split_ragged(q, self.key_columns.head_ranks(g.queries_per_kv))
        q = self.normalize_queries(q.unflatten(-1, (g.num_query_heads, g.head_dim)))
        up = self.key_columns.per_head(self.key_up, g.head_dim) if self.query_mapped else None
        return self.pointwise.queries(q, tables if g.rope else None, up)

    def _computed_rows(
        self, k: Tensor, tables: tuple[Tensor, Tensor] | None, rest: Tensor
    ) -> Tensor:
        """Entries [B, T, R] from keys [B, T, Hk d] and the numbers that are stored directly, rest
        [B, T, .]."""
        g, spec = self.geometry, self.spec
        k = self.normalize_keys(k.unflatten(-1, (g.num_kv_heads, g.head_dim)))
        tables = tables if g.rope and spec.keys in ("post_rope", "plain") else None
        if spec.keys == "plain":
            return self.pointwise.rows(k, tables, None, rest)
        z = self.key_columns.compact(self.pointwise.keys(k, tables, self.key_down))
        if spec.latents[0].side == "kv":
            return rest + self.pointwise.rows(z, None, self.key_shift, rest[..., :0])
        return self.pointwise.rows(z, None, self.key_shift, rest)


def layer_shapes(config: Any, spec: CacheSpec) -> list[LayerShape]:
    """The shapes of all layers of a model with this spec, without its weights."""
    rope = spec.geometry.rope and fixed_rope(config)
    layers = enumerate(zip(spec.layers, attention_windows(config), strict=True))
    return [
        LayerShape(index=i, spec=layer, geometry=spec.geometry, window=window, fixed_rope=rope)
        for i, (layer, window) in layers
    ]


def attention_windows(config: Any) -> list[int | None]:
    """Sliding window of each layer in tokens, the query's own included (None: full attention)."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with uninitialised weights, which folding or loading fills."""
    device = torch.get_default_device()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a side that keeps nothing has no outputs, by design
        return nn.utils.skip_init(nn.Linear, inputs, outputs, device=device)


def _split_ragged(x: Tensor, widths: list[int]) -> Tensor:
    """[B, T, sum] -> [B, H, T, widest], zero-padded."""
    widest = max(widths)
    if all(width == widest for width in widths):
        return x.unflatten(-1, (len(widths), widest)).transpose(1, 2)
    parts = [nn.functional.pad(p, (0, widest - p.shape[-1])) for p in x.split(widths, dim=-1)]
    return torch.stack(parts, dim=1)
