"""A compressed context as a file: pages that any number of requests begin with.

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
from kvfold.layout.pages import CacheLayout, Ints
from kvfold.models.weights import digests
from kvfold.utils.errors import SettingError
from kvfold.utils.files import new_file, writing
from kvfold.utils.text import json_object

FORMAT = 2
NAME = "kvfold"  # of the metadata
MADE = ("key", "settings", "report")  # of `PackedContext.made`


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedContext:
    """The rows that are left of a context, as pages of a pool.

    token_ids: all N that were read; rows: int64 [G], what is left of them; pages: uint8
    [m, page bytes] of every class, group after group, each with its rows' positions. made: how, of
    what and at what cost: `key` (of model and layout), `settings` (a CacheConfig's fields), and of
    `report` what `summary` says.
    """

    token_ids: tuple[int, ...]
    rows: Ints
    pages: tuple[Tensor, ...]
    made: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Of its pages."""
        return sum(x.numel() for x in self.pages)

    @property
    def summary(self) -> str:
        """A line that says what it takes and what it costs."""
        found = self.made["report"]
        full, kept = found["full_bytes"], float(self.rows.mean())
        said = (
            f"{len(self.token_ids)} tokens, {kept:.0f} of them kept, in {self.num_bytes / 1e6:.2f}"
            f" MB of pages: {full / self.num_bytes:.1f} times less than {full / 1e6:.2f} MB at 16"
            f" bits"
        )
        if found.get("loss") is None:
            return said
        return (
            f"{said}; repeating a sample of it loses {found['loss']:.3f} nats a token, and"
            f" {found['full_loss']:.3f} with all of it"
        )

    @cached_property
    def largest_id(self) -> int:
        return max(self.token_ids)

    def save(self, path: str | Path) -> None:
        """As a safetensors file, written whole or not at all. Raises OSError where it cannot be
        written."""
        tensors = {
            "token_ids": torch.tensor(self.token_ids, dtype=torch.int32),
            "rows": torch.from_numpy(self.rows).int(),
            **{f"pages.{c}": x.contiguous() for c, x in enumerate(self.pages)},
        }
        about = {"format": FORMAT, **self.made}
        about["digest"] = _digest(about, tensors)
        with writing(Path(path)), new_file(Path(path)) as scratch:
            scratch.write_bytes(save(tensors, metadata={NAME: json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises ValueError for a file that is missing, that `save` did not write, or of which a
        bit has changed since."""
        if not Path(path).is_file():
            raise ValueError(f"packed context {path}: no such file; `kvfold pack` makes one")
        try:
            about, tensors = _read(path)
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"packed context {path}: cannot be read ({error})") from None
        if about.get("format") != FORMAT or about.keys() != {"format", "digest", *MADE}:
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
            rows=tensors.pop("rows").long().numpy(),
            pages=tuple(tensors[f"pages.{c}"] for c in range(len(tensors))),
            made={name: about[name] for name in MADE},
        )

    def check(self, key: Mapping[str, str]) -> None:
        """Raises SettingError for an LLM of another model or layout, whose `key` this is."""
        own = self.made["key"]
        if own["model"] != key["model"]:
            raise SettingError(
                "`context` was packed with another model, whose rows mean nothing to this one: "
                "pack the text again"
            )
        if own["layout"] != key["layout"]:
            said = ", ".join(f"{k}={v!r}" for k, v in self.made["settings"].items())
            raise SettingError(
                f"`context` was packed with {said}: this LLM stores rows in another way; give it "
                "these settings"
            )


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a safetensors file says about itself, and its tensors."""
    with safe_open(path, framework="pt") as file:
        about = json_object((file.metadata() or {}).get(NAME, "{}"))
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Of all bytes of a packed context."""
    said = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(b"".join((said, *digests(tensors.items())))).hexdigest()


def _wrong(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
    """What `save` would not have written, if anything."""
    kinds = {"token_ids": (torch.int32, 1), "rows": (torch.int32, 1)}
    kinds |= {f"pages.{c}": (torch.uint8, 2) for c in range(len(tensors) - len(kinds))}
    if len(tensors) < 3 or tensors.keys() != kinds.keys():
        return f"it has tensors {', '.join(sorted(tensors))[:100] or 'of no name'}"
    for name, (dtype, dims) in kinds.items():
        if tensors[name].dtype != dtype or tensors[name].dim() != dims:
            return f"{name} must be {dtype} in {dims} dimensions"
    ids, rows = tensors["token_ids"], tensors["rows"]
    if not len(ids) or int(ids.min()) < 0:
        return "token ids must be at least one, and none below 0"
    if not len(rows) or int(rows.min()) < 0 or not 0 < int(rows.max()) <= len(ids):
        return f"rows must be in 0..{len(ids)}, the tokens that were read"
    if not any(x.numel() for name, x in tensors.items() if name not in ("token_ids", "rows")):
        return "its pages are empty"
    if not all(isinstance(about[name], dict) for name in MADE):
        return f"{', '.join(MADE)} must be objects"
    if not _reported(about["report"]) or not {"model", "layout"} <= about["key"].keys():
        return "its report or its key lacks something"
    try:
        cache_of(about["settings"])
    except (TypeError, ValueError) as error:
        return f"its settings are no CacheConfig ({error})"
    return None


def cache_of(settings: Mapping[str, Any], kv_bytes: int | None = None) -> CacheConfig:
    """Of a pool that takes a context packed with these settings, where nothing is evicted but by
    requests' own budgets. Raises SettingError, or TypeError for unknown settings."""
    keep = 1.0 if settings.get("evict") else None
    return CacheConfig(**settings, kv_bytes=kv_bytes, keep_tokens=keep)


def _reported(report: Mapping[str, Any]) -> bool:
    """Whether `summary` can say what a report says."""
    size, losses = report.get("full_bytes"), [report.get("loss"), report.get("full_loss")]
    known = losses if losses[0] is not None else []
    numbers = all(isinstance(x, int | float) and abs(x) < 1e9 for x in known)
    return numbers and isinstance(size, int) and 0 < size < 2**63


def layout_key(layout: CacheLayout, rotate: bool) -> str:
    """A digest of what says how rows lie in pages and what their numbers mean."""
    said = repr((layout.spec, layout.page, layout.groups, rotate))
    return hashlib.sha256(said.encode()).hexdigest()[:32]
