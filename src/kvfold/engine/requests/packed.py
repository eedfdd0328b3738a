"""A packed context: the compressed cache entries of a text, which requests can start from, as a
file.

Shapes: N tokens of the context, G groups of all layers, C byte classes of the pool's pages.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvfold.config import CacheConfig
from kvfold.layout.pages import UNIT, CacheLayout, Ints
from kvfold.models.weights import digests
from kvfold.utils.errors import SettingError
from kvfold.utils.files import new_file, writing
from kvfold.utils.text import json_object

FORMAT = 2
NAME = "kvfold"  # key of the file's metadata
ORIGIN = ("key", "settings", "report")  # keys of `PackedContext.origin`


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedContext:
    """The remaining cache entries of a compressed context, as pages of a pool.

    token_ids: all N tokens of the context.
    lengths: int64 [G], number of remaining entries of each group (the file calls it `rows`).
    pages: uint8 [m, page bytes] per class, group after group. The pages also hold the entries'
        positions.
    origin: how it was packed: `key` (identifies model and layout), `settings` (fields of a
        CacheConfig) and `report` (sizes and losses, see `summary`).
    """

    token_ids: tuple[int, ...]
    lengths: Ints
    pages: tuple[Tensor, ...]
    origin: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of its pages."""
        return sum(x.numel() for x in self.pages)

    @property
    def summary(self) -> str:
        """One line on its size and its loss."""
        report = self.origin["report"]
        full_bytes, num_kept = report["full_bytes"], float(self.lengths.mean())
        size = (
            f"{len(self.token_ids)} tokens, {num_kept:.0f} of them kept, in"
            f" {self.num_bytes / 1e6:.2f} MB of pages: {full_bytes / self.num_bytes:.1f}x smaller"
            f" than {full_bytes / 1e6:.2f} MB at 16 bits"
        )
        if report.get("loss") is None:
            return size
        return (
            f"{size}; cross-entropy of repeating a sample of it: {report['loss']:.3f} nats/token,"
            f" and {report['full_loss']:.3f} with all entries"
        )

    @cached_property
    def largest_id(self) -> int:
        return max(self.token_ids)

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file, completely or not at all. Raises OSError."""
        tensors = {
            "token_ids": torch.tensor(self.token_ids, dtype=torch.int32),
            "rows": torch.from_numpy(self.lengths).int(),
            **{f"pages.{c}": x.contiguous() for c, x in enumerate(self.pages)},
        }
        about = {"format": FORMAT, **self.origin}
        about["digest"] = _digest(about, tensors)
        with writing(Path(path)), new_file(Path(path)) as scratch:
            scratch.write_bytes(save(tensors, metadata={NAME: json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote. Raises ValueError if it is missing, was not written by
        `save`, or has changed since."""
        if not Path(path).is_file():
            raise ValueError(f"packed context {path}: no such file; `kvfold pack` makes one")
        try:
            about, tensors = _read(path)
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"packed context {path}: cannot be read ({error})") from None
        if about.get("format") != FORMAT or about.keys() != {"format", "digest", *ORIGIN}:
            raise ValueError(
                f"packed context {path}: not made by this version of kvfold; pack the text again"
            )
        digest = about.pop("digest")
        if digest != _digest(about, tensors):
            raise ValueError(
                f"packed context {path}: damaged or edited, its digest is of other bytes; copy it"
                " again, or pack the text again"
            )
        if wrong := _wrong(about, tensors):
            raise ValueError(f"packed context {path}: {wrong}; pack the text again")
        return cls(
            token_ids=tuple(tensors.pop("token_ids").tolist()),
            lengths=tensors.pop("rows").long().numpy(),
            pages=tuple(tensors[f"pages.{c}"] for c in range(len(tensors))),
            origin={name: about[name] for name in ORIGIN},
        )

    def check(self, key: Mapping[str, str]) -> None:
        """Raises SettingError if an LLM with the key `key` has another model or layout."""
        packed = self.origin["key"]
        if packed["model"] != key["model"]:
            raise SettingError(
                "`context` was packed with another model, whose token entries mean nothing to this "
                "one: pack the text again"
            )
        if packed["layout"] != key["layout"]:
            said = ", ".join(f"{k}={v!r}" for k, v in self.origin["settings"].items())
            raise SettingError(
                f"`context` was packed with {said}: this LLM stores cache entries in another way; "
                "give it these settings"
            )


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        about = json_object((file.metadata() or {}).get(NAME, "{}"))
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A digest of all bytes of a packed context."""
    said = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(b"".join((said, *digests(tensors.items())))).hexdigest()


def _wrong(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
    """What is wrong in the file's contents, or None."""
    kinds = {"token_ids": (torch.int32, 1), "rows": (torch.int32, 1)}
    kinds |= {f"pages.{c}": (torch.uint8, 2) for c in range(len(tensors) - len(kinds))}
    if len(tensors) < 3 or tensors.keys() != kinds.keys():
        return f"it has tensors {', '.join(sorted(tensors))[:100] or 'of no name'}"
    for name, (dtype, dims) in kinds.items():
        if tensors[name].dtype != dtype or tensors[name].dim() != dims:
            return f"{name} must be {dtype} in {dims} dimensions"
    ids, lengths = tensors["token_ids"], tensors["rows"]
    if not len(ids) or int(ids.min()) < 0:
        return "token ids must be at least one, and none below 0"
    if not len(lengths) or int(lengths.min()) < 0 or not 0 < int(lengths.max()) <= len(ids):
        return f"rows must be in 0..{len(ids)}, the tokens that were read"
    if not any(x.numel() for name, x in tensors.items() if name not in ("token_ids", "rows")):
        return "its pages are empty"
    if not all(isinstance(about[name], dict) for name in ORIGIN):
        return f"{', '.join(ORIGIN)} must be objects"
    if not _reported(about["report"]) or not {"model", "layout"} <= about["key"].keys():
        return "its report or its key lacks something"
    try:
        cache_of(about["settings"])
    except (TypeError, ValueError) as error:
        return f"its settings are no CacheConfig ({error})"
    return None


def cache_of(settings: Mapping[str, Any], kv_bytes: int | None = None) -> CacheConfig:
    """The CacheConfig of a pool that can load a context packed with these settings, and evicts only
    by the budgets of requests. Raises SettingError, or TypeError for unknown settings."""
    keep = 1.0 if settings.get("evict") else None
    return CacheConfig(**settings, kv_bytes=kv_bytes, keep_tokens=keep)


def _reported(report: Mapping[str, Any]) -> bool:
    """Whether a report has what `summary` needs."""
    size, losses = report.get("full_bytes"), [report.get("loss"), report.get("full_loss")]
    known = losses if losses[0] is not None else []
    numbers = all(isinstance(x, int | float) and abs(x) < 1e9 for x in known)
    return numbers and isinstance(size, int) and 0 < size < 2**63


def layout_key(layout: CacheLayout, rotate: bool) -> str:
    """A digest of everything that determines how entries are stored in pages."""
    said = repr((layout.spec, layout.page, layout.groups, rotate))
    if any(x.layout.least_bytes > UNIT for x in layout.groups):
        said += repr([x.layout.least_bytes for x in layout.groups])
    return hashlib.sha256(said.encode()).hexdigest()[:32]
