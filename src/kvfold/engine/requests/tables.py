"""Logit settings of a request as arrays, shared by all its choices and steps."""

from collections.abc import Sequence

import numpy as np

from kvfold.layout.pages import Ints

Word = tuple[int, ...]


class Tables:
    """Arrays of a request's logit settings.

    logit_bias: (token id, bias) pairs; the last pair of a token counts.
    allowed: tokens that may come (None: all).
    bad_words: forbidden token sequences.
    stop: stop tokens.

    biased, stop: int64, distinct token ids. bias: fp32, of `biased`.
    allowed_bits: bit mask int32 as in `Guide.allowed_tokens`, or None.
    """

    def __init__(
        self,
        *,
        logit_bias: Sequence[tuple[float, float]],
        allowed: Sequence[int] | None,
        bad_words: Sequence[Word],
        stop: Sequence[int],
    ) -> None:
        last = {int(token): value for token, value in logit_bias}
        self.biased: Ints = np.fromiter(last, np.int64, len(last))
        self.bias = np.fromiter(last.values(), np.float32, len(last))
        self.stop: Ints = np.unique(np.array(stop, dtype=np.int64))
        self.allowed_bits = None if allowed is None else _bits(np.array(allowed, dtype=np.int64))
        self._ends = _ends_by_beginning(bad_words)

    def ends(self, outputs: Sequence[int]) -> list[Ints]:
        """The last tokens of the bad words whose preceding tokens `outputs` ends with."""
        begun = (ends.get(tuple(outputs[-size:]) if size else ()) for size, ends in self._ends)
        return [tokens for tokens in begun if tokens is not None]


def _bits(tokens: Ints) -> np.ndarray:
    flags = np.zeros(tokens.max() // 32 * 32 + 32, dtype=np.uint8)
    flags[tokens] = 1
    return np.packbits(flags, bitorder="little").view("<i4")


def _ends_by_beginning(words: Sequence[Word]) -> list[tuple[int, dict[Word, Ints]]]:
    """Last tokens of bad words by number of preceding tokens and by these tokens, so that a step
    looks up each number once, however many bad words there are."""
    ends: dict[int, dict[Word, list[int]]] = {}
    for *begun, last in words:
        ends.setdefault(len(begun), {}).setdefault(tuple(begun), []).append(last)
    return [
        (size, {begun: np.array(tokens, dtype=np.int64) for begun, tokens in some.items()})
        for size, some in sorted(ends.items())
    ]
