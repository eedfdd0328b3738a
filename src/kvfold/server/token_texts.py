"""Text and offset of single tokens, for logprobs."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvfold.engine.api.detokenizer import REPLACEMENT, Decode, Detokenizer, decoder_of
from kvfold.utils.tokens import encode


class TokenTexts:
    """Text of each token as it reads after a letter, so that a leading space is not lost."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = decoder_of(tokenizer, skip_special_tokens=False)
        self._before = encode(tokenizer, "a")
        self._prefix = self._decode(self._before)
        self.of = lru_cache(2**16)(self._of)

    def _of(self, token: int) -> str:
        text = self._decode([*self._before, token])
        return text.removeprefix(self._prefix) if text.startswith(self._prefix) else text


class Offsets:
    """Character offsets of successive tokens in a text. Tokens that share a character have its
    offset.

    before: tokens in front of the first one, for decoding.
    start_offset: length of the text before it.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = (), start_offset: int = 0) -> None:
        self._reader, self._length = Detokenizer(decode, before), start_offset

    def add(self, token: int) -> int:
        """Append a token and return its offset."""
        offset = self._length
        self._reader.push([token])
        self._length += len(self._reader.take())
        return offset


def utf8(text: str) -> list[int] | None:
    """UTF-8 bytes of a token's text; None if the token is part of a character."""
    return None if REPLACEMENT in text else list(text.encode())
