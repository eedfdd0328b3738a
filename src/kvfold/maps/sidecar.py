"""Maps beside the weights: small files that say what a model's cache stores.

`kvfold.json` holds the plan, how it was made, and what the base asks of attention for a few tokens;
`kvfold.safetensors` the maps by layer; `README.md` is for people. Published, they fit every copy of
their base: in another dtype, quantised, or with a LoRA.
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
PROBES = 8  # numbers that stand for the keys, and for the values, of a layer
# By how much of their size keys or values may differ, in half of the layers and in any. Rounding
# adds up with depth: SmolLM2 in 4 bits differs by .2 to .4 in half of its layers and by .8 in the
# last, other models by more than 1, values of the wrong sign by 2.
NEAR, FAR = 0.5, 1.2
_BROKEN = (AttributeError, LookupError, TypeError, ValueError)  # what a plan of wrong parts raises


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """maps: of layers by their module's name; spec: what these store, in the same order; base: what
    `probes` are of them in the model that they were made for; provenance: how they were made."""

    maps: Mapping[str, Maps]
    spec: CacheSpec
    base: Mapping[str, Sequence[float]]
    provenance: Mapping[str, Any]

    def save(self, folder: Path | str) -> None:
        """Write a new directory, whole or not at all. Raises ValueError where it cannot be made,
        and OSError where the disk is full."""
        with new_directory(Path(folder)) as made:
            self.write(made, Path(folder))

    def write(self, folder: Path, name: Path) -> None:
        """Write the files into a folder, which is there. name: of the folder, for errors."""
        with writing(name):
            self._write(folder)

    def _write(self, folder: Path) -> None:
        tensors = {
            f"{name}.{part}": _smallest(tensor)
            for name, own in self.maps.items()
            for part, tensor in own.tensors().items()
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
        """What people read about the maps, in Markdown with the metadata that the hub reads."""
        return card.maps_text(self.spec, dict(self.provenance))

    @classmethod
    def load(cls, name: Path | str) -> Self:
        """Of a folder, or of a hub repository "USER/NAME" or "USER/NAME@REVISION". Raises
        SettingError for what holds no whole sidecar, or cannot be read."""
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
            made = cls(maps=maps, spec=spec, base=plan["base"], provenance=plan["provenance"])
            made.readme()  # which reads what `provenance` says
            return made
        except (*_BROKEN, OSError, SafetensorError) as error:
            raise _damaged(name, error) from None

    def check_config(self, config: Any) -> None:
        """Raises SettingError where a model of this config cannot be the one that the maps were
        made for; `check` says whether it is, once there are weights."""
        sizes = sizes_of(config)
        for name, was in self.provenance.get("sizes", {}).items():
            if was != sizes.get(name, was):
                raise SettingError(
                    f"`maps` were made for {self.source}, whose {name} is {was}; this model's is"
                    f" {sizes[name]}: take the maps of this model"
                )

    @property
    def source(self) -> str:
        """The model that the maps were made for, as it was named."""
        return str(self.provenance.get("model", "another model"))

    def layers_of(self, model: Any) -> list[AttentionLayer]:
        """The layers of a model that calls attention as maps need it, and that these maps fit.
        Raises SettingError."""
        layers = attention_layers(model)
        check_layers(model, layers)
        self.check(layers)
        check_rotations(model, layers, self.rotations)
        return layers

    @property
    def rotations(self) -> dict[str, Rotation]:
        """Of layers whose keys are stored before RoPE."""
        each = self.maps.items()
        return {name: x.rotation for name, x in each if isinstance(x, RopeMaps)}

    def check(self, layers: Sequence[AttentionLayer]) -> None:
        """Raises SettingError where a model's layers are not those that the maps were made for."""
        found = {layer.name: layer for layer in layers}
        if missing := [name for name in self.maps if name not in found]:
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
        for name, own in self.maps.items():
            layer = found[name]
            wanted = (own.num_heads, own.head_dim, own.value_mean.shape[1])
            has = (layer.num_kv_heads, layer.head_dim, layer.value_dim)
            if wanted != has:
                raise SettingError(
                    f"`maps` of {name} are of {wanted[0]} KV heads with {wanted[1]} and {wanted[2]}"
                    f" numbers of keys and values; this model's has {has[0]}, {has[1]}, {has[2]}:"
                    " take the maps of this model"
                )
        if more := [name for name in found if name not in self.base]:
            raise SettingError(
                f"`maps` know nothing of {more[0]}, which calls attention in this model: take the"
                " maps of this model"
            )
        self.check_base({name: (layer.keys, layer.values) for name, layer in found.items()})

    def check_base(self, asked: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Raises SettingError where the keys [Hk, T, d] and values [Hk, T, dv] of layers, by the
        names of their maps, are not those of the model that the maps were made for. Of the tokens
        `probe_ids`, where attention gives nothing in any layer."""
        was = torch.tensor([list(self.base[name]) for name in asked])
        now = torch.stack([probes(*each) for each in asked.values()])
        apart = (now - was).unflatten(1, (2, -1)).norm(dim=2)
        apart = (apart / was.unflatten(1, (2, -1)).norm(dim=2)).nan_to_num(torch.inf)
        half, most = float(apart.amax(1).median()), float(apart.max())
        if half > NEAR or most > FAR:
            limit = NEAR if half > NEAR else FAR
            first = int((apart.amax(1) > limit).int().argmax())
            keys, values = apart[first].tolist()
            raise SettingError(
                f"`maps` were made for {self.source}, which this model is not, or not in this"
                f" revision: for the same tokens keys and values of {list(asked)[first]} differ by"
                f" {keys:.0%} and {values:.0%}; rounding or a LoRA explain {NEAR:.0%} in half of"
                f" the layers and {FAR:.0%} in any; take the maps of this model"
            )


def sizes_of(config: Any) -> dict[str, int]:
    """What a model's config says of its size, as far as it does."""
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in SIZES}
    return {name: size for name, size in found.items() if isinstance(size, int)}


