"""Statistics of every layer of a model, and the file that keeps them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, safe_open, save_file

from kvfold.calibration.statistics.moments import Moment
from kvfold.calibration.statistics.quantities import QUANTITIES
from kvfold.models.weights import digests
from kvfold.utils.files import check_writable, new_file, writing
from kvfold.utils.text import json_object

SCHEMA = 7


@dataclass
class Statistics:
    """Moments of every layer by name. key: says what they were measured on. through_weights:
    modules whose gradients were computed from their dequantised weights; empty for statistics from
    a file.
    """

    key: dict[str, Any]
    layers: dict[int, dict[str, Moment]] = field(default_factory=dict)
    through_weights: tuple[str, ...] = ()

    def __getitem__(self, place: tuple[int, str]) -> Moment:
        layer, name = place
        try:
            return self.layers[layer][name]
        except KeyError:
            meaning = QUANTITIES[name].meaning if name in QUANTITIES else "unknown"
            raise ValueError(
                f"the calibration artifact has no {name!r} ({meaning}) for layer {layer}; calibrate"
                " again for this recipe"
            ) from None

    def has(self, names: set[str]) -> bool:
        """Whether every layer has these statistics."""
        return bool(self.layers) and all(names <= stored.keys() for stored in self.layers.values())

    def to(self, device: torch.device | str) -> "Statistics":
        """Move every moment to a device, in place."""
        for stored in self.layers.values():
            for moment in stored.values():
                for part in ("second", "first", "weight"):
                    setattr(moment, part, getattr(moment, part).to(device))
        return self

    def save(self, path: Path) -> None:
        """Write the artifact file."""
        tensors = {
            f"{layer}.{name}.{part}": getattr(moment, part).contiguous().cpu()
            for layer, stored in self.layers.items()
            for name, moment in stored.items()
            for part in ("second", "first", "weight")
        }
        about = json.dumps({**self.key, "schema": SCHEMA})
        metadata = {"kvfold": about, "digest": _digest(about, tensors)}
        with writing(path), new_file(path) as scratch:
            save_file(tensors, scratch, metadata=metadata)

    @classmethod
    def load(cls, path: Path, key: dict[str, Any]) -> "Statistics":
        """Read an artifact file. Raises ValueError if its key is another, or its content is
        damaged."""
        if not path.is_file():  # a pipe would be waited for
            raise ValueError(f"{path} is not a file; name another one")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
            about = metadata.get("kvfold")
            stored_key = json_object(about or "{}")
            tensors = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path} is not a readable calibration artifact: {error}") from error
        wanted = {**key, "schema": SCHEMA}
        if about is None:
            raise ValueError(f"{path} is not a calibration artifact; name another file")
        if not any(".rows_reduced." in name for name in tensors):  # nothing was clustered
            stored_key.pop("centroids", None)
            wanted.pop("centroids", None)
        if stored_key != wanted:
            differs = [k for k in wanted | stored_key if stored_key.get(k) != wanted.get(k)]
            raise ValueError(
                f"{path} was measured on something else: {', '.join(differs)} differ; delete it or "
                "name another file, and calibrate again"
            )
        if metadata.get("digest") != _digest(about, tensors):
            raise ValueError(
                f"{path} is damaged or was edited: delete it or name another file, and calibrate "
                "again"
            )
        statistics = cls(key)
        for place in sorted({name.rpartition(".")[0] for name in tensors}):
            layer, name = place.split(".")
            if name.endswith("_felt"):  # the former name of these statistics
                name = name.removesuffix("felt") + "weighted"
            parts = {p: tensors[f"{place}.{p}"] for p in ("second", "first", "weight")}
            statistics.layers.setdefault(int(layer), {})[name] = Moment(**parts)
        return statistics


def _digest(about: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return sha256(b"".join((about.encode(), *digests(tensors.items())))).hexdigest()


def check_place(path: Path) -> None:
    """Raises ValueError for a path where statistics can be neither read nor written."""
    if not path.is_file():
        check_writable(path)
