"""A model family built from a probe of a model's attention layers, for models without one in
`models.families`."""

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
    """The family of one model, for calibration and planning. Subclasses made by `attention_family`
    set:

    compressed: attention layers with the same heads that get maps.
    uncompressed: other attention layers.
    rotations: RoPE of each layer, if keys are taken before RoPE; else keys are taken as attention
        gets them.
    """

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
        """The decoder layers of the model, uncompressed ones included."""
        names = dict.fromkeys(
            x.name.rpartition(".")[0] for x in (*cls.compressed, *cls.uncompressed)
        )
        return [model.get_submodule(name) for name in names]

    @classmethod
    def rotary(cls, model: Any) -> nn.Module | None:
        """The first module that computes RoPE tables, found by its class name."""
        return next(iter(cls.rotaries(model)), None)

    @classmethod
    def rotaries(cls, model: Any) -> list[nn.Module]:
        modules = model.base_model.modules()
        return [x for x in modules if type(x).__name__.endswith("RotaryEmbedding")]

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
                layer_tables = rotation(like, places.to(like.device)) if rotation.rotates else None
                tables[rotation] = layer_tables
        rotations = (cls.rotations[layer.name] for layer in cls.compressed)
        return [(tables[x], 1.0, x.order if x.reorders else None) for x in rotations]

    @classmethod
    def projections(cls, attention: Any, geometry: Geometry) -> Projections:
        """Weights are unknown here, so all attention outputs count equally (an identity output
        projection)."""
        width = geometry.num_query_heads * geometry.head_dim
        device = cls.compressed[0].keys.device
        empty = torch.zeros(0, geometry.hidden_size, device=device), None
        identity = torch.eye(width, device=device), None
        return Projections.of(q=empty, k=empty, v=empty, o=identity)

    @classmethod
    def logits(cls, model: Any, hidden: Tensor) -> Tensor:
        """Logits by the model's own forward, whose base model is replaced by one that returns
        `hidden`. OPT calls the decoder inside its base model, so that is replaced too."""
        sequence = hidden.reshape(1, -1, hidden.shape[-1])

        def hidden_states(*_: Any, **__: Any) -> _Hidden:
            return _Hidden(sequence)

        base, inner = decoder_of(model), model.get_decoder()
        if all(x is not inner for x in base.modules()):  # ModernBERT calls its head so
            inner = base
        with replaced_forward(base, hidden_states), replaced_forward(inner, hidden_states):
            out: Tensor = model(inputs_embeds=sequence, use_cache=False).logits
        return out.view(*hidden.shape[:-1], out.shape[-1])


class _Hidden:
    """Output of a base model that has only last hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


def attention_family(
    layers: Sequence[AttentionLayer],
    rotations: Mapping[str, Rotation] | None = None,
    uncompressed: Sequence[AttentionLayer] = (),
) -> type[Family]:
    """Create the family of a model with these attention layers, which have the same heads.

    rotations: RoPE by layer name, if keys are taken before RoPE.
    uncompressed: attention layers that stay uncompressed.
    """
    names = {
        "compressed": list(layers),
        "uncompressed": list(uncompressed),
        "rotations": rotations or {},
        "sinks": any(layer.sinks is not None for layer in layers),
        "layer_names": tuple(layer.name for layer in layers) if uncompressed else None,
    }
    return type("ModelsFamily", (AttentionFamily,), names)


def check_alike(layers: Sequence[AttentionLayer]) -> None:
    """Raises SettingError for layers that one plan cannot describe: with different heads, or
    sharing another layer's keys and values."""
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