def folder_of(name: Path | str) -> Path:
    """The folder of a sidecar, downloaded where the name is a hub repository. Raises SettingError
    where it cannot be."""
    if Path(name).exists() or not download.is_repository(str(name)):
        return Path(name)
    try:
        return download.download(str(name), FILES)
    except ValueError as error:
        raise SettingError(f"`maps`: cannot read {str(name)!r}: {error}") from None


def _smallest(tensor: Tensor) -> Tensor:
    """A copy on the CPU, in fp16 where that holds every number as it is, else in fp32."""
    whole = tensor.detach().float().cpu()
    half = whole.half()
    return (half if torch.equal(half.float(), whole) else whole).contiguous().clone()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(plan: Mapping[str, Any]) -> str:
    """Of all that a plan says, but for this."""
    said = json.loads(json.dumps({name: x for name, x in plan.items() if name != "digest"}))
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _damaged(name: Path | str, why: object) -> SettingError:
    return SettingError(
        f"`maps`: {name} is damaged ({why}); copy its files again, or compress again"
    )


def _maps(name: str, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> Maps:
    """The maps of a layer of this name among all tensors. Raises KeyError for a tensor that is
    missing, ValueError for those that do not fit each other."""
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
    """Numbers fp32 [2 PROBES] that stand for a layer's keys and values of fixed tokens."""
    found = []
    for x in (keys, values):
        flat = x.detach().float().flatten().cpu()
        signs = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, 2, (PROBES, len(flat)), generator=signs).float() * 2 - 1
        found.append(drawn @ flat / (len(flat) ** 0.5 * flat.norm().clamp(min=1e-30)) ** 0.5)
    return torch.cat(found)


def probes_of(layers: Sequence[AttentionLayer]) -> dict[str, list[float]]:
    """Of every layer, by its name."""
    return {layer.name: probes(layer.keys, layer.values).tolist() for layer in layers}
