"""The meeting point with transformers: what a family must say of itself, and the cache view.

Shapes: B batch, T new tokens, S cached tokens, D width, Hq / Hk query / KV heads, d head dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.layout import CacheSpec, Geometry
from kvfold.models.folded import FoldedAttention, attention_windows
from kvfold.models.positions import check_exact, entries_of, fit_static, positions_of
from kvfold.models.rotary import RotaryTable, rope_type
from kvfold.ops.common.attention import Tables
from kvfold.utils.errors import SettingError

# transformers makes no mask for an attention without a registered mask function.
PAGED = "kvfold_paged"
# Hidden states [B, T, D], and what is yet to be added to them.
Residual = tuple[Tensor, Tensor]


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


@dataclass(eq=False)
class CacheContext(AttentionContext):
    """Attention over a transformers cache, where rows travel as one pseudo-head [B, 1, T, R].

    past: the cache, or None; mask as in `ops.common.attention`; position_ids int [B, T] of the new
    tokens, or None; x: of the dtype that tables of angles have; need_weights: keep `weights`.
    """

    past: Any
    mask: Tensor | None
    position_ids: Tensor | None
    x: Tensor
    need_weights: bool

    def attend(self, layer: LayerAttention, q: Tensor, rows: Tensor) -> Tensor:
        positions = None if layer.rope is None else self._positions(layer.index, rows)
        if self.past is not None:
            rows, positions = self._updated(layer.index, rows, positions)
        rope = None
        if layer.rope is not None and positions is not None:
            cos, sin = layer.rope.tables(self.x, positions, None)
            rope = cos[:, None], sin[:, None]
        out, self.weights = layer.attend(q, rows, rope, self.mask, self.need_weights)
        return out

    def _positions(self, index: int, rows: Tensor) -> Tensor:
        """RoPE positions [B, T] of the new tokens: those that the model was told, else the slots
        that the tokens take in the cache."""
        positions = self.position_ids
        if positions is None:
            start = 0 if self.past is None else int(self.past.get_seq_length(index))
            positions = torch.arange(start, start + rows.shape[1], device=rows.device)[None]
        return positions.to(rows.device).expand(rows.shape[:2])

    def _updated(
        self, index: int, rows: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """All token entries [B, S, R] of the cache, and their positions [B, S] if they have any,
        after it has stored the new ones; a cache takes positions for the tokens' values."""
        if positions is not None:
            check_exact(self.past, index, "a model compressed with recipe 'swift'")
        new = entries_of(rows, positions)
        fit_static(self.past, index, *new)
        stored, beside = self.past.update(*new, index)
        return stored[:, 0], None if positions is None else positions_of(beside[:, 0])


