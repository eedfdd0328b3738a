"""Sidecar: a folder with maps for a model, next to its checkpoint.

`kvfold.json` holds the plan, how it was made, and a fingerprint of the base model's keys and
values; `kvfold.safetensors` holds the maps by layer; `README.md` is for people. A published sidecar
fits every copy of its base model: in another dtype, quantised, or with a LoRA.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvfold.hub import card, download
from kvfold.layout import CacheSpec, LayerSpec
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import AttentionLayer, attention_layers, check_layers
from kvfold.maps.rope_maps import RopeMaps
from kvfold.maps.rotation import Rotation, check_rotations
from kvfold.utils.errors import SettingError
from kvfold.utils.files import new_directory, writing
from kvfold.utils.text import json_object, read_text

FORMAT = 1
ROPE_FORMAT = 2  # with layers whose keys are stored before RoPE, which others would misread
PLAN, TENSORS, CARD = "kvfold.json", "kvfold.safetensors", "README.md"
FILES = (PLAN, TENSORS, CARD)
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
PROBES = 8  # numbers of the fingerprint of a layer's keys, and of its values
# Largest relative difference of keys or values, for the median layer and for any layer. Rounding
# errors grow with depth: SmolLM2 in 4 bits differs by .2 to .4 in half of its layers and by .8 in
# the last. Another model differs by more than 1, values of the wrong sign by 2.
NEAR, FAR = 0.5, 1.2
_BROKEN = (AttributeError, LookupError, TypeError, ValueError)  # raised while a bad plan is read


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The maps of a model.

    maps: by module name.
    spec: what these layers store, in the same order.
    base: fingerprints (`probes`) of the layers of the base model, by module name.
    provenance: how the maps were made.
    """

    maps: Mapping[str, Maps]
    spec: CacheSpec
    base: Mapping[str, Sequence[float]]
    provenance: Mapping[str, Any]

    def save(self, folder: Path | str) -> None:
        """Write a new folder, or nothing if that fails. Raises ValueError if the folder cannot be
        created, and OSError if the disk is full."""
        with new_directory(Path(folder)) as scratch:
            self.write(scratch, Path(folder))

    def write(self, folder: Path, name: Path) -> None:
        """Write the files into an existing folder. name: of the final folder, for errors."""
        with writing(name):
            self._write(folder)

    def _write(self, folder: Path) -> None:
        tensors = {
            f"{name}.{part}": _smallest(tensor)
            for name, layer_maps in self.maps.items()
            for part, tensor in layer_maps.tensors().items()
        }
        save_file(tensors, folder / TENSORS)
        plan = {
            "format": ROPE_FORMAT if self.rotations else FORMAT,
            "cache": self.spec.to_dict(),
            "layers": list(self.maps),
            "base": {name: list(x) for name, x in self.base.items()},
            "provenance": dict(self.provenance),
            "sha256": _sha256(folder / TENSORS),
        }
        plan["digest"] = _digest(plan)
        (folder / PLAN).write_text(json.dumps(plan, indent=1), encoding="utf-8")
        (folder / CARD).write_text(self.readme(), encoding="utf-8")

    def readme(self) -> str:
        """The model card (Markdown with hub metadata)."""
        return card.maps_text(self.spec, dict(self.provenance))

    @classmethod
    def load(cls, name: Path | str) -> Self:
        """Load a folder, or a hub repository "USER/NAME" or "USER/NAME@REVISION". Raises
        SettingError for a folder without a complete sidecar, and for one that cannot be read."""
        folder = folder_of(name)
        if missing := [x for x in (PLAN, TENSORS) if not (folder / x).is_file()]:
            raise SettingError(
                f"`maps` must be a folder with {PLAN} and {TENSORS}, or the hub id of one,"
                f" USER/NAME; {name} has no {' and no '.join(missing)}"
            )
        try:
            plan = json_object(read_text(folder / PLAN))
        except ValueError as error:
            raise _damaged(name, error) from None
        if plan.get("format") not in (FORMAT, ROPE_FORMAT):
            raise SettingError(
                f"`maps`: {PLAN} of {name} has format {plan.get('format')!r}, this kvfold reads"
                f" {FORMAT} and {ROPE_FORMAT}: install the kvfold that made it, or compress again"
            )
        if plan.get("digest") not in (None, _digest(plan)):
            raise _damaged(name, f"{PLAN} is not as it was written")
        if plan.get("sha256") not in (None, _sha256(folder / TENSORS)):
            raise _damaged(name, f"{TENSORS} is not the one that {PLAN} was written with")
        try:
            spec = CacheSpec.from_dict(plan["cache"])
            if len(spec.layers) != len(plan["layers"]):
                raise KeyError(f"{len(plan['layers'])} maps for {len(spec.layers)} layers")
            layers = dict(zip(plan["layers"], spec.layers, strict=True))
            tensors = {x: tensor.float() for x, tensor in load_file(folder / TENSORS).items()}
            maps = {name: _maps(name, layer, tensors) for name, layer in layers.items()}
            sidecar = cls(maps=maps, spec=spec, base=plan["base"], provenance=plan["provenance"])
            sidecar.readme()  # which reads what `provenance` says
            return sidecar
        except (*_BROKEN, OSError, SafetensorError) as error:
            raise _damaged(name, error) from None

    def check_config(self, config: Any) -> None:
        """Raises SettingError if the sizes in a config differ from those of the base model. `check`
        compares models exactly, once weights are loaded."""
        sizes = sizes_of(config)
        for name, expected in self.provenance.get("sizes", {}).items():
            if expected != sizes.get(name, expected):
                raise SettingError(
                    f"`maps` were made for {self.source}, whose {name} is {expected}; this model's"
                    f" is {sizes[name]}: take the maps of this model"
                )

    @property
    def source(self) -> str:
        """Name of the model that the maps were made for."""
        return str(self.provenance.get("model", "another model"))

    def layers_of(self, model: Any) -> list[AttentionLayer]:
        """The attention layers of a model, after checking that the model can have maps and that
        these maps fit it. Raises SettingError."""
        layers = attention_layers(model)
        check_layers(model, layers)
        self.check(layers)
        check_rotations(model, layers, self.rotations)
        return layers

    @property
    def rotations(self) -> dict[str, Rotation]:
        """Rotations of the layers whose keys are stored before RoPE, by name."""
        items = self.maps.items()
        return {name: x.rotation for name, x in items if isinstance(x, RopeMaps)}

    def check(self, layers: Sequence[AttentionLayer]) -> None:
        """Raises SettingError if a model's attention layers are not those that the maps were made
        for."""
        by_name = {layer.name: layer for layer in layers}
        if missing := [name for name in self.maps if name not in by_name]:
            headless = missing[0].endswith(f".{layers[0].name}")
            raise SettingError(
                f"`maps` were made for a layer {missing[0]} that calls attention, and this model"
                f" has none of that name but {layers[0].name}: "
                + (
                    "attach them to the model with its head, which holds this one"
                    if headless
                    else "take the maps of this model"
                )
            )
        for name, layer_maps in self.maps.items():
            layer = by_name[name]
            expected = (layer_maps.num_heads, layer_maps.head_dim, layer_maps.value_mean.shape[1])
            actual = (layer.num_kv_heads, layer.head_dim, layer.value_dim)
            if expected != actual:
                raise SettingError(
                    f"`maps` of {name} are of {expected[0]} KV heads with {expected[1]} and"
                    f" {expected[2]} numbers of keys and values; this model's has {actual[0]},"
                    f" {actual[1]}, {actual[2]}: take the maps of this model"
                )
        if more := [name for name in by_name if name not in self.base]:
            raise SettingError(
                f"`maps` were made without {more[0]}, an attention layer of this model: take the"
                " maps of this model"
            )
        self.check_base({name: (layer.keys, layer.values) for name, layer in by_name.items()})

    def check_base(self, keys_and_values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Raises SettingError if keys and values are not those of the base model.

        keys_and_values: keys [Hk, T, d] and values [Hk, T, dv] by layer name, for the tokens
            `probe_ids`, with attention outputs of zero.
        """
        expected = torch.tensor([list(self.base[name]) for name in keys_and_values])
        actual = torch.stack([probes(*pair) for pair in keys_and_values.values()])
        difference = (actual - expected).unflatten(1, (2, -1)).norm(dim=2)
        difference = (difference / expected.unflatten(1, (2, -1)).norm(dim=2)).nan_to_num(torch.inf)
        median, largest = float(difference.amax(1).median()), float(difference.max())
        if median > NEAR or largest > FAR:
            limit = NEAR if median > NEAR else FAR
            first = int((difference.amax(1) > limit).int().argmax())
            keys, values = difference[first].tolist()
            raise SettingError(
                f"`maps` were made for {self.source}, which this model is not, or not in this"
                " revision: for the same tokens keys and values of"
                f" {list(keys_and_values)[first]} differ by {keys:.0%} and {values:.0%}; rounding"
                f" or a LoRA explain {NEAR:.0%} in half of the layers and {FAR:.0%} in any; take"
                " the maps of this model"
            )


def sizes_of(config: Any) -> dict[str, int]:
    """The sizes that a model's config states, by name."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in SIZES}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def folder_of(name: Path | str) -> Path:
    """The local folder of a sidecar, downloaded if the name is a hub repository. Raises
    SettingError if that fails."""
    if Path(name).exists() or not download.is_repository(str(name)):
        return Path(name)
    try:
        return download.download(str(name), FILES)
    except ValueError as error:
        raise SettingError(f"`maps`: cannot read {str(name)!r}: {error}") from None


def _smallest(tensor: Tensor) -> Tensor:
    """A copy on the CPU: in fp16 if that represents every number exactly, else in fp32."""
    full = tensor.detach().float().cpu()
    half = full.half()
    return (half if torch.equal(half.float(), full) else full).contiguous().clone()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(plan: Mapping[str, Any]) -> str:
    """SHA-256 of a plan without its own digest."""
    contents = json.loads(json.dumps({name: x for name, x in plan.items() if name != "digest"}))
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _damaged(name: Path | str, why: object) -> SettingError:
    return SettingError(
        f"`maps`: {name} is damaged ({why}); copy its files again, or compress again"
    )


def _maps(name: str, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> Maps:
    """Build the maps of one layer from all tensors of the file. Raises KeyError for a missing
    tensor, and ValueError for tensors that do not fit each other."""
    before_rope = layer.keys == "pre_rope"
    parts = {x: tensors[f"{name}.{x}"] for x in (RopeMaps if before_rope else Maps).names}
    if before_rope:
        angles, order = tensors[f"{name}.inv_freq"], tensors[f"{name}.order"].long()
        if angles.dim() != 1 or order.dim() != 1:
            raise ValueError(f"{name}: inv_freq and order are rows of numbers")
        rotation = Rotation(angles, order)
        maps: Maps = RopeMaps(**parts, rotation=rotation, joint=layer.latents[0].side == "kv")
    else:
        maps = Maps(**parts)
    try:
        maps.check()
    except (IndexError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    return maps


def probes(keys: Tensor, values: Tensor) -> Tensor:
    """Fingerprint of a layer's keys and values: fp32 [2 PROBES], random projections of each."""
    projections = []
    for x in (keys, values):
        numbers = x.detach().float().flatten().cpu()
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (PROBES, len(numbers)), generator=generator).float() * 2 - 1
        projections.append(
            signs @ numbers / (len(numbers) ** 0.5 * numbers.norm().clamp(min=1e-30)) ** 0.5
        )
    return torch.cat(projections)


def probes_of(layers: Sequence[AttentionLayer]) -> dict[str, list[float]]:
    """Fingerprints of all layers, by name."""
    return {layer.name: probes(layer.keys, layer.values).tolist() for layer in layers}
