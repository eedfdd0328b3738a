"""How single tokens read inside a text: for logprobs."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvfold.engine.api.detokenizer import REPLACEMENT, Decode, Detokenizer, decoder_of
from kvfold.utils.tokens import encode


class TokenTexts:
    """Texts of tokens, each as it reads behind a letter, so that none loses its space."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = decoder_of(tokenizer, skip_special_tokens=False)
        self._before = encode(tokenizer, "a")
        self._prefix = self._decode(self._before)
        self.of = lru_cache(2**16)(self._of)

    def _of(self, token: int) -> str:
        text = self._decode([*self._before, token])
        return text.removeprefix(self._prefix) if text.startswith(self._prefix) else text


class Offsets:
    """Where tokens begin in a text, in characters: those of one character begin where it does.
    before: tokens that they follow; begun: how long the text is before them."""

    def __init__(self, decode: Decode, before: Sequence[int] = (), begun: int = 0) -> None:
        self._reader, self._length = Detokenizer(decode, before), begun

    def add(self, token: int) -> int:
        """Where the next token begins."""
        start = self._length
        self._reader.push([token])
        self._length += len(self._reader.take())
        return start


def utf8(text: str) -> list[int] | None:
    """Bytes of a token's text; None of a part of a character, which has no text."""
    return None if REPLACEMENT in text else list(text.encode())
