"""The documents to calibrate on: packaged ones of several kinds, or those of text files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.calibration.self_text import SELF
from kvfold.utils.chat import apply_template
from kvfold.utils.errors import SettingError
from kvfold.utils.text import documents, packaged, read_texts
from kvfold.utils.tokens import encode, encode_start

MIN_TOKENS = 256  # of a document that is used, if it is as long
PACKAGED = {  # files of packaged text by kind
    "prose": ("calibration.txt",),
    "code": ("calibration/code.txt",),
    "other": ("calibration/chat.jsonl", "calibration/data.txt", "calibration/languages.txt"),
}
PARTS = {"prose": 2, "code": 2, "other": 1}  # proportions of the kinds in all tokens


def is_self(calib: Sequence[str | Path] | None) -> bool:
    """Whether `calib` asks for text that the model writes itself. Raises SettingError where it also
    names files."""
    names = [str(x) for x in calib or ()]
    if SELF in names and len(names) > 1:
        raise SettingError(
            f"`calib`: {SELF} is text that the model writes itself, and stands alone; leave the "
            "other files out, or give the whole path of a file of that name"
        )
    return names == [SELF]


def files_of(calib: list[str | Path] | None) -> list[str | Path] | None:
    """The files of `calib`; None for the packaged text, also where the model writes its own."""
    return None if is_self(calib) else calib


@dataclass(frozen=True)
class Document:
    """A text and its kind. templated: it has the special tokens of a chat template, so the
    tokenizer must not add any."""

    kind: str
    text: str
    templated: bool = False

    def encode(self, tokenizer: Any) -> list[int]:
        """Token ids of the text at the start of a prompt."""
        return (encode if self.templated else encode_start)(tokenizer, self.text)


def calibration_documents(
    calib: Sequence[str | Path] | None, tokenizer: Any = None
) -> list[Document]:
    """The documents of text files, all of one kind, or the packaged ones with their kinds mixed.

    tokenizer: packaged conversations are written in its chat template. Raises ValueError for files
    that cannot be read.
    """
    if calib:
        return [Document("given", text) for text in documents(read_texts(calib))]
    return _mixed(
        [_mixed([_read(kind, x, tokenizer) for x in files]) for kind, files in PACKAGED.items()]
    )


def shares(documents: Sequence[Document], sizes: Sequence[int], total: int) -> list[int]:
    """How many tokens of each document are used, from its beginning on: `total` in all, or all
    there are.

    sizes: tokens of each document. Kinds are used in the proportions of PARTS, and the documents of
    a kind equally; what short ones lack is taken from longer ones. If that were less than
    MIN_TOKENS of each document, fewer documents are used, since statistics need running text.
    """
    members: dict[str, list[int]] = {}
    for i, document in enumerate(documents):
        members.setdefault(document.kind, []).append(i)
    kind_sizes = [sum(sizes[i] for i in x) for x in members.values()]
    kind_shares = split(kind_sizes, total, [PARTS.get(kind, 1) for kind in members])
    result = [0] * len(sizes)
    for indices, share in zip(members.values(), kind_shares, strict=True):
        chosen = _chosen(indices, sizes, share)
        for i, size in zip(chosen, split([sizes[i] for i in chosen], share), strict=True):
            result[i] = size
    return result


def _chosen(indices: list[int], sizes: Sequence[int], total: int) -> list[int]:
    """The documents to take `total` tokens from, spread evenly: as many as give MIN_TOKENS each, or
    more where those are too short together."""
    for count in range(max(1, total // MIN_TOKENS), len(indices)):
        chosen = [indices[i * len(indices) // count] for i in range(count)]
        if sum(sizes[i] for i in chosen) >= total:
            return chosen
    return indices


def split(sizes: Sequence[int], total: int, parts: Sequence[int] | None = None) -> list[int]:
    """Split `total` over items of these sizes, evenly or in the proportions `parts`. What small
    items lack goes to larger ones."""
    parts = [1] * len(sizes) if parts is None else parts
    result, left, parts_left = [0] * len(sizes), total, sum(parts)
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i] / parts[i]):
        result[i] = min(sizes[i], left * parts[i] // parts_left)
        left -= result[i]
        parts_left -= parts[i]
    return result


def _read(kind: str, file: str, tokenizer: Any) -> list[Document]:
    """Read the documents of a packaged file."""
    text = packaged(file)
    if not file.endswith(".jsonl"):
        return [Document(kind, x) for x in documents(text)]
    templated = bool(getattr(tokenizer, "chat_template", None))
    lines = (conversation(json.loads(line), tokenizer) for line in text.splitlines())
    return [Document(kind, line, templated) for line in lines]


def conversation(messages: Sequence[dict[str, str]], tokenizer: Any) -> str:
    """A conversation as text: by the tokenizer's chat template, without a system prompt if the
    template refuses it; without a template, in paragraphs that begin with the speaker."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(f"{x['role'].capitalize()}: {x['content']}" for x in messages)
    try:
        return apply_template(tokenizer, messages)
    except ValueError:
        without_system = [x for x in messages if x["role"] != "system"]
        return apply_template(tokenizer, without_system)


def _mixed(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """The members of all groups in one list, over which every group is spread evenly."""
    placed = [((i + 0.5) / len(group), x) for group in groups for i, x in enumerate(group)]
    return [x for _, x in sorted(placed, key=lambda pair: pair[0])]
