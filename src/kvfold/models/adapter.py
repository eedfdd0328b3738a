"""The meeting point with transformers: what a family must say of itself, and the cache view.

Shapes: B batch, T new tokens, S cached tokens, D width, Hq / Hk query / KV heads, d head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvfold.models.folded import FoldedAttention, RowView
from kvfold.ops.common.attention import Tables
from kvfold.spec import CacheSpec, Geometry


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Attention weights in one form, x @ w.T + b: q [Hq d, D], k, v [Hk d, D], o [D, Hq d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor
    k_bias: Tensor
    v_bias: Tensor
    o_bias: Tensor

    @classmethod
    def of(cls, **linears: tuple[Tensor, Tensor | None]) -> "Projections":
        """fp64 copies from (weight, bias or None) of q, k, v and o."""
        named = {}
        for name, (weight, bias) in linears.items():
            named[name] = weight.detach().double()
            bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
            named[f"{name}_bias"] = bias.double()
        return cls(**named)


class PagedRows(ABC):
    """The other cache that an attention can meet: pages, of which it knows only this."""

    @abstractmethod
    def attend(self, module: "HFAttention", x: Tensor, tables: Tables | None) -> Tensor:
        """Store the rows of x [1, N, D] and attend to all that its tokens see: [1, N, D]."""


LONG_ROPE = ("dynamic", "longrope")  # tables that depend on the longest sequence of a batch


def rope_type(config: Any) -> str:
    """How a model's RoPE is scaled, in transformers' words."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


class RotaryTable:
    """The model's own RoPE tables, computed once per position and shared by all layers."""

    def __init__(self, rotary: nn.Module, rope_type: str) -> None:
        self.rotary, self.rope_type = rotary, rope_type
        self.tables: Tables | None = None

    def __call__(self, x: Tensor, positions: Tensor, stop: int) -> Tables:
        """cos, sin [.., rotary dims] at positions [..] < stop, in x's dtype and device."""
        if self.rope_type in LONG_ROPE:
            return self.rotary(x, positions)
        cos = self.tables[0] if self.tables else None
        if cos is None or cos.shape[0] < stop or (cos.dtype, cos.device) != (x.dtype, x.device):
            length = 1 << (stop - 1).bit_length()
            grid = torch.arange(length, device=x.device)[None]
            self.tables = tuple(table[0] for table in self.rotary(x, grid))
        assert self.tables is not None
        return self.tables[0][positions], self.tables[1][positions]


class HFAttention(FoldedAttention):
    """FoldedAttention over a transformers cache: rows travel as one pseudo-head [B, 1, T, R]."""

    rotary: RotaryTable | None = None

    def run(
        self,
        x: Tensor,
        tables: Tables | None,
        mask: Tensor | None,
        past: Any,
        extra: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of x [B, T, D]: stores its rows in `past` and attends to all of them."""
        if extra.get("cache") is not None:
            raise ValueError(
                "transformers' continuous batching manages its own cache and would ignore the "
                "compressed one; use model.generate instead"
            )
        if isinstance(past, PagedRows):
            return past.attend(self, x, tables), None
        q, rows = self.project(x, tables)
        seen, offset, new = 0, 0, x.shape[1]
        if past is not None:
            seen = past.get_seq_length(self.layer_idx)
            offset = past.get_mask_sizes(new, self.layer_idx)[1]
            empty = rows.new_empty(*rows.shape[:2], 0)
            rows = past.update(rows[:, None], empty[:, None], self.layer_idx)[0][:, 0]
        view_tables = None
        if self.spec.keys == "pre" and self.rotary is not None:
            positions = self._positions(extra.get("position_ids"), seen + new, offset, rows)
            cos, sin = self.rotary(x, positions, int(offset) + rows.shape[1])
            view_tables = cos[:, None], sin[:, None]
        view = RowView(rows=rows, tables=view_tables, mask=mask)
        eager = self.config._attn_implementation == "eager"
        return self.attend(q, view, need_weights=eager)

    def _positions(
        self, position_ids: Tensor | None, length: int, offset: int, rows: Tensor
    ) -> Tensor:
        """RoPE positions [B or 1, S] of the cached slots: slots less the left padding."""
        slots = torch.arange(rows.shape[1], device=rows.device)[None] + offset
        if position_ids is None:
            return slots
        padding = (length - 1) - position_ids[:, -1:]
        if bool((padding < 0).any()):
            raise ValueError(
                f"position_ids reach {int(position_ids.max())} but the cache holds {length} tokens;"
                " keys are rebuilt from cache slots, so the cache must be contiguous: pass the "
                "whole sequence in order, left-padded if batched"
            )
        return (slots - padding).clamp(min=0)


class Family(ABC):
    """What differs between model families. Subclasses fill in the class variables and methods."""

    model_types: ClassVar[tuple[str, ...]]
    folded: ClassVar[dict[str, type[HFAttention]]]  # model type -> folded attention class
    attention_name: ClassVar[str] = "self_attn"
    rope: ClassVar[bool] = True
    key_norm: ClassVar[bool] = False

    @classmethod
    def geometry(cls, config: Any) -> Geometry:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return Geometry(
            hidden_size=config.hidden_size,
            num_query_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            num_layers=config.num_hidden_layers,
            rope=cls.rope,
            key_norm=cls.key_norm,
            scaling=head_dim**-0.5,
        )

    @classmethod
    def layers(cls, model: Any) -> Any:
        return model.model.layers

    @classmethod
    def rotary(cls, model: Any) -> nn.Module | None:
        return model.model.rotary_emb

    @classmethod
    @abstractmethod
    def projections(cls, attention: Any, geometry: Geometry) -> Projections:
        """fp64 copies of a layer's q, k, v and o weights."""

    @classmethod
    def norms(cls, attention: Any) -> dict[str, Tensor]:
        """Parameters that a folded attention takes over unchanged, by name."""
        return {}

    @classmethod
    def attentions(cls, model: Any) -> Iterator[nn.Module]:
        for layer in cls.layers(model):
            yield getattr(layer, cls.attention_name)

    @classmethod
    def swap(cls, model: Any, spec: CacheSpec, index: int) -> HFAttention:
        """Put an empty folded attention into layer `index`, on torch's current default device."""
        config = model.config
        folded = cls.folded[config.model_type](config, spec.geometry, spec.layers[index], index)
        layer = cls.layers(model)[index]
        folded.train(layer.training)
        setattr(layer, cls.attention_name, folded)
        return folded

    @classmethod
    def connect(cls, model: Any) -> None:
        """Give every folded layer the model's shared RoPE tables (not a submodule)."""
        rotary = cls.rotary(model)
        if rotary is None:
            return
        table = RotaryTable(rotary, rope_type(model.config))
        for attention in cls.attentions(model):
            if isinstance(attention, HFAttention):
                attention.rotary = table


def linear(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return module.weight, module.bias