class HFAttention(FoldedAttention):
    """FoldedAttention as transformers calls it."""

    def run(
        self,
        x: Tensor,
        tables: Tables | None,
        mask: Tensor | None,
        past: Any,
        extra: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of x [B, T, D], whose rows `past`, or `cache` of what else came, stores: a
        transformers cache, or a context in its place. Outputs [B, T, D], and weights where
        attention is eager."""
        past = extra.get("cache", past)
        if not isinstance(past, Cache | AttentionContext | None):
            raise ValueError(
                "transformers' continuous batching manages its own cache and would ignore the "
                "compressed one; use model.generate instead"
            )
        if mask is not None and not isinstance(mask, Tensor):
            raise SettingError(
                f"a folded model takes masks as tensors, and {type(mask).__name__} is none: call"
                " model.set_attn_implementation('sdpa') or ('eager')"
            )
        context: Any = past
        if not isinstance(past, AttentionContext):
            eager = self.config._attn_implementation == "eager"
            context = CacheContext(past, mask, extra.get("position_ids"), x, eager)
        maps = self.maps
        context.before_attention(maps, x)
        q, rows = self.project(x, tables)
        found = context.attend(maps, q, rows)
        out = self.o_proj(found) if self.output is None else self.output(found)
        return out, context.weights


def decoder_of(model: Any) -> Any:
    """The part of a causal LM that gives last hidden states; some types name none as their base.
    Raises SettingError for a model that has none."""
    base = model.base_model
    found = getattr(model, "model", None) if base is model else base
    if found is None:
        raise SettingError(
            f"`model` is a {type(model).__name__}, which names no decoder of its own: give the"
            " language model inside it"
        )
    return found


class Family:
    """A model family, by its differences. Subclasses fill in the class variables and methods.

    gated: a layer's MLP, where it computes down(act(gate(x)) * up(x)) by `gate_proj`, `up_proj`,
    `down_proj` and `act_fn`. finish: all that follows a layer's attention, of the layer, its inputs
    and attention's output, where attention's inputs are `input_layernorm` of the layer's, and
    `norm` follows the last. plain_weight: a tensor of an attention that no folded one has.
    not_in_gguf: what of the model transformers does not read from a GGUF file, for users. part:
    names of the layers that are compressed, where others are left out.
    """

    model_types: ClassVar[tuple[str, ...]]
    folded: ClassVar[dict[str, type[HFAttention]]]  # model type -> folded attention class
    attention_name: ClassVar[str] = "self_attn"
    plain_weight: ClassVar[str] = "v_proj.weight"
    output_name: ClassVar[str] = "o_proj"
    gated: ClassVar[str | None] = None
    finish: ClassVar[Callable[..., Residual] | None] = None
    rope: ClassVar[bool] = True
    key_norm: ClassVar[bool] = False
    sinks: ClassVar[bool] = False  # a number of the layer's own stands beside every query's scores
    not_in_gguf: ClassVar[str | None] = None
    layer_names: ClassVar[tuple[str, ...] | None] = None

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
            scaling=cls.scaling(config, head_dim),
            softcap=cls.softcap(config),
        )

    @classmethod
    def windows(cls, config: Any) -> list[int | None]:
        """Tokens that a query of each layer sees, its own included; None: all."""
        return attention_windows(config)

    @classmethod
    def unmeasured_attentions(cls, model: Any) -> Iterator[nn.Module]:
        """Modules that call attention and that nothing is measured of."""
        return iter(())

    @classmethod
    def scaling(cls, config: Any, head_dim: int) -> float:
        """The factor of scores q k."""
        return head_dim**-0.5

    @classmethod
    def softcap(cls, config: Any) -> float | None:
        """The bound of scaled scores, in the sense of `Geometry.softcap`."""
        return None

    @classmethod
    def logits(cls, model: Any, hidden: Tensor) -> Tensor:
        """Logits [.., V] of last hidden states [.., D]: all that follows the last layer's norm."""
        found: Tensor = model.get_output_embeddings()(hidden)
        return found

    @classmethod
    def layers(cls, model: Any) -> Any:
        return model.model.layers

    @classmethod
    def rotary(cls, model: Any) -> nn.Module | None:
        return model.model.rotary_emb

    @classmethod
    def rotaries(cls, model: Any) -> list[nn.Module]:
        """All modules that make RoPE's tables."""
        rotary = cls.rotary(model)
        return [] if rotary is None else [rotary]

    @classmethod
    def rope_tables(cls, model: Any, tokens: int) -> tuple[Tables | None, float]:
        """RoPE of the first positions, cos and sin fp32 [1, tokens, .], and the square of its
        scaling; None, 1 where keys are taken as they stand."""
        rotary = cls.rotary(model)
        if rotary is None:
            return None, 1.0
        like = torch.empty(0, dtype=torch.float32, device=model.device)
        tables = rotary(like, torch.arange(tokens, device=like.device)[None])
        return tables, float(getattr(rotary, "attention_scaling", 1.0)) ** 2

    @classmethod
    def layer_rope_tables(
        cls, model: Any, places: Tensor, layers: int
    ) -> list[tuple[Tables | None, float, Tensor | None]]:
        """The same of every layer, and the order of a key's numbers in which pairs are
        (i, i + w / 2): int64 [d], or None where that is their own. places int64 [1, tokens]: the
        positions that the model rotates by now."""
        return [(*cls.rope_tables(model, places.shape[1]), None)] * layers

    @classmethod
    def projections(cls, attention: Any, geometry: Geometry) -> Projections:
        """fp64 copies of a layer's q, k, v and o weights."""
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": cls.output_name}
        return Projections.of(**{x: linear(getattr(attention, name)) for x, name in names.items()})

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
