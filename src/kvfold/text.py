"""Plain text in, token windows out."""

import lzma
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEPARATOR = "<|endoftext|>"
_PIECE = 200_000  # characters tokenised at a time


def packaged(name: str) -> str:
    """A text that ships with kvfold, such as `calibration.txt`."""
    return resources.files("kvfold.data").joinpath(name).read_text(encoding="utf-8")


def read_texts(paths: Sequence[str | Path]) -> str:
    """The texts of .txt or .xz files, joined as documents. Raises ValueError naming the file."""
    return f"\n{SEPARATOR}\n".join(_read(Path(path)) for path in paths)


def _read(path: Path) -> str:
    try:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            text = str(file.read())
    except FileNotFoundError:
        raise ValueError(f"text file {path} does not exist") from None
    except (UnicodeDecodeError, lzma.LZMAError, OSError) as error:
        raise ValueError(f"{path} is not readable as UTF-8 text (.txt or .xz): {error}") from error
    if not text.strip():
        raise ValueError(f"text file {path} is empty")
    return text


def documents(text: str) -> list[str]:
    """The non-empty documents of a text, separated by lines `<|endoftext|>`."""
    return [part.strip() for part in text.split(SEPARATOR) if part.strip()]


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """Token ids [N] without special tokens, a piece at a time."""
    pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
    ids = [tokenizer(piece, add_special_tokens=False, verbose=False).input_ids for piece in pieces]
    return torch.tensor([token for piece in ids for token in piece], dtype=torch.long)


def windows(tokenizer: Any, text: str, length: int, max_tokens: int | None = None) -> Tensor:
    """Whole windows [n, length] of a text: BOS (where the tokenizer has one), then its tokens.

    `max_tokens` bounds n * length. Raises ValueError if the text does not fill one window.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    body = length - (bos is not None)
    limit = None if max_tokens is None else max(max_tokens // length, 1) * body
    ids = tokenize(tokenizer, text if limit is None else text[: limit * 12])[:limit]
    count = len(ids) // body
    if count == 0:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than one window of {length}: give a longer text"
            " or a shorter context"
        )
    rows = ids[: count * body].reshape(count, body)
    if bos is None:
        return rows
    return torch.cat((torch.full((count, 1), bos), rows), dim=1)
