"""LLM: text in, text out. A model with its tokenizer and an engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kvfold.cache.eviction.policy import Policy
from kvfold.config import CacheConfig, Setting, check_types, parse_share, settings_of
from kvfold.engine.api.detokenizer import Decode, StopStrings, decoder_of
from kvfold.engine.api.grammar import GrammarGuide, Grammars
from kvfold.engine.api.pack import Packer, Report, check_pages
from kvfold.engine.api.stream import OutputDecoder, Stream
from kvfold.engine.core.compression import Schedule
from kvfold.engine.core.engine import Engine, default_chunk, default_step_seconds, token_ids
from kvfold.engine.core.prefix_cache import PrefixCache, unsupported_reason
from kvfold.engine.core.shadow import Shadow
from kvfold.engine.requests.packed import PackedContext, layout_key
from kvfold.engine.requests.prompts import Prompt, as_list, check_params, spread
from kvfold.engine.requests.request import (
    CacheParams,
    FinishReason,
    Request,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.cache_summary import cache_summary
from kvfold.engine.runner.edits import logit_edits
from kvfold.engine.runner.original import check_original
from kvfold.engine.runner.trial import check_start, compile_kernels
from kvfold.hub.loading import check_loaded, load, load_config, load_tokenizer
from kvfold.layout.pages import Ints
from kvfold.maps.layers import learns_prompt, unwrapped
from kvfold.maps.named import base_and_maps
from kvfold.maps.sidecar import Sidecar
from kvfold.models.copies import shared_copy
from kvfold.models.rotary import position_limit
from kvfold.models.weights import Unchanged, fingerprint
from kvfold.utils.chat import render_chat
from kvfold.utils.errors import SettingError, renamed
from kvfold.utils.tokens import (
    check_tokenizer,
    encode,
    encode_all,
    encode_prompt,
    encode_start,
    most_characters,
    surely_longer,
)

PromptSpec = tuple[Prompt, SamplingParams | None, CacheParams | None]
# Fields of a CacheConfig that determine how cache entries are stored.
STORED = ("page", "bits", "zeros", "sub_group", "rotate", "format", "evict")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The outputs of one request.

    error: the error message if finish_reason is "error". prompt_logprobs: if requested, of all
        prompt tokens but the first.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """What requests share if their settings differ at most in the seed.

    textless: the settings without texts, for the engine. guide: at the beginning of the grammar.
        decode: token ids to text. stops: the compiled stop strings.
    """

    textless: SamplingParams
    guide: GrammarGuide | None
    decode: Decode | None
    stops: StopStrings | None


class LLM:
    """Text generation with continuous batching on one paged cache, from any number of threads.

    model: a name (directory, GGUF file, hub id, `reference:gqa`, or a folder of maps, which names
        its base model) or a loaded causal LM, folded or not. A loaded model does not change, unless
        `owned`.
    tokenizer: needed for text prompts of a loaded model.
    max_sequences: most requests that run at once.
    max_tokens: longest request, prompt and outputs (default: the model's positions).
    chunk: most prompt tokens of a request in one step (default: 2048 on CUDA, else 512). Four times
        as many if no request decodes and a kernel supports it. On a CPU fewer while requests
        decode, so that a step takes a quarter of a second.
    seed: of eviction policies that draw random numbers; requests have their own seeds.
    owned: nobody else uses the loaded model, so attention weights are not copied.
    prefix_caching: requests that share a prefix compute it once (default: if that changes no
        tokens; True: raise an error if it would). With `window`, the first tokens after a shared
        prefix have fewer exact tokens before them, which may change a token.
    maps: sidecar maps for a model of any type, or their folder or hub id (see `kvfold.attach`).
    shadow: share of the requests, such as 0.001 or "0.1%", that are scored again by the original
        model in idle time, to measure what compression loses; `engine.shadow.totals` has the sums.
        Not for folded models.
    settings: fields of `CacheConfig`: kv_bytes, bits, evict, keep_tokens, page and so on. With
        `evict`, a policy's name or a `kvfold.Policy`, every request needs a budget, from these
        settings or its own; keep_tokens=1 evicts nothing.

    Raises ValueError for settings that cannot work.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        device: str | None = None,
        dtype: str = "auto",
        max_sequences: int = 16,
        max_tokens: int | None = None,
        chunk: int | None = None,
        schedule: Schedule | None = None,
        seed: int = 0,
        owned: bool = False,
        prefix_caching: bool | None = None,
        maps: Sidecar | Path | str | None = None,
        shadow: float | str = 0.0,
        **settings: Any,
    ) -> None:
        check_types(LLM.__init__, locals())
        share = parse_share("shadow", shadow)
        for name, value in (("max_sequences", max_sequences), ("chunk", chunk)):
            Setting(least=1).check(name, value, int | None)
        check_tokenizer(tokenizer)
        self.cache = _cache(settings)
        if isinstance(model, str | Path):
            model, maps = base_and_maps(model, maps)
        beside = Sidecar.load(maps) if isinstance(maps, str | Path) else maps
        if isinstance(model, str):
            config = load_config(model)
            if share:
                check_original(config)
            if beside is not None:
                beside.check_config(config)
            tokenizer = tokenizer or load_tokenizer(model)
            model = load(model, dtype=dtype, device=device)
            owned = True
        else:
            model = model if beside is None or learns_prompt(model) else unwrapped(model)
            check_loaded(model, device, dtype)
        self.tokenizer = tokenizer
        self._fingerprint = fingerprint(model)
        if share:
            check_original(model.config)
        original = shared_copy(model) if share else None
        max_tokens = _max_tokens(model.config, max_tokens)
        self.runner = build_runner(
            model,
            self.cache,
            num_slots=max_sequences,
            max_tokens=max_tokens,
            seed=seed,
            owned=owned,
            tokenizer=tokenizer,
            maps=beside,
        )
        self._unchanged = None if owned else Unchanged(model)
        if self.runner.device.type == "cuda":
            compile_kernels(self.runner)
        self.runner.warm_up()
        check_start(self.runner)
        self.model = self.runner.model
        device_type = self.runner.pool.device.type
        chunk = default_chunk(device_type) if chunk is None else chunk
        self.engine = Engine(
            self.runner,
            self.runner.pool,
            eos_ids=_eos_ids(self.model),
            chunk=chunk,
            max_batch_tokens=max(4 * chunk, max_sequences),
            step_seconds=default_step_seconds(device_type),
            schedule=schedule,
            prefix_cache=self._prefix_cache(prefix_caching),
            shadow=Shadow(original, self.runner.family, share, seed) if share else None,
        )

    def _prefix_cache(self, wanted: bool | None) -> PrefixCache | None:
        """The engine's prefix cache, or None. Raises SettingError if prefix caching is requested
        but would change tokens."""
        runner = self.runner
        has = {"windows": bool(runner.sliding), "repairs": runner.repair is not None}
        self.shares_no_prefix = unsupported_reason(runner.pool, runner.policy, **has)
        if wanted and self.shares_no_prefix:
            raise SettingError(
                f"`prefix_caching=True` would change tokens: {self.shares_no_prefix}. Leave it out"
            )
        if wanted is False and not self.shares_no_prefix:
            self.shares_no_prefix = "prefix_caching=False"
        layout = runner.pool.layout
        if runner.sliding or layout.residual or layout.spec.hybrid is not None:
            return None
        return PrefixCache(runner.pool, runner.policy, blocks=self.shares_no_prefix is None)

    def pack(
        self,
        text: Prompt,
        *,
        factor: float = 100.0,
        measure: bool = True,
        progress: Report | None = None,
    ) -> PackedContext:
        """Compress the cache of a text once, so that any number of requests can start from it.

        text: text or token ids.
        factor: compression compared with 16 bits uncompressed, including the compression by
            dimensions and bits. Eviction keeps whole pages of each group on average, at least one,
            and never fewer tokens than the policy protects.
        measure: let the model repeat a sample of the text, to measure the loss.
        progress: called with (phase, done, total).

        Running requests wait meanwhile. Raises ValueError if eviction is needed but not set up, if
        the text does not fit the model or the pool, or if `max_sequences` requests are running.
        """
        Setting(least=1).check("factor", factor, float | int)
        with renamed(prompt="text"):
            ids = self._encode(text, encode_start)
        if isinstance(self.cache.evict, Policy):
            raise SettingError(
                "`evict`: a packed context stores its policy by name, and this one is an object: "
                "give a name, such as 'kvzip'"
            )
        with self.engine.lock.hold():
            packer = Packer(self.runner, self.tokenizer, self.engine.scheduler.chunk, progress)
            return self._packed(ids, *packer.pack(ids, factor, measure))

    def pack_entries(self, ids: list[int], entries: Iterable[Tensor]) -> PackedContext:
        """Pack a text whose cache entries were computed elsewhere by this LLM's model, as
        `kvfold.parallel` does.

        ids: the N tokens. entries: of each layer in order, [N, R].

        Running requests wait meanwhile. Raises SettingError if the text does not fit, or if
        `max_sequences` requests are running.
        """
        full_bytes = 2 * self.runner.pool.layout.spec.geometry.full_numbers * len(ids)
        with self.engine.lock.hold():
            packer = Packer(self.runner, self.tokenizer, self.engine.scheduler.chunk, None)
            lengths, pages = packer.store(ids, entries)
        return self._packed(ids, lengths, pages, {"full_bytes": full_bytes, "loss": None})

    def _packed(
        self, ids: list[int], lengths: Ints, pages: list[Tensor], report: dict[str, Any]
    ) -> PackedContext:
        stored = {x: getattr(self.cache, x) for x in STORED}
        settings = stored | {"page": self.runner.pool.layout.page}
        origin = {"key": self._context_key, "settings": settings, "report": report}
        return PackedContext(
            token_ids=tuple(ids), lengths=lengths, pages=tuple(pages), origin=origin
        )

    @property
    def _context_key(self) -> dict[str, str]:
        """Identifies model and layout: a packed context must have the same key."""
        layout = layout_key(self.runner.pool.layout, self.cache.rotate)
        return {"model": self._fingerprint, "layout": layout}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheParams | Sequence[CacheParams] | None = None,
        context: PackedContext | None = None,
    ) -> list[Completion]:
        """Complete prompts. Returns one completion per prompt, in order.

        prompts: text, token ids, or a list of either. sampling, cache: for all prompts, or one
            each. context: packed context that all prompts follow.

        Raises ValueError, before any prompt runs, if one can never be served.
        """
        items = as_list(prompts)
        specs = zip(
            items, spread("sampling", sampling, items), spread("cache", cache, items), strict=True
        )
        requests = RequestBuilder(self, context, whole=True).requests(list(specs))
        outputs: dict[int, list[StepOutput]] = {request.id: [] for request, _ in requests}
        with Stream(self.engine).submit(requests) as stream:
            for output in stream:
                outputs[output.id].append(output)
        return [completion_of(request_outputs) for request_outputs in outputs.values()]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
        context: PackedContext | None = None,
    ) -> Stream:
        """The outputs of one request as they come. Leaving the loop early cancels the request.
        Several streams may be read in turn, or in threads: their requests run together. Raises
        ValueError at once."""
        return Stream(self.engine).submit([self.request(prompt, sampling, cache, context=context)])

    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
    ) -> Completion:
        """The assistant's answer to a conversation, by the tokenizer's chat template.

        messages: dicts {"role": "system", "user" or "assistant", "content": text}, or the text of
            one user message. Raises ValueError if there is no chat template.
        """
        (completion,) = self.generate([self.encode_chat(messages)], sampling, cache=cache)
        return completion

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        cache: CacheParams | None = None,
    ) -> int:
        """Queue a request, and return its id. `engine.step` returns its outputs, tokens without
        text.

        Raises ValueError for a prompt that can never be served, or a budget that does not fit this
        LLM's eviction.
        """
        request, _ = self.request(prompt, sampling, cache)
        self.engine.submit(request)
        return request.id

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        cache: CacheParams | None,
        *,
        whole: bool = False,
        context: PackedContext | None = None,
    ) -> tuple[Request, OutputDecoder]:
        """Create and check a request, and the decoder of its outputs. For drivers, which submit it
        themselves. whole: decode the text at once when the request ends."""
        (opened,) = RequestBuilder(self, context, whole=whole).requests([(prompt, sampling, cache)])
        return opened

    def shared(self, sampling: SamplingParams) -> "SharedSettings":
        """What all requests share whose settings differ from these at most in the seed. Raises like
        `request`."""
        names = "stop_token_ids, allowed_token_ids, bad_words and logit_bias"
        self._check_ids(names, sampling.named_tokens)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling.stop} needs a tokenizer: pass tokenizer= to LLM")
        guide = self.grammars.guide(sampling) if sampling.guided else None
        textless = replace(sampling, stop=(), bad_words=self._bad_ids(sampling))
        # Before the first output all these requests have the same logit edits.
        first = Request(id=0, token_ids=[], num_prompt=0, sampling=textless, guide=guide)
        edits = logit_edits([first], self.engine.eos_ids)
        if edits is not None and edits.refused:
            raise edits.refused[0]
        decode = (
            decoder_of(self.tokenizer, sampling.skip_special_tokens) if self.tokenizer else None
        )
        stops = StopStrings(sampling.stop) if sampling.stop else None
        return SharedSettings(textless=textless, guide=guide, decode=decode, stops=stops)

    def choice(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        cache: CacheParams | None,
        shared: "SharedSettings",
        *,
        whole: bool = False,
        context: PackedContext | None = None,
    ) -> tuple[Request, OutputDecoder]:
        """Create a request and its decoder, like `request`, from token ids (including those of the
        context) and from `shared` settings, which differ from `sampling` at most in the seed."""
        self._check_budget(cache or CacheParams())
        textless = shared.textless.changed(seed=sampling.seed)
        guide = shared.guide.copy() if shared.guide is not None else None
        request = self.engine.request(ids, textless, cache, guide, context)
        decoder = OutputDecoder(shared.decode, ids, sampling, whole=whole, stops=shared.stops)
        return request, decoder

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of this tokenizer. Raises SettingError if grammars are not supported
        here."""
        vocab = self.model.get_output_embeddings().weight.shape[0]
        return Grammars(self.tokenizer, vocab, self.engine.eos_ids)

    def check_weights(self) -> None:
        """Raises SettingError if the owner of a loaded model has changed its weights: the LLM
        shares some of them, and has copies of others."""
        changed = self._unchanged and self._unchanged.first()
        if changed:
            raise SettingError(
                f"`model`: {changed} has changed since this LLM was made, which copies some weights"
                " and shares others: make a new LLM of the model, or change a copy"
            )

    def _bad_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of bad words, at the beginning of a text and after other words."""
        words = [x for x in sampling.bad_words if isinstance(x, str)]
        if words and self.tokenizer is None:
            raise ValueError(f"bad_words={words} needs a tokenizer: pass tokenizer= to LLM")
        bad_ids = [x for x in sampling.bad_words if not isinstance(x, str)]
        texts = [text for word in words for text in (word, f" {word}")]
        with renamed(text="bad_words"):
            bad_ids += map(tuple, encode_all(self.tokenizer, texts))
        return tuple(dict.fromkeys(filter(None, bad_ids)))  # without texts that have no tokens

    def encode_after(self, context: PackedContext | None, prompt: Prompt) -> list[int]:
        """Token ids of a context and the prompt after it, without another start token."""
        self.check_size(prompt)
        if context is None:
            return self.encode(prompt)
        self.check_context(context)
        if isinstance(prompt, str) and self.tokenizer is not None:
            with renamed(text="prompt"):
                prompt = encode(self.tokenizer, prompt)
        return [*context.token_ids, *self.encode(prompt)]

    def check_size(self, prompt: Prompt) -> None:
        """Raises SettingError for a prompt that is longer than any sequence, without tokenising all
        of it."""
        most = self.runner.pool.max_tokens
        if isinstance(prompt, str) and len(prompt) > most_characters(most):
            raise SettingError(
                f"the prompt has {len(prompt)} characters, and at most {most_characters(most)} are "
                "tokenised: shorten it"
            )
        if isinstance(prompt, str):
            too_long = self.tokenizer is not None and surely_longer(self.tokenizer, prompt, most)
        else:
            too_long = isinstance(prompt, Sized) and len(prompt) > most
        if too_long:
            count = f"over {most}" if isinstance(prompt, str) else len(prompt)
            raise SettingError(
                f"the prompt has {count} tokens, and `max_tokens` is {most}: shorten the prompt, "
                "or raise `max_tokens` if the model has more positions"
            )

    def check_context(self, context: PackedContext) -> None:
        """Raises ValueError if requests to this LLM cannot start from a context."""
        if not isinstance(context, PackedContext):
            raise ValueError(
                f"context must be a PackedContext, of LLM.pack or PackedContext.load; got "
                f"{context!r:.100}"
            )
        check_pages(self.runner)
        context.check(self._context_key)
        self._check_ids("context", [context.largest_id])
        if not self.runner.pool.can_load(context.lengths, context.pages):
            raise SettingError(
                "`context` has pages of other sizes than its token entries need: pack it again"
            )
        tokens, most = len(context.token_ids), self.runner.pool.max_tokens
        if tokens >= most:
            raise SettingError(
                f"`context` has {tokens} tokens, and `max_tokens` is {most}: raise `max_tokens` if "
                "the model has more positions"
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, including the tokenizer's special tokens. Token ids are only
        checked."""
        return self._encode(prompt, encode_prompt)

    def _encode(self, prompt: Prompt, how: Callable[[Any, str], list[int]]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt is text, but this LLM has no tokenizer: pass tokenizer=")
            with renamed(text="prompt"):
                prompt = how(self.tokenizer, prompt)
        ids = token_ids(prompt)
        self._check_ids("prompt", ids)
        return ids

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        size = self.model.get_input_embeddings().num_embeddings
        if wrong := [i for i in ids if not 0 <= i < size]:
            raise ValueError(f"{name}: token ids must be in 0..{size - 1}; got {wrong[0]}")

    def encode_chat(
        self, messages: str | Sequence[Mapping[str, Any]], /, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation by the chat template, to which `variables` are passed. Raises
        ValueError for one that is longer than any sequence, and like `text.render_chat`."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template: pass tokenizer= to LLM")
        text = render_chat(self.tokenizer, messages, **variables)
        self.check_size(text)
        return encode(self.tokenizer, text)

    def _check_budget(self, cache: CacheParams) -> None:
        """Raises ValueError if the budgets of LLM and request do not fit this LLM's eviction."""
        config, evict = self.cache, self.cache.evict
        if evict is None and cache.limited:
            raise ValueError(
                f"cache={cache} limits what a request keeps, but this LLM evicts nothing: give it "
                "a policy, such as evict='kv-compress'"
            )
        budgets = (
            config.keep_tokens,
            config.max_cache_tokens,
            cache.keep_tokens,
            cache.max_cache_tokens,
        )
        if evict is not None and not any(budgets):
            raise ValueError(
                f"evict={str(evict)!r} needs a budget: set keep_tokens or max_cache_tokens of the "
                "LLM or of the request; keep_tokens=1 evicts nothing"
            )

    def summary(self) -> list[tuple[str, str]]:
        """(name, value) pairs about sizes and capacity, which a server prints when it starts."""
        shares = "on" if self.shares_no_prefix is None else f"off: {self.shares_no_prefix}"
        return [*cache_summary(self.runner, self.cache), ("prefix caching", shares)]


class RequestBuilder:
    """Creates requests that belong together: a prompt that several of them share is tokenised once,
    and shared settings are checked once. context, whole: see `LLM.request`."""

    def __init__(self, llm: LLM, context: PackedContext | None, *, whole: bool = False) -> None:
        self.llm, self.context, self.whole = llm, context, whole
        self._default = SamplingParams()
        self._shared: dict[tuple[int, ...], SharedSettings] = {}
        self._prompts: dict[str | int, list[int]] = {}

    def requests(self, specs: Sequence[PromptSpec]) -> list[tuple[Request, OutputDecoder]]:
        """Create requests. Their prompts and settings must stay alive between calls. Raises like
        `LLM.request`."""
        self.llm.check_weights()
        return [self._request(*spec) for spec in specs]

    def _request(
        self, prompt: Prompt, sampling: SamplingParams | None, cache: CacheParams | None
    ) -> tuple[Request, OutputDecoder]:
        check_params(sampling, cache)
        sampling = sampling or self._default
        name = prompt if isinstance(prompt, str) else id(prompt)
        if name not in self._prompts:
            self._prompts[name] = self.llm.encode_after(self.context, prompt)
        shared = self._shared.get(sampling.identity_but_seed) or self.llm.shared(sampling)
        self._shared[sampling.identity_but_seed] = shared
        ids, context = self._prompts[name], self.context
        return self.llm.choice(ids, sampling, cache, shared, whole=self.whole, context=context)


def _cache(settings: dict[str, Any]) -> CacheConfig:
    known = settings_of(CacheConfig)
    if unknown := settings.keys() - known.keys():
        legal = ", ".join(known)
        raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}; of the cache: {legal}")
    return CacheConfig(**settings)


