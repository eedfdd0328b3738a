"""Documents to calibrate on: the packaged ones, of several kinds, or those of text files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.calibration.self_text import SELF
from kvfold.utils.errors import SettingError
from kvfold.utils.text import (
    apply_template,
    documents,
    encode,
    encode_start,
    packaged,
    read_texts,
)

LEAST = 256  # tokens of a document, where it has them
PACKAGED = {  # files of packaged text by kind
    "prose": ("calibration.txt",),
    "code": ("calibration/code.txt",),
    "other": ("calibration/chat.jsonl", "calibration/data.txt", "calibration/languages.txt"),
}
PARTS = {"prose": 2, "code": 2, "other": 1}  # that a kind gives of all tokens


def is_self(calib: Sequence[str | Path] | None) -> bool:
    """Whether to calibrate on text that the model writes itself. Raises SettingError where files
    are named beside it."""
    names = [str(x) for x in calib or ()]
    if SELF in names and len(names) > 1:
        raise SettingError(
            f"`calib`: {SELF} is text that the model writes itself, and stands alone; leave the "
            "other files out, or give the whole path of a file of that name"
        )
    return names == [SELF]


def files_of(calib: list[str | Path] | None) -> list[str | Path] | None:
    """Files to read, or None for the packaged text, where the model writes its own, too."""
    return None if is_self(calib) else calib


@dataclass(frozen=True)
class Document:
    """A text, and what kind of text it is; templated: with the special tokens of a chat template,
    to which the tokenizer is to add none."""

    kind: str
    text: str
    templated: bool = False

    def encode(self, tokenizer: Any) -> list[int]:
        """Token ids, as the start of a prompt has them."""
        return (encode if self.templated else encode_start)(tokenizer, self.text)


def calibration_documents(
    calib: Sequence[str | Path] | None, tokenizer: Any = None
) -> list[Document]:
    """The documents of text files, of one kind, or the packaged ones with their kinds mixed.

    tokenizer: whose chat template packaged conversations are written in. Raises as `read_text`.
    """
    if calib:
        return [Document("given", text) for text in documents(read_texts(calib))]
    return _mixed(
        [_mixed([_read(kind, x, tokenizer) for x in files]) for kind, files in PACKAGED.items()]
    )


def shares(found: Sequence[Document], sizes: Sequence[int], total: int) -> list[int]:
    """How many tokens each document gives: its beginning, where all of them hold more than `total`.

    sizes: tokens of each document. Kinds give tokens by their PARTS, and the documents of a kind
    equally many; what short ones leave goes to longer ones. Where that would be less than LEAST
    tokens of each document, some give more and the others nothing: statistics are of text that runs
    on.
    """
    members: dict[str, list[int]] = {}
    for i, document in enumerate(found):
        members.setdefault(document.kind, []).append(i)
    whole = [sum(sizes[i] for i in x) for x in members.values()]
    of_kinds = split(whole, total, [PARTS.get(kind, 1) for kind in members])
    result = [0] * len(sizes)
    for indices, share in zip(members.values(), of_kinds, strict=True):
        chosen = _chosen(indices, sizes, share)
        for i, size in zip(chosen, split([sizes[i] for i in chosen], share), strict=True):
            result[i] = size
    return result


def _chosen(indices: list[int], sizes: Sequence[int], total: int) -> list[int]:
    """Of documents, as many as can give LEAST of `total` tokens each, spread evenly; more, where
    those are too short to fill it."""
    for count in range(max(1, total // LEAST), len(indices)):
        chosen = [indices[i * len(indices) // count] for i in range(count)]
        if sum(sizes[i] for i in chosen) >= total:
            return chosen
    return indices


def split(sizes: Sequence[int], total: int, parts: Sequence[int] | None = None) -> list[int]:
    """Split `total` over things of `sizes`, evenly or by parts of it; what small ones leave goes to
    larger ones."""
    parts = [1] * len(sizes) if parts is None else parts
    result, left, parts_left = [0] * len(sizes), total, sum(parts)
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i] / parts[i]):
        result[i] = min(sizes[i], left * parts[i] // parts_left)
        left -= result[i]
        parts_left -= parts[i]
    return result


def _read(kind: str, file: str, tokenizer: Any) -> list[Document]:
    """The documents of a packaged file."""
    text = packaged(file)
    if not file.endswith(".jsonl"):
        return [Document(kind, x) for x in documents(text)]
    templated = bool(getattr(tokenizer, "chat_template", None))
    lines = (conversation(json.loads(line), tokenizer) for line in text.splitlines())
    return [Document(kind, line, templated) for line in lines]


def conversation(messages: Sequence[dict[str, str]], tokenizer: Any) -> str:
    """A conversation as the tokenizer's chat template writes it, without a system prompt that the
    template refuses; as paragraphs that name who speaks where there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(f"{x['role'].capitalize()}: {x['content']}" for x in messages)
    try:
        return apply_template(tokenizer, messages)
    except ValueError:
        asked = [x for x in messages if x["role"] != "system"]
        return apply_template(tokenizer, asked)


def _mixed(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """The members of all groups in one order, in which every group is spread evenly."""
    placed = [((i + 0.5) / len(group), x) for group in groups for i, x in enumerate(group)]
    return [x for _, x in sorted(placed, key=lambda pair: pair[0])]
