"""Settings of one request: how its tokens are sampled, and how much of its cache it keeps."""

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

GREEDY_BELOW = 1e-5  # a lower temperature counts as greedy
GRAMMARS = ("json_schema", "regex", "structural_tag")  # settings that are grammars of the text


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are sampled, and when it ends. Raises ValueError.

    max_new_tokens: most outputs.
    temperature: 0 is greedy.
    top_k, then top_p: limit the tokens after temperature (None, 1: no limit).
    min_p: drops tokens less likely than this share of the likeliest one.
    seed: the same seed gives the same tokens (None: from entropy).
    stop: strings that end the text, which is cut before them.
    stop_token_ids: tokens that end the request and are not part of the text.
    min_tokens: number of outputs before which no end token or stop token is sampled.
    skip_special_tokens: leave special tokens out of the text.
    logprobs: number of likeliest tokens to report for each output, in addition to the chosen one
        (None: no log-probabilities), before any setting changes the logits.
    prompt_logprobs: the same for each prompt token but the first. The request then uses no prefix
        cache.
    logit_bias: added to the logits of tokens; a dict or (token id, bias) pairs.
    presence_penalty, frequency_penalty: subtracted from the logits of outputs, once, and per
        occurrence.
    repetition_penalty: divides positive logits of all prompt and output tokens, and multiplies
        negative ones.
    allowed_token_ids: the only tokens that are sampled (None: all).
    bad_words: texts or token id sequences that are never generated: after their other tokens, the
        last one is forbidden.
    json_schema, regex: grammar of the whole text, which ends when it is complete. A schema is a
        dict, a bool or its JSON text.
    structural_tag: the same as xgrammar's structural tag, a dict or its JSON text: text with parts
        that follow schemas, such as tool calls.
    """

    max_new_tokens: int = setting(128, "Most tokens to generate.", least=1)
    temperature: float = setting(0.0, "Sample at this temperature; 0 is greedy.", least=0)
    top_k: int | None = setting(None, "Sample from the K likeliest tokens only.", least=1)
    top_p: float = setting(
        1.0, "Sample from the likeliest tokens with this total probability only.", above=0, most=1
    )
    min_p: float = setting(
        0.0, "Least probability, as a share of the likeliest token's.", least=0, most=1
    )
    seed: int | None = setting(None, "Seed of the sampling.", **SEEDS)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = setting(0, "Outputs before an end token may come.", least=0)
    ignore_eos: bool = setting(False, "Continue after an end token.")
    skip_special_tokens: bool = setting(True, "Leave special tokens out of the text.")
    logprobs: int | None = setting(None, "Likeliest tokens to report for each output.", least=0)
    prompt_logprobs: int | None = setting(
        None, "Likeliest tokens to report for each prompt token.", least=0
    )
    logit_bias: tuple[tuple[float, float], ...] = ()
    presence_penalty: float = setting(
        0.0, "Subtracted from the logits of tokens in the output.", least=-2, most=2
    )
    frequency_penalty: float = setting(
        0.0, "Subtracted per occurrence in the output.", least=-2, most=2
    )
    repetition_penalty: float = setting(1.0, "Penalty of all tokens so far.", least=0.01, most=100)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        if isinstance(self.json_schema, Mapping | bool):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        if isinstance(self.structural_tag, Mapping):
            object.__setattr__(self, "structural_tag", json.dumps(self.structural_tag))
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
        first, *others = self.grammars
        if others:
            raise SettingError(f"`{first}` and `{others[0]}` both say what the text is: give one")
        if self.min_tokens or self.ignore_eos:
            raise SettingError(
                f"`{first}` says itself where the text ends: leave out `min_tokens` and "
                "`ignore_eos`"
            )

    @property
    def guided(self) -> bool:
        """Whether a grammar constrains the text."""
        return bool(self.grammars)

    @property
    def grammars(self) -> list[str]:
        """Names of the settings that constrain the text by a grammar; at most one."""
        return [name for name in GRAMMARS if getattr(self, name) is not None]

    @cached_property
    def penalises(self) -> bool:
        """Whether a penalty for earlier tokens changes logits."""
        neutral = (0, 0, 1)
        return neutral != (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)

    @cached_property
    def edits(self) -> bool:
        """Whether any setting changes logits before a token is sampled."""
        active = (self.penalises, self.logit_bias, self.min_tokens, self.bad_words, self.guided)
        return any(active) or self.allowed_token_ids is not None

    @cached_property
    def tables(self) -> Tables:
        """The logit settings as arrays. Bad words must be token ids."""
        return Tables(
            logit_bias=self.logit_bias,
            allowed=self.allowed_token_ids,
            bad_words=[tuple(map(int, word)) for word in self.bad_words],
            stop=self.stop_token_ids,
        )

    def changed(self, **numbers: int | None) -> "SamplingParams":
        """A copy with another `seed`, `max_new_tokens` or `logprobs`. Other settings may be large,
        and a request may have many choices: they are shared, and not checked again."""
        known = settings_of(SamplingParams)
        changed = copy(self)
        for name, value in numbers.items():
            assert name in ("seed", "max_new_tokens", "logprobs"), name
            kind, setting = known[name]
            setting.check(name, value, kind)
            object.__setattr__(changed, name, value)
        return changed

    @property
    def identity_but_seed(self) -> tuple[int, ...]:
        """A key that is equal for settings that `changed` made from the same settings, as long as
        these are alive, if at most the seed differs."""
        return tuple(id(getattr(self, x.name)) for x in fields(self) if x.name != "seed")

    @property
    def named_tokens(self) -> tuple[int, ...]:
        """All token ids in these settings."""
        tokens = [*self.stop_token_ids, *(self.allowed_token_ids or ())]
        tokens += [id for word in self.bad_words if not isinstance(word, str) for id in word]
        return (*tokens, *(int(token) for token, _ in self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, kw_only=True)
class CacheParams:
    """How many cache entries a request keeps after compression. Raises ValueError.

    max_cache_tokens: cache entries per group, on average.
    keep_tokens: fraction of the tokens seen so far. If neither is set, nothing is evicted.
    protected: most recent tokens that are never evicted (None: as the policy says).
    every: compress again once it is above its budget, at most once in so many tokens (None: only
        after its prompt and if pages run out).
    prefix_caching: whether it uses cached prefixes and adds to them.
    cache_salt: share prefixes only with requests that have the same salt.
    compress_after: compress once so many tokens of the prompt are in the cache; the rest of the
        prompt follows, one token per step (None: all of the prompt).
    """

    max_cache_tokens: int | None = setting(None, "Tokens to keep, averaged over heads.", least=1)
    keep_tokens: float | None = setting(None, "Share of the tokens to keep.", above=0, most=1)
    protected: int | None = setting(None, "Most recent tokens that stay.", least=0)
    every: int | None = setting(None, "Tokens between compressions while it generates.", least=1)
    prefix_caching: bool = field(default=True, repr=False)
    cache_salt: str | None = field(default=None, repr=False)
    compress_after: int | None = field(default=None, repr=False)

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
        """Whether any setting of eviction is given."""
        limits = (self.max_cache_tokens, self.keep_tokens, self.protected, self.every)
        return any(x is not None for x in limits)
