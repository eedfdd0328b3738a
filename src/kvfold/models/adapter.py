"""The interface to transformers: what a model family defines, and attention over a transformers
cache.

Shapes: B batch, T new tokens, S cached tokens, D width, Hq / Hk query / KV heads, d head dim; R
numbers of a cache entry.
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
# Hidden states [B, T, D], and a residual that is still to be added to them.
Residual = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Projections:
    """The weights of an attention layer, as x @ w.T + b: q [Hq d, D], k, v [Hk d, D], o [D, Hq
    d]."""

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
        """fp64 copies of the (weight, bias or None) of q, k, v and o."""
        named = {}
        for name, (weight, bias) in linears.items():
            named[name] = weight.detach().double()
            bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
            named[f"{name}_bias"] = bias.double()
        return cls(**named)


@dataclass(eq=False)
class CacheContext(AttentionContext):
    """Attention over a transformers cache, which stores the entries of a layer as one head
    [B, 1, T, R].

    past: the cache, or None.
    mask: as in `ops.common.attention`.
    position_ids: int [B, T] of the new tokens, or None.
    x: RoPE tables get its dtype and device.
    need_weights: keep the attention weights in `weights`.
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
        """RoPE positions [B, T] of the new tokens: `position_ids`, else their slots in the
        cache."""
        positions = self.position_ids
        if positions is None:
            start = 0 if self.past is None else int(self.past.get_seq_length(index))
            positions = torch.arange(start, start + rows.shape[1], device=rows.device)[None]
        return positions.to(rows.device).expand(rows.shape[:2])

    def _updated(
        self, index: int, rows: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Store the new entries in the cache. Returns the entries of all tokens [B, S, R], and
        their positions [B, S] or None. The cache stores positions as the tokens' values."""
        if positions is not None:
            check_exact(self.past, index, "a model compressed with recipe 'swift'")
        new = entries_of(rows, positions)
        fit_static(self.past, index, *new)
        stored, stored_positions = self.past.update(*new, index)
        return stored[:, 0], None if positions is None else positions_of(stored_positions[:, 0])


class HFAttention(FoldedAttention):
    """FoldedAttention with a forward that transformers can call."""

    def run(
        self,
        x: Tensor,
        tables: Tables | None,
        mask: Tensor | None,
        past: Any,
        extra: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of x [B, T, D].

        past: the cache (or `cache` in `extra`, its newer name): a transformers cache, or an
            attention context in its place.

        Returns outputs [B, T, D], and attention weights if attention is eager.
        """
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
        layer = self.description
        context.before_attention(layer, x)
        q, rows = self.project(x, tables)
        heads = context.attend(layer, q, rows)
        out = self.o_proj(heads) if self.output is None else self.output(heads)
        return out, context.weights


def decoder_of(model: Any) -> Any:
    """The part of a causal LM that returns the last hidden states. Some types do not name it as
    their base model. Raises SettingError for a model that has none."""
    base = model.base_model
    decoder = getattr(model, "model", None) if base is model else base
    if decoder is None:
        raise SettingError(
            f"`model` is a {type(model).__name__}, which names no decoder of its own: give the"
            " language model inside it"
        )
    return decoder


class Family:
    """How a model family differs from the default. Subclasses override class variables and methods.

    model_types: `config.model_type` of its models.
    folded: model type -> folded attention class.
    attention_name: attribute of a decoder layer that holds its attention.
    plain_weight: name of a tensor of the original attention that the folded one does not have.
    output_name: attribute of the attention that holds the output projection.
    gated: attribute of a decoder layer that holds its MLP, if the MLP computes down(act(gate(x)) *
        up(x)) with `gate_proj`, `up_proj`, `down_proj` and `act_fn`. The engine then merges gate
        and up.
    finish: computes everything in a decoder layer after its attention, from the layer, its inputs
        and the attention output. Set it if the attention's input is `layer.input_layernorm(inputs)`
        and the last layer is followed by `norm`; the engine then compiles what lies between the
        attention of two layers as one graph.
    rope: the model has RoPE.
    key_norm: keys are normalised after W_K (as in Qwen3), so W_K cannot absorb key projections.
    sinks: the softmax includes a learned score per head (attention sink).
    not_in_gguf: what transformers does not read from a GGUF file of this family, as a phrase for
        users.
    layer_names: names of the layers that are compressed, if others are not.
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
    sinks: ClassVar[bool] = False
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
        """Sliding window of each layer in tokens, the query's own included (None: full
        attention)."""
        return attention_windows(config)

    @classmethod
    def unmeasured_attentions(cls, model: Any) -> Iterator[nn.Module]:
        """Attention modules that stay uncompressed, so nothing is measured of them."""
        return iter(())

    @classmethod
    def scaling(cls, config: Any, head_dim: int) -> float:
        """The factor of scores q k."""
        return head_dim**-0.5

    @classmethod
    def softcap(cls, config: Any) -> float | None:
        """The cap of scaled scores, as in `Geometry.softcap`."""
        return None

    @classmethod
    def logits(cls, model: Any, hidden: Tensor) -> Tensor:
        """Logits [.., V] of last hidden states [.., D] (after the final norm)."""
        logits: Tensor = model.get_output_embeddings()(hidden)
        return logits

    @classmethod
    def layers(cls, model: Any) -> Any:
        return model.model.layers

    @classmethod
    def rotary(cls, model: Any) -> nn.Module | None:
        return model.model.rotary_emb

    @classmethod
    def rotaries(cls, model: Any) -> list[nn.Module]:
        """All modules that compute RoPE tables."""
        rotary = cls.rotary(model)
        return [] if rotary is None else [rotary]

    @classmethod
    def rope_tables(cls, model: Any, tokens: int) -> tuple[Tables | None, float]:
        """RoPE tables of the first positions, cos and sin fp32 [1, tokens, .], and the square of
        their scaling; (None, 1) if keys are taken without RoPE."""
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
        """`rope_tables` per layer, and the order of a key's numbers in which pairs are (i, i + w /
        2): int64 [d], or None for their own order. places int64 [1, tokens]: the positions of the
        model's tokens."""
        return [(*cls.rope_tables(model, places.shape[1]), None)] * layers

    @classmethod
    def projections(cls, attention: Any, geometry: Geometry) -> Projections:
        """fp64 copies of a layer's q, k, v and o weights."""
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": cls.output_name}
        return Projections.of(**{x: linear(getattr(attention, name)) for x, name in names.items()})

    @classmethod
    def norms(cls, attention: Any) -> dict[str, Tensor]:
        """Parameters that the folded attention takes over unchanged (such as q_norm and k_norm), by
        name."""
        return {}

    @classmethod
    def attentions(cls, model: Any) -> Iterator[nn.Module]:
        for layer in cls.layers(model):
            yield getattr(layer, cls.attention_name)

    @classmethod
    def swap(cls, model: Any, spec: CacheSpec, index: int) -> HFAttention:
        """Replace the attention of layer `index` by an empty folded one, on torch's current default
        device."""
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
