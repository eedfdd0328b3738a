"""Second moments of what the cache holds, and of the loss's gradient with respect to it.

Shapes: T tokens, Hq / Hk query / KV heads, d head dim, K = Hk * d, n a moment's width.
All moments are fp64 sums over tokens; `Moment` turns them into means and covariances.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

SCHEMA = 6

# name -> what it is; shape of its second moment. `needs` of a recipe are names from here.
QUANTITIES = {
    "key_pre": "keys before RoPE, all heads [K, K]",
    "value": "values, all heads [K, K]",
    "kv": "keys before RoPE and values, in the support of the layer [<= 2K]",
    "key_post": "keys after RoPE, per head [Hk, d, d]",
    "key_seen": "keys after RoPE weighted by the attention they receive [Hk, d, d]",
    "query": "queries after RoPE, summed over a KV head's query heads [Hk, d, d]",
    "query_back": "queries turned back by an attended key's position [Hk, d, d]",
    "out": "attention outputs over all heads' values, all query heads pooled [K, K]",
    "out_head": "attention outputs, query heads of a KV head pooled [Hk, d, d]",
    "key_pre_felt": "keys before RoPE, each token weighted by its gradient's norm [K, K]",
    "kv_felt": "the same of keys before RoPE and values, in the support of the layer",
    "key_post_felt": "keys after RoPE, each token weighted by its gradient's norm [Hk, d, d]",
    "value_felt": "values, each token weighted by its gradient's norm [K, K]",
    "out_head_felt": "the same of `out_head` [Hk, d, d]",
    "grad_key_pre": "loss gradient at keys before RoPE [K, K]",
    "grad_key_post": "loss gradient at keys after RoPE [Hk, d, d]",
    "grad_value": "loss gradient at values [K, K]",
    "grad_kv": "loss gradient at (keys before RoPE, values), in the layer's support",
    "first": "a window's first token: keys before RoPE, values, keys after RoPE [3K]; squares",
    "grad_out": "loss gradient at attention outputs, summed over query heads [Hk, d, d]",
    "fisher": "root mean square gradient of W_K's and W_V's elements, mean a KV head [Hk, 2]",
    "rows_reduced": "ZDC's k-means centroids of Q, K and V per head: second moments [Hk, 2, d, d]",
}


@dataclass
class Moment:
    """Weighted sums over samples: second [.., n, n], first [.., n], weight []."""

    second: Tensor
    first: Tensor
    weight: Tensor

    def mean(self) -> Tensor:
        return self.first / self._weight(1)

    def raw(self) -> Tensor:
        """E[c c^T]."""
        return self.second / self._weight(2)

    def covariance(self) -> Tensor:
        mean = self.mean()
        return self.raw() - mean[..., :, None] * mean[..., None, :]

    def _weight(self, trailing: int) -> Tensor:
        return self.weight.reshape(self.weight.shape + (1,) * trailing)


class Statistics:
    """Accumulated moments of every layer, with the key that says what they were measured on."""

    def __init__(self, key: dict[str, Any]) -> None:
        self.key = key
        self.layers: dict[int, dict[str, Moment]] = {}

    def add(self, layer: int, name: str, samples: Tensor, weight: Tensor | None = None) -> None:
        """Add samples [.., N, n] (weights [.., N], default 1) to a moment."""
        x = samples.detach().double()
        w = None if weight is None else weight.detach().double()
        xw = x if w is None else x * w[..., None]
        count = torch.full(x.shape[:-2], x.shape[-2], dtype=x.dtype, device=x.device)
        self.accumulate(
            layer,
            name,
            Moment(second=xw.mT @ x, first=xw.sum(-2), weight=count if w is None else w.sum(-1)),
        )

    def accumulate(self, layer: int, name: str, moment: Moment) -> None:
        stored = self.layers.setdefault(layer, {})
        if name not in stored:
            stored[name] = moment
            return
        stored[name].second += moment.second
        stored[name].first += moment.first
        stored[name].weight += moment.weight

    def __getitem__(self, place: tuple[int, str]) -> Moment:
        layer, name = place
        try:
            return self.layers[layer][name]
        except KeyError:
            raise ValueError(
                f"the calibration artifact has no {name!r} ({QUANTITIES.get(name, 'unknown')}) for "
                f"layer {layer}; calibrate again for this recipe"
            ) from None

    def has(self, names: set[str]) -> bool:
        return bool(self.layers) and all(names <= stored.keys() for stored in self.layers.values())

    def to(self, device: torch.device | str) -> "Statistics":
        """Move every moment to a device, in place."""
        for stored in self.layers.values():
            for moment in stored.values():
                for part in ("second", "first", "weight"):
                    setattr(moment, part, getattr(moment, part).to(device))
        return self

    def save(self, path: Path) -> None:
        tensors = {
            f"{layer}.{name}.{part}": getattr(moment, part).contiguous().cpu()
            for layer, stored in self.layers.items()
            for name, moment in stored.items()
            for part in ("second", "first", "weight")
        }
        save_file(tensors, path, metadata={"kvfold": json.dumps({**self.key, "schema": SCHEMA})})

    @classmethod
    def load(cls, path: Path, key: dict[str, Any]) -> "Statistics":
        """Read an artifact. Raises ValueError if it is not about `key`'s model and text."""
        try:
            with safe_open(path, "pt") as file:
                found = json.loads((file.metadata() or {}).get("kvfold", "null"))
            tensors = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path} is not a readable calibration artifact: {error}") from error
        wanted = {**key, "schema": SCHEMA}
        if found != wanted:
            found = found or {}
            differs = [k for k in wanted | found if found.get(k) != wanted.get(k)]
            raise ValueError(
                f"{path} was measured on something else: {', '.join(differs)} differ; delete it or "
                "name another file, and calibrate again"
            )
        statistics = cls(key)
        for place in sorted({name.rpartition(".")[0] for name in tensors}):
            layer, name = place.split(".")
            parts = {p: tensors[f"{place}.{p}"] for p in ("second", "first", "weight")}
            statistics.accumulate(int(layer), name, Moment(**parts))
        return statistics


def fingerprint(model: torch.nn.Module) -> str:
    """A digest of a model's parameter names, shapes and about a thousand numbers of each.

    Numbers, not sums: those depend on how many threads add.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        numbers = parameter.detach().flatten()
        sample = numbers[:: max(1, numbers.numel() // 1024)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
