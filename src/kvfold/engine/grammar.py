"""Text that keeps to a JSON schema or a regular expression: which tokens may come next, by
xgrammar, an extra.

Shapes: V vocabulary.
"""

import re
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from kvfold.engine.request import SamplingParams
from kvfold.errors import SettingError
from kvfold.text import check_text

CACHE_BYTES = 2**28  # of compiled grammars
BOTH = "`json_schema` and `regex`"
_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # of an error, in xgrammar's source


class Guide:
    """One sequence's place in a grammar; see `request.Guide`."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._num_read = matcher, 0
        self._bits = np.empty((1, -(-vocab // 32)), dtype=np.int32)

    def allowed(self, outputs: Sequence[int]) -> np.ndarray:
        """Reads the outputs that came since the last call: a step that is run again, or a prompt
        prefilled again, changes nothing."""
        for token in outputs[self._num_read :]:
            if not self._matcher.accept_token(token):
                raise RuntimeError(f"token {token} is none that the grammar allows")
            self._num_read += 1
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._bits[0].copy()


class Grammars:
    """Grammars for a tokenizer, each compiled once and kept. vocab: V of the logits. eos_ids: what
    ends a text that is complete. Raises SettingError where something is missing."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Collection[int]) -> None:
        if find_spec("xgrammar") is None:
            raise SettingError(f'{BOTH} need xgrammar: pip install "kvfold[structured]"')
        if tokenizer is None:
            raise SettingError(f"{BOTH} need a tokenizer: pass tokenizer= to LLM")
        if not eos_ids:
            raise SettingError(f"{BOTH} need a model that has an end token")
        import xgrammar

        self._vocab, self._matcher = vocab, xgrammar.GrammarMatcher
        known = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab, stop_token_ids=sorted(eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(
            known, max_threads=1, cache_limit_bytes=CACHE_BYTES
        )

    def guide(self, sampling: SamplingParams) -> Guide:
        """A sequence's, from its beginning. Raises SettingError for a grammar that is none."""
        name = "regex" if sampling.json_schema is None else "json_schema"
        check_text(name, text := getattr(sampling, name))
        try:
            if name == "regex":
                found = self._compiler.compile_regex(text)
            else:
                # On one line: a small model may never leave the white space that JSON allows.
                found = self._compiler.compile_json_schema(text, any_whitespace=False)
        except RuntimeError as error:
            why = _PLACE.sub("", str(error)).strip()
            raise SettingError(f"`{name}` cannot be followed: {why:.300}") from None
        return Guide(self._matcher(found), self._vocab)
