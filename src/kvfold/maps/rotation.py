"""Find out how a model's layers rotate keys (RoPE), by two short forwards at different positions.

Attention returns zeros in both, so hidden states are equal and keys differ by their rotation alone.
A candidate rotation is accepted if keys unrotated by it are equal. Nothing about the model's family
is known.

Shapes: B batch, T tokens; d numbers of a key, of which w are rotated in pairs.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.maps.layers import TOKENS, AttentionLayer, attention_layers
from kvfold.models.rotary import LONG_ROPE, position_limit
from kvfold.ops.common.attention import Tables, rotate
from kvfold.utils.errors import SettingError

LATER_POSITION = 1021  # first position of the second forward, if the model allows it
REMEDY = "use recipe 'swift', which stores keys as attention gets them"


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE of one layer.

    inv_freq fp32 [w / 2]: angles per position; all 0 if the layer does not rotate.
    order int64 [d]: first numbers of all pairs, then their second numbers, then the numbers that
        are not rotated. In this order pairs are (i, i + w / 2), as kernels expect, however the
        model pairs its numbers.

    The factor of scaled tables (YaRN) is not included: keys before RoPE contain it.
    """

    inv_freq: Tensor
    order: Tensor
    rotates: bool = field(init=False)
    reorders: bool = field(init=False)
    attention_scaling = 1.0

    def __post_init__(self) -> None:
        """Compute the flags once, because code traced by torch.compile cannot read a tensor."""
        object.__setattr__(self, "rotates", bool(self.inv_freq.any()))
        object.__setattr__(self, "reorders", bool((self.order.diff() != 1).any()))

    def __call__(self, like: Tensor, positions: Tensor) -> Tables:
        """cos, sin [.., w] at positions [..], in the dtype of `like`, as a model's rotary module
        returns them. Angles are fp32, as there."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def to(self, device: torch.device) -> "Rotation":
        if device == self.order.device:
            return self
        return Rotation(self.inv_freq.to(device), self.order.to(device))

    def ordered(self, x: Tensor) -> Tensor:
        """Keys or queries [.., d], with the numbers in `order`."""
        return x[..., self.order] if self.reorders else x

    def unrotated(self, k: Tensor, positions: Tensor) -> Tensor:
        """Undo RoPE: keys [.., T, d] at positions [.., T], as attention gets them, become keys
        before RoPE in `order`. Computes in fp32 or wider."""
        k, dtype = self.ordered(k), torch.promote_types(k.dtype, torch.float32)
        if not self.rotates:
            return k
        cos, sin = self(k.new_empty(0, dtype=dtype), positions)
        return rotate(k.to(dtype), cos, sin, sign=-1).to(k.dtype)

    def rotated(self, k: Tensor, positions: Tensor) -> Tensor:
        """Inverse of `unrotated`; keys stay in `order`."""
        return rotate(k, *self(k, positions)) if self.rotates else k


def no_rotation(head_dim: int, device: torch.device) -> Rotation:
    """The rotation of a layer without RoPE."""
    order = torch.arange(head_dim, device=device)
    return Rotation(torch.zeros(head_dim // 2, device=device), order)


def find_rotations(
    model: Any, layers: Sequence[AttentionLayer], names: Collection[str] | None = None
) -> dict[str, Rotation]:
    """The rotation of each layer in `names` (None: all), by name. Layers with equal RoPE share an
    object.

    layers: from `attention_layers`.

    Raises SettingError that names the layer if its rotation is not in pairs, or depends on the
    sequence length.
    """
    candidates = _Candidates(model)
    rotations: dict[str, Rotation] = {}
    for layer, later in zip(layers, _later_layers(model), strict=True):
        if names is None or layer.name in names:
            rotations[layer.name] = _chosen(model, candidates, layer, later)
    return rotations


def check_rotations(
    model: Any, layers: Sequence[AttentionLayer], rotations: Mapping[str, Rotation]
) -> None:
    """Raises SettingError if a model rotates keys differently from its maps.

    layers: from `attention_layers`.
    rotations: of the maps, by layer name.
    """
    if not rotations:
        return
    for layer, later in zip(layers, _later_layers(model), strict=True):
        rotation = rotations.get(layer.name)
        if rotation is None:
            continue
        if rotation.rotates:
            _check_known(model, layer)
        elif not torch.equal(layer.values, later.values):
            continue  # positions are embedded with tokens
        if not _coincide(rotation.to(layer.keys.device), layer, later):
            raise SettingError(
                f"`maps`: {layer.name} rotates keys by other angles than when its maps were made"
                " (rope_theta or a scaling of RoPE): load the model as it was then, or compress"
                " it again"
            )


class _Candidates:
    """Candidate rotations from the `inv_freq` buffers of a model's rotary modules, by key width and
    device."""

    def __init__(self, model: Any) -> None:
        self.frequencies: list[Tensor] = []
        for name, buffer in model.named_buffers():
            last = name.rpartition(".")[2]
            if last.endswith("inv_freq") and "original" not in last and buffer.dim() == 1:
                self._add(buffer.detach().float())
        self._by_width: dict[tuple[int, torch.device], list[Rotation]] = {}

    def _add(self, inv_freq: Tensor) -> None:
        if not any(torch.equal(inv_freq, x) for x in self.frequencies):
            self.frequencies.append(inv_freq)

    def of(self, layer: AttentionLayer) -> list[Rotation]:
        """Candidates for a layer: no rotation first, then pairs by halves and by neighbours, in
        both directions."""
        key = layer.head_dim, layer.keys.device
        if key not in self._by_width:
            self._by_width[key] = [no_rotation(*key), *self._pairs(*key)]
        return self._by_width[key]

    def _pairs(self, head_dim: int, device: torch.device) -> Iterator[Rotation]:
        numbers = torch.arange(head_dim, device=device)
        for inv_freq in self.frequencies:
            half, w = len(inv_freq), 2 * len(inv_freq)
            if w > head_dim:
                continue
            halves, neighbours = numbers[:w].view(2, half), numbers[:w].view(half, 2).mT
            for pairs in (halves, neighbours, halves.flip(0), neighbours.flip(0)):
                order = torch.cat((pairs.flatten(), numbers[w:]))
                yield Rotation(inv_freq.to(device), order)


def _later_layers(model: Any) -> list[AttentionLayer]:
    """The attention layers of a model, probed at later positions."""
    most = position_limit(model.config) or LATER_POSITION
    return attention_layers(
        model, torch.arange(TOKENS) + max(1, min(LATER_POSITION, most - TOKENS))
    )


def _chosen(
    model: Any, candidates: _Candidates, layer: AttentionLayer, later: AttentionLayer
) -> Rotation:
    """The rotation of one layer. other: the same layer, probed at later positions."""
    none, *rotations = candidates.of(layer)
    if _coincide(none, layer, later):
        return none
    if not candidates.frequencies and not torch.equal(layer.values, later.values):
        return none  # positions are embedded with tokens
    _check_known(model, layer)
    chosen = next((x for x in rotations if _coincide(x, layer, later)), None)
    if chosen is None:
        raise SettingError(
            f"{layer.name} does not rotate its keys in pairs by angles of its position alone, so"
            f" keys before RoPE cannot be stored: {REMEDY}"
        )
    return chosen


def _check_known(model: Any, layer: AttentionLayer) -> None:
    """Raises SettingError if the rotation of a token does not follow from its position."""
    if kind := next((x for x in _rope_types(model) if x in LONG_ROPE), None):
        raise SettingError(
            f"{layer.name} rotates keys by rope_type {kind!r}, whose angles depend on how long a"
            f" sequence is, so keys before RoPE cannot be stored: {REMEDY}"
        )
    if layer.positions is None:
        raise SettingError(
            f"{layer.name} does not tell attention at which positions it rotated keys"
            f" (`position_ids`), so keys before RoPE cannot be stored: {REMEDY}"
        )


def _rope_types(model: Any) -> list[str]:
    """The rope_type of every set of RoPE parameters in a model's config."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    parameter_sets = [parameters, *(x for x in parameters.values() if isinstance(x, dict))]
    return [x["rope_type"] for x in parameter_sets if "rope_type" in x]


def _coincide(rotation: Rotation, layer: AttentionLayer, later: AttentionLayer) -> bool:
    """Whether the keys of a layer before RoPE are the same in both forwards, in each number."""
    keys = []
    for x in (layer, later):
        positions = x.positions
        if positions is None:
            positions = torch.zeros(TOKENS, dtype=torch.int64, device=x.keys.device)
            if rotation.rotates:
                return False
        keys.append(rotation.unrotated(x.keys, positions.view(-1)).float().flatten(0, 1))
    first, second = keys
    half = len(rotation.inv_freq)
    size = first.square().sum(0)
    size[: 2 * half] = (size[:half] + size[half : 2 * half]).repeat(2)
    near = max(1e-4, 8 * torch.finfo(layer.keys.dtype).eps)
    return bool(((first - second).square().sum(0) <= near**2 * size).all())
