"""Tokenise text: prompts, texts of bounded length, and windows of tokens.

Shapes: n windows, T tokens of a window (`ctx`).
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvfold.utils.errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

CHARACTERS_PER_TOKEN = 6  # first guess


def check_text(name: str, text: str) -> None:
    """Raises SettingError for a setting that no tokenizer takes: text with a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingError(f"`{name}`: not utf-8 text at character {error.start}") from None


def check_tokenizer(tokenizer: Any) -> None:
    """Raises SettingError for anything but a transformers tokenizer or None."""
    if tokenizer is not None and not hasattr(tokenizer, "bos_token_id"):
        raise SettingError(
            f"`tokenizer` must be one that transformers loaded; got {tokenizer!r:.100}"
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`, without special tokens, and without transformers' warning about long
    texts."""
    check_text("text", text)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of several texts as `encode` gives them, in one call, which is several times
    faster."""
    for text in texts:
        check_text("text", text)
    if not texts:
        return []
    return list(tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])


def check_ids(ids: Iterable[int], num_embeddings: int) -> None:
    """Raises ValueError for a token that has no embedding in the model."""
    highest = max(ids, default=0)
    if highest >= num_embeddings:
        raise ValueError(
            f"the tokenizer gives token {highest}, but the model has embeddings of tokens 0 to"
            f" {num_embeddings - 1} only: they do not belong together, take the model's own"
        )


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` as `tokenizer(text)` gives them: its post-processor decides which special
    tokens are added, as in transformers and vLLM."""
    check_text("text", text)
    return list(tokenizer(text, verbose=False)["input_ids"])


def leading_tokens(tokenizer: Any) -> list[int]:
    """Special tokens, such as BOS, that the tokenizer puts before a text; empty if it adds none
    there."""
    text, whole = encode(tokenizer, "a"), encode_prompt(tokenizer, "a")
    starts = range(len(whole) - len(text) + 1)
    return whole[: next(i for i in starts if whole[i : i + len(text)] == text)]


def encode_start(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a `text` that other tokens will follow: special tokens before it, none after
    it."""
    return [*leading_tokens(tokenizer), *encode(tokenizer, text)]


def most_characters(limit: int) -> int:
    """Most characters that a text of `limit` tokens can reasonably have. Longer texts (of white
    space, for example) would take seconds to tokenise and delay other requests."""
    return max(2**20, 16 * limit)


def surely_longer(tokenizer: Any, text: str, limit: int) -> bool:
    """Whether a text has more than `limit` tokens. Returns False without tokenising for a text that
    is short enough to be tokenised completely soon."""
    return len(text) > limit * CHARACTERS_PER_TOKEN and longer(tokenizer, text, limit)


def longer(tokenizer: Any, text: str, limit: int) -> bool:
    """Whether `text` has more than `limit` tokens; tokenises no more of it than necessary."""
    return len(_encode_prefix(tokenizer, text, limit + 1)) > limit


def windows(tokenizer: Any, text: str, ctx: int, max_tokens: int | None = None) -> "Tensor":
    """Cut `text` into int64 windows [n, ctx] that do not overlap; the remainder is dropped.

    Each window begins with the tokenizer's `leading_tokens`; the rest of it is text. `max_tokens`
    bounds n * ctx. Tokenises only as much text as needed. Raises SettingError if not one window can
    be filled.
    """
    leading = leading_tokens(tokenizer)
    least = max(2, len(leading) + 1)
    if ctx < least:
        raise SettingError(f"`ctx`: {ctx} is too small; a window needs at least {least} tokens")
    if max_tokens is not None and max_tokens < ctx:
        raise SettingError(
            f"`max_tokens`: {max_tokens} is less than one window of `ctx={ctx}` tokens; take more,"
            " or a smaller `ctx`"
        )
    stride = ctx - len(leading)
    limit = None if max_tokens is None else max_tokens // ctx * stride
    ids = _encode_prefix(tokenizer, text, limit)
    num_windows = len(ids) // stride
    if num_windows == 0:
        raise SettingError(
            f"{len(ids)} tokens are available but one window of `ctx={ctx}` needs {stride};"
            " give more `text` or a smaller `ctx`"
        )
    import torch  # here, as the command line's help needs texts but no tensors

    rows = torch.tensor(ids[: num_windows * stride], dtype=torch.long).view(num_windows, stride)
    return torch.cat([rows.new_tensor(leading).expand(num_windows, -1), rows], dim=1)


def _encode_prefix(tokenizer: Any, text: str, limit: int | None) -> list[int]:
    """The first `limit` ids (None: all) of `text`, as tokenising all of it gives them."""
    if limit is None:
        return encode(tokenizer, text)
    characters = limit * CHARACTERS_PER_TOKEN
    while True:
        ids = encode(tokenizer, text[:characters])
        # Ids near the cut may differ from those of the whole text, so they are not used.
        if characters >= len(text) or len(ids) >= limit + 64:
            return ids[:limit]
        characters *= 2
