"""Settings of one request: how its tokens are chosen, and what it may keep."""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral

from kvfold.config import SEEDS, check, setting, settings_of
from kvfold.engine.requests.tables import Tables
from kvfold.utils.errors import SettingError
from kvfold.utils.tokens import check_text

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it says nothing more


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Raises ValueError.

    temperature: 0 is greedy. top_k, then top_p, limit what temperature leaves (None, 1: no limit).
    min_p: nor is a token taken that is less likely than this share of the likeliest.
    seed: the same seed gives the same tokens (None: from entropy). stop: strings that end the text,
    which is cut before them; stop_token_ids: tokens that do, and are no text. min_tokens: before so
    many no end token, and none of these, is taken. skip_special_tokens: these are no text.
    logprobs: how many of the likeliest tokens are reported beside the chosen one (None: nothing
    is), before all that changes or limits what is likely; prompt_logprobs: so many beside every
    token of the prompt but the first. No rows of others are taken then: nothing was read.
    logit_bias: what is added to tokens' logits, a dict or (token id, bias) pairs.
    presence_penalty, frequency_penalty: taken off the logits of outputs, once, and for each time.
    repetition_penalty: divides positive logits of all tokens so far, and multiplies others.
    allowed_token_ids: no others are taken (None: all are). bad_words: texts, or their token ids,
    that do not come: never the last of their tokens behind the others.
    json_schema, regex: what the whole text keeps to, and ends where it is complete; a schema is a
    dict, a bool or its text.
    """

    max_new_tokens: int = setting(128, "Most tokens to add.", least=1)
    temperature: float = setting(0.0, "Sample at this temperature; 0 is greedy.", least=0)
    top_k: int | None = setting(None, "Sample from the K likeliest tokens only.", least=1)
    top_p: float = setting(
        1.0, "Sample from the likeliest tokens that hold this probability only.", above=0, most=1
    )
    min_p: float = setting(0.0, "Least share of the likeliest's probability.", least=0, most=1)
    seed: int | None = setting(None, "Of the sampling.", **SEEDS)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = setting(0, "Tokens before an end.", least=0)
    ignore_eos: bool = setting(False, "Go on after an end token.")
    skip_special_tokens: bool = setting(True, "Show no special tokens.")
    logprobs: int | None = setting(None, "Likeliest tokens to report.", least=0)
    prompt_logprobs: int | None = setting(None, "The same of the prompt.", least=0)
    logit_bias: tuple[tuple[float, float], ...] = ()
    presence_penalty: float = setting(0.0, "Of tokens said.", least=-2, most=2)
    frequency_penalty: float = setting(0.0, "Of every time said.", least=-2, most=2)
    repetition_penalty: float = setting(1.0, "Of all tokens so far.", least=0.01, most=100)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    json_schema: str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        if isinstance(self.json_schema, Mapping | bool):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        check(self)
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", tuple(map(tuple, self.logit_bias)))
        if not all(self.stop):
            raise ValueError(f"stop must be strings that are not empty; got {self.stop!r}")
        self._check_logit_bias()
        self._check_allowed()

    def _check_logit_bias(self) -> None:
        for pair in self.logit_bias:
            if len(pair) != 2 or not (isinstance(pair[0], Integral) and abs(pair[1]) <= 100):
                raise SettingError(
                    "`logit_bias` must give token ids a number in -100..100; got "
                    f"{':'.join(map(str, pair))}"
                )

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise SettingError("`allowed_token_ids` must name at least 1 token; got none")
        words = tuple(x if isinstance(x, str) else tuple(x) for x in self.bad_words)
        object.__setattr__(self, "bad_words", words)
        if not all(words):
            raise SettingError(f"`bad_words` must be texts that are not empty; got {words!r}")
        if not self.guided:
            return
        if self.json_schema is not None and self.regex is not None:
            raise SettingError("`json_schema` and `regex` both say what the text is: give one")
        if self.min_tokens or self.ignore_eos:
            raise SettingError(
                f"`{'regex' if self.json_schema is None else 'json_schema'}` says itself where the "
                "text ends: leave out `min_tokens` and `ignore_eos`"
            )

    @property
    def guided(self) -> bool:
        """Whether a grammar says what the text is."""
        return self.json_schema is not None or self.regex is not None

    @cached_property
    def penalises(self) -> bool:
        """Whether tokens so far change logits."""
        neutral = (0, 0, 1)
        return neutral != (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)

    @cached_property
    def edits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        asked = (self.penalises, self.logit_bias, self.min_tokens, self.bad_words, self.guided)
        return any(asked) or self.allowed_token_ids is not None

    @cached_property
    def tables(self) -> Tables:
        """What these settings say of logits, where bad words are token ids."""
        return Tables(
            logit_bias=self.logit_bias,
            allowed=self.allowed_token_ids,
            bad_words=[tuple(map(int, word)) for word in self.bad_words],
            stop=self.stop_token_ids,
        )

    def changed(self, **numbers: int | None) -> "SamplingParams":
        """The same but for `seed` or `max_new_tokens`. The others are not checked again, and what
        was made of them is shared: they may be large, and a request has many choices."""
        known = settings_of(SamplingParams)
        choice = copy(self)
        for name, value in numbers.items():
            assert name in ("seed", "max_new_tokens"), name
            kind, setting = known[name]
            setting.check(name, value, kind)
            object.__setattr__(choice, name, value)
        return choice

    @property
    def but_seed(self) -> tuple[int, ...]:
        """The same number for each setting of settings that `changed` made of the same ones, while
        these are alive."""
        return tuple(id(getattr(self, x.name)) for x in fields(self) if x.name != "seed")

    @property
    def named_tokens(self) -> tuple[int, ...]:
        """Tokens that these settings name."""
        found = [*self.stop_token_ids, *(self.allowed_token_ids or ())]
        found += [id for word in self.bad_words if not isinstance(word, str) for id in word]
        return (*found, *(int(token) for token, _ in self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, kw_only=True)
class CacheParams:
    """How many tokens' rows a request may keep after compression. Raises ValueError.

    max_cache_tokens: rows a group on average. keep_tokens: fraction of the tokens seen so far.
    Neither: nothing is evicted. protected: most recent tokens that are never evicted (None: as the
    policy says). every: once it is over its budget again, it is compressed again, at most once in
    so many tokens (None: after its prompt, and where pages are short). prefix_caching: whether it
    takes rows that others computed, and they may have its own; cache_salt: of those with the same
    one alone.
    """

    max_cache_tokens: int | None = setting(None, "Tokens to keep, averaged over heads.", least=1)
    keep_tokens: float | None = setting(None, "Share of the tokens to keep.", above=0, most=1)
    protected: int | None = setting(None, "Most recent tokens that stay.", least=0)
    every: int | None = setting(None, "Tokens between compressions while it generates.", least=1)
    prefix_caching: bool = field(default=True, repr=False)
    cache_salt: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check(self)
        check_text("cache_salt", self.cache_salt or "")
        most, keep, protected = self.max_cache_tokens, self.keep_tokens, self.protected
        if most is not None and keep is not None:
            raise ValueError(
                f"max_cache_tokens={most} and keep_tokens={keep} both limit the cache: give one"
            )
        if most is not None and protected is not None and protected > most:
            raise ValueError(f"protected must be at most max_cache_tokens={most}; got {protected}")

    @property
    def limited(self) -> bool:
        """Whether it says what is evicted."""
        found = (self.max_cache_tokens, self.keep_tokens, self.protected, self.every)
        return any(x is not None for x in found)
