"""What compression asks of a model's family, of any model: what its layers ask of attention."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvfold.layout import Geometry
from kvfold.maps.layers import AttentionLayer
from kvfold.maps.rotation import Rotation
from kvfold.models.adapter import Family, Projections, decoder_of
from kvfold.models.devices import replaced_forward
from kvfold.ops.common.attention import Tables
from kvfold.utils.errors import SettingError


class AttentionFamily(Family):
    """Of one model, whose layers `found` call attention and are alike in their heads; layers
    `left` call it, too. Keys are taken as attention gets them, or before RoPE where `rotations` say
    how each layer rotates them."""

    compressed: ClassVar[list[AttentionLayer]]
    uncompressed: ClassVar[list[AttentionLayer]]
    rotations: ClassVar[Mapping[str, Rotation]] = {}
    key_norm = True  # nothing is known of what keys were made from

    @classmethod
    def geometry(cls, config: Any) -> Geometry:
        first = cls.compressed[0]
        text = config.get_text_config()
        return Geometry(
            hidden_size=text.hidden_size,
            num_query_heads=first.num_query_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            num_layers=len(cls.compressed),
            rope=True,
            key_norm=True,
            scaling=first.head_dim**-0.5 if first.scaling is None else first.scaling,
            softcap=first.softcap,
            value_dim=None if first.value_dim == first.head_dim else first.value_dim,
        )

    @classmethod
    def windows(cls, config: Any) -> list[int | None]:
        return [layer.window for layer in cls.compressed]

    @classmethod
    def unmeasured_attentions(cls, model: Any) -> Iterator[nn.Module]:
        return (layer.module for layer in cls.uncompressed)

    @classmethod
    def attentions(cls, model: Any) -> Iterator[nn.Module]:
        return (layer.module for layer in cls.compressed)

    @classmethod
    def layers(cls, model: Any) -> Any:
        """Of the model, those that are left included."""
        names = dict.fromkeys(
            x.name.rpartition(".")[0] for x in (*cls.compressed, *cls.uncompressed)
        )
        return [model.get_submodule(name) for name in names]

    @classmethod
    def rotary(cls, model: Any) -> nn.Module | None:
        """The first module that makes RoPE's tables, by its name."""
        return next(iter(cls.rotaries(model)), None)

    @classmethod
    def rotaries(cls, model: Any) -> list[nn.Module]:
        each = model.base_model.modules()
        return [x for x in each if type(x).__name__.endswith("RotaryEmbedding")]

    @classmethod
    def rope_tables(cls, model: Any, tokens: int) -> tuple[Tables | None, float]:
        return None, 1.0

    @classmethod
    def layer_rope_tables(
        cls, model: Any, places: Tensor, layers: int
    ) -> list[tuple[Tables | None, float, Tensor | None]]:
        if not cls.rotations:
            return super().layer_rope_tables(model, places, layers)
        tables: dict[Rotation, Tables | None] = {}  # layers that rotate alike share one
        for layer in cls.compressed:
            rotation = cls.rotations[layer.name]
            if rotation not in tables:
                like = rotation.inv_freq
                found = rotation(like, places.to(like.device)) if rotation.rotates else None
                tables[rotation] = found
        each = (cls.rotations[layer.name] for layer in cls.compressed)
        return [(tables[x], 1.0, x.order if x.reorders else None) for x in each]

    @classmethod
    def projections(cls, attention: Any, geometry: Geometry) -> Projections:
        """Nothing is known of the weights: all that attention gives counts alike."""
        width = geometry.num_query_heads * geometry.head_dim
        device = cls.compressed[0].keys.device
        none = torch.zeros(0, geometry.hidden_size, device=device), None
        alike = torch.eye(width, device=device), None
        return Projections.of(q=none, k=none, v=none, o=alike)

    @classmethod
    def logits(cls, model: Any, hidden: Tensor) -> Tensor:
        """By the model's own forward, in which its base gives these hidden states; that of OPT
        calls the decoder inside its base."""
        flat = hidden.reshape(1, -1, hidden.shape[-1])

        def hidden_states(*_: Any, **__: Any) -> _Hidden:
            return _Hidden(flat)

        base, inner = decoder_of(model), model.get_decoder()
        if all(x is not inner for x in base.modules()):  # ModernBERT calls its head so
            inner = base
        with replaced_forward(base, hidden_states), replaced_forward(inner, hidden_states):
            found: Tensor = model(inputs_embeds=flat, use_cache=False).logits
        return found.view(*hidden.shape[:-1], found.shape[-1])


class _Hidden:
    """What a base model gives: last hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


def attention_family(
    layers: Sequence[AttentionLayer],
    rotations: Mapping[str, Rotation] | None = None,
    left: Sequence[AttentionLayer] = (),
) -> type[Family]:
    """The family of a model with these layers, alike in their heads. rotations: of them by name,
    where keys are taken before RoPE; left: layers that stay as they are."""
    names = {
        "compressed": list(layers),
        "uncompressed": list(left),
        "rotations": rotations or {},
        "sinks": any(layer.sinks is not None for layer in layers),
        "layer_names": tuple(layer.name for layer in layers) if left else None,
    }
    return type("ModelsFamily", (AttentionFamily,), names)


def check_alike(layers: Sequence[AttentionLayer]) -> None:
    """Raises SettingError for layers that no one plan describes: with unlike heads, or that read
    the keys and values of others."""
    first = layers[0]
    for layer in layers:
        if layer.source != layer.name:
            raise SettingError(
                f"{layer.name} reads the keys and values of {layer.source}, which the engine does"
                " not know: use kvfold.attach and transformers, or vLLM"
            )
        if layer.shape != first.shape:
            raise SettingError(
                f"{layer.name} has attention of another shape (query heads, KV heads, key and value"
                f" width, cap) than {first.name}: {layer.shape} and {first.shape}; the engine"
                " serves layers alike: use kvfold.attach and transformers, or vLLM"
            )
