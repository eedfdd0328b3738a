"""A compressed context as a file: pages that any number of requests begin with.

Shapes: N tokens of the context, G groups of all layers, C byte classes of the pool's pages.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvfold.errors import SettingError
from kvfold.files import writing
from kvfold.spec.layout import CacheLayout, Ints

FORMAT = 1
NAME = "kvfold"  # of the metadata


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

    def save(self, path: str | Path) -> None:
        """As a safetensors file. Raises OSError where it cannot be written."""
        tensors = {
            "token_ids": torch.tensor(self.token_ids, dtype=torch.int32),
            "rows": torch.from_numpy(self.rows).int(),
            **{f"pages.{c}": x.contiguous() for c, x in enumerate(self.pages)},
        }
        about = json.dumps({"format": FORMAT, **self.made})
        with writing(Path(path)):
            Path(path).write_bytes(save(tensors, metadata={NAME: about}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises ValueError for a file that is missing, or that `save` did not write."""
        if not Path(path).is_file():
            raise ValueError(f"packed context {path}: no such file; `kvfold pack` makes one")
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get(NAME, "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"packed context {path}: cannot be read ({error})") from None
        if about.pop("format", None) != FORMAT or not {"key", "settings", "report"} <= about.keys():
            raise ValueError(
                f"packed context {path}: not made by this version of kvfold; pack the text again"
            )
        return cls(
            token_ids=tuple(tensors.pop("token_ids").tolist()),
            rows=tensors.pop("rows").long().numpy(),
            pages=tuple(tensors[f"pages.{c}"] for c in range(len(tensors))),
            made=about,
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


def layout_key(layout: CacheLayout, rotate: bool) -> str:
    """A digest of what says how rows lie in pages and what their numbers mean."""
    said = repr((layout.spec, layout.page, layout.groups, rotate))
    return hashlib.sha256(said.encode()).hexdigest()[:32]