def _max_tokens(config: Any, wanted: int | None) -> int:
    """The longest request: `wanted`, or the model's positions. Raises ValueError if `wanted` is
    larger, or if neither is known."""
    limit = position_limit(config)
    if wanted is None:
        if limit is not None:
            return limit
        raise SettingError(
            f"`max_tokens` must be set: model type {config.model_type!r} states no number of"
            " positions"
        )
    if not 0 < wanted <= (limit or wanted):
        legal = "at least 1" if limit is None else f"in 1..{limit}, the model's positions"
        raise ValueError(f"max_tokens must be {legal}; got {wanted}")
    return wanted


def _eos_ids(model: Any) -> list[int]:
    eos_ids = model.generation_config.eos_token_id
    if eos_ids is None:
        return []
    return list(eos_ids) if isinstance(eos_ids, list | tuple) else [eos_ids]


def completion_of(outputs: list[StepOutput]) -> Completion:
    """Join a request's outputs to one completion."""
    last = outputs[-1]
    assert last.finish_reason is not None
    logprobs = [item for output in outputs for item in output.logprobs or ()]
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=last.finish_reason,
        logprobs=tuple(logprobs) if last.logprobs is not None else None,
        error=last.error,
        prompt_logprobs=next(
            (x.prompt_logprobs for x in outputs if x.prompt_logprobs is not None), None
        ),
    )
