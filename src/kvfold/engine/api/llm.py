"""Text in, text out: a model, its tokenizer and an engine."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvfold.cache.eviction.policy import Policy
from kvfold.config import CacheConfig, Setting, check_types, settings_of
from kvfold.engine.api.detokenizer import Decode, StopStrings, decoder_of
from kvfold.engine.api.grammar import Grammars, Guide
from kvfold.engine.api.pack import Packer, Report, check_pages
from kvfold.engine.api.stream import Answer, Stream
from kvfold.engine.core.compressions import Schedule
from kvfold.engine.core.engine import Engine, default_chunk, default_step_seconds, token_ids
from kvfold.engine.core.prefixes import PrefixCache, refusal
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
from kvfold.engine.runner.edits import edits_of
from kvfold.engine.runner.sizes import sizes
from kvfold.engine.runner.trial import check_start
from kvfold.hub.loading import check_loaded, load, load_config, load_tokenizer
from kvfold.maps.layers import learns_prompt, unwrapped
from kvfold.maps.named import base_and_maps
from kvfold.maps.sidecar import Sidecar
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

Asked = tuple[Prompt, SamplingParams | None, CacheParams | None]
# Settings that say how rows are stored, of a CacheConfig.
STORED = ("page", "bits", "zeros", "sub_group", "rotate", "format", "evict")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request's outputs. error says why, where finish_reason is "error". prompt_logprobs: of all
    but the prompt's first token, where they are wanted."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What requests share whose settings differ in their seed at most. textless: the settings
    without texts, which an engine does not see; guide: at a grammar's beginning."""

    textless: SamplingParams
    guide: Guide | None
    decode: Decode | None
    stops: StopStrings | None


class LLM:
    """Generation over one paged cache, from any number of threads.

    model: a name (directory, GGUF file, hub id, `reference:gqa`, or a folder of maps, for the base
    that they name) or a loaded causal LM, folded or plain, which stays as it was, unless it is
    `owned`: nobody else needs it, and attentions take no memory twice, as by its name. tokenizer:
    needed with a loaded model for text prompts.
    max_sequences: most requests at once. max_tokens: longest request, prompt and outputs (default:
    the model's positions). chunk: most prompt tokens of a request in one step (default: 2048 on
    CUDA, else 512), or four times as many where nobody decodes and kernels read prompts; on a CPU
    fewer beside requests that decode, so that a step takes a quarter of a second. seed: of
    what policies draw; a request's tokens are drawn with its own.
    prefix_caching: requests that begin alike compute their beginning once (default: where that
    changes no tokens; True: refuse a cache where it would). maps: beside the weights of a model of
    any type, or their folder or hub id (see `kvfold.attach`).
    settings: fields of `CacheConfig`: kv_bytes, bits, evict, keep_tokens, page and so on. With
    `evict`, a policy's name or a `kvfold.Policy`, every request needs a budget, these settings' or
    its own; keep_tokens=1 evicts nothing.
    Raises ValueError for what cannot work.
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
        **settings: Any,
    ) -> None:
        check_types(LLM.__init__, locals())
        for name, value in (("max_sequences", max_sequences), ("chunk", chunk)):
            Setting(least=1).check(name, value, int | None)
        check_tokenizer(tokenizer)
        self.cache = _cache(settings)
        if isinstance(model, str | Path):
            model, maps = base_and_maps(model, maps)
        beside = Sidecar.load(maps) if isinstance(maps, str | Path) else maps
        if isinstance(model, str):
            config = load_config(model)
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
        max_tokens = _most_tokens(model.config, max_tokens)
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
            prefixes=self._prefixes(prefix_caching),
        )

    def _prefixes(self, wanted: bool | None) -> PrefixCache | None:
        """Raises SettingError where prefixes are wanted that would change tokens."""
        runner = self.runner
        has = {"windows": bool(runner.sliding), "repairs": runner.repair is not None}
        self.shares_no_prefix = refusal(runner.pool, runner.policy, **has)
        if wanted and self.shares_no_prefix:
            raise SettingError(
                f"`prefix_caching=True` would change tokens: {self.shares_no_prefix}. Leave it out"
            )
        if wanted is False and not self.shares_no_prefix:
            self.shares_no_prefix = "as asked"
        if runner.sliding or runner.pool.layout.residual or runner.pool.low_rank is not None:
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
        """A context compressed once, for any number of requests to begin with.

        text: or its token ids. factor: how many times fewer bits its rows are to have than at 16
        bits uncompressed, of dimensions and bits that are kept too; rows are kept in whole pages of
        every group on average, one at least, and never fewer than the policy protects. measure: ask
        the model to repeat a sample of it. progress(what, done, total) follows. Requests that run
        wait meanwhile. Raises ValueError where nothing can be evicted that has to be, or it does
        not fit the model or the pool.
        """
        Setting(least=1).check("factor", factor, float | int)
        with renamed(prompt="text"):
            ids = self._encode(text, encode_start)
        if isinstance(self.cache.evict, Policy):
            raise SettingError(
                "`evict`: a packed context stores its policy by name, and this one is an object: "
                "give a name, such as 'kvzip'"
            )
        with self.engine.turn.take():
            packer = Packer(self.runner, self.tokenizer, self.engine.scheduler.chunk, progress)
            rows, pages, report = packer.pack(ids, factor, measure)
        stored = {x: getattr(self.cache, x) for x in STORED}
        settings = stored | {"page": self.runner.pool.layout.page}
        made = {"key": self._context_key, "settings": settings, "report": report}
        return PackedContext(token_ids=tuple(ids), rows=rows, pages=tuple(pages), made=made)

    @property
    def _context_key(self) -> dict[str, str]:
        """What a packed context has to be made with to serve here."""
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
        """One completion a prompt, in order. prompts: text, token ids, or a list of either.
        sampling, cache: for all prompts, or one for each. context: what all of them go on from.

        Raises ValueError for a prompt that can never be served, and then serves none of them.
        """
        asked = as_list(prompts)
        each = zip(
            asked, spread("sampling", sampling, asked), spread("cache", cache, asked), strict=True
        )
        opened = Opening(self, context, whole=True).requests(list(each))
        found: dict[int, list[StepOutput]] = {request.id: [] for request, _ in opened}
        with Stream(self.engine).open(opened) as stream:
            for output in stream:
                found[output.id].append(output)
        return [completion_of(outputs) for outputs in found.values()]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
        context: PackedContext | None = None,
    ) -> Stream:
        """Outputs of one request as they come; leaving the loop early cancels it. Several streams
        may be read in turns, or in threads: they run together. Raises ValueError at once."""
        return Stream(self.engine).open([self.request(prompt, sampling, cache, context=context)])

    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
    ) -> Completion:
        """The answer to a conversation, by the tokenizer's chat template.

        messages: {"role": "system", "user" or "assistant", "content": text} each, or one user's
        text. Raises ValueError where there is no template.
        """
        (found,) = self.generate([self.encode_chat(messages)], sampling, cache=cache)
        return found

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        cache: CacheParams | None = None,
    ) -> int:
        """Queue a request whose outputs, tokens without text, `engine.step` returns; its id.

        Raises ValueError for a prompt that can never be served, and a budget that does not fit what
        this LLM evicts.
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
    ) -> tuple[Request, Answer]:
        """A request, checked, and how it is read: as it comes, or as a whole. For drivers."""
        (opened,) = Opening(self, context, whole=whole).requests([(prompt, sampling, cache)])
        return opened

    def shared(self, sampling: SamplingParams) -> "Shared":
        """What all requests share whose settings are these but for the seed. Raises as
        `request`."""
        names = "stop_token_ids, allowed_token_ids, bad_words and logit_bias"
        self._check_ids(names, sampling.named_tokens)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling.stop} needs a tokenizer: pass tokenizer= to LLM")
        guide = self.grammars.guide(sampling) if sampling.guided else None
        textless = replace(sampling, stop=(), bad_words=self._bad_ids(sampling))
        # Nothing but outputs makes a difference between requests, and none has come.
        first = Request(id=0, token_ids=[], num_prompt=0, sampling=textless, guide=guide)
        edits = edits_of([first], self.engine.eos_ids)
        if edits is not None and edits.refused:
            raise edits.refused[0]
        decode = (
            decoder_of(self.tokenizer, sampling.skip_special_tokens) if self.tokenizer else None
        )
        stops = StopStrings(sampling.stop) if sampling.stop else None
        return Shared(textless=textless, guide=guide, decode=decode, stops=stops)

    def choice(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        cache: CacheParams | None,
        shared: "Shared",
        *,
        whole: bool = False,
        context: PackedContext | None = None,
    ) -> tuple[Request, Answer]:
        """What `request` returns, of a prompt's token ids, a context's before them, and of what
        `shared` made of settings that differ in their seed at most."""
        self._check_budget(cache or CacheParams())
        textless = shared.textless.changed(seed=sampling.seed)
        guide = shared.guide.twin() if shared.guide is not None else None
        request = self.engine.request(ids, textless, cache, guide, context)
        answer = Answer(shared.decode, ids, sampling, whole=whole, stops=shared.stops)
        return request, answer

    @cached_property
    def grammars(self) -> Grammars:
        """Of texts that keep to a schema. Raises SettingError where there can be none."""
        vocab = self.model.get_output_embeddings().weight.shape[0]
        return Grammars(self.tokenizer, vocab, self.engine.eos_ids)

    def check_weights(self) -> None:
        """Raises SettingError where the owner of a loaded model has changed it: attention would go
        on with copies of what it was, all else with what it is."""
        changed = self._unchanged and self._unchanged.first()
        if changed:
            raise SettingError(
                f"`model`: {changed} has changed since this LLM was made, which serves a copy of"
                " some weights and shares others: make a new LLM of the model, or change a copy"
            )

    def _bad_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Of bad words, as a text begins with them and as they follow other words."""
        words = [x for x in sampling.bad_words if isinstance(x, str)]
        if words and self.tokenizer is None:
            raise ValueError(f"bad_words={words} needs a tokenizer: pass tokenizer= to LLM")
        found = [x for x in sampling.bad_words if not isinstance(x, str)]
        texts = [text for word in words for text in (word, f" {word}")]
        with renamed(text="bad_words"):
            found += map(tuple, encode_all(self.tokenizer, texts))
        return tuple(dict.fromkeys(filter(None, found)))  # a text may have no tokens

    def encode_behind(self, context: PackedContext | None, prompt: Prompt) -> list[int]:
        """Token ids of a context and what follows it, without another start token."""
        self.check_size(prompt)
        if context is None:
            return self.encode(prompt)
        self.check_context(context)
        if isinstance(prompt, str) and self.tokenizer is not None:
            with renamed(text="prompt"):
                prompt = encode(self.tokenizer, prompt)
        return [*context.token_ids, *self.encode(prompt)]

    def check_size(self, prompt: Prompt) -> None:
        """Raises SettingError for a prompt that is longer than any sequence, before all of it is
        tokenised."""
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
                f"the prompt has {count} tokens, and a sequence at most `max_tokens` positions, "
                f"which are {most}: shorten it, or raise them where the model has more"
            )

    def check_context(self, context: PackedContext) -> None:
        """Raises ValueError for one that requests to this LLM cannot begin with."""
        if not isinstance(context, PackedContext):
            raise ValueError(
                f"context must be a PackedContext, of LLM.pack or PackedContext.load; got "
                f"{context!r:.100}"
            )
        check_pages(self.runner)
        context.check(self._context_key)
        self._check_ids("context", [context.largest_id])
        if not self.runner.pool.can_load(context.rows, context.pages):
            raise SettingError("`context` has pages of other sizes than its rows: pack it again")
        tokens, most = len(context.token_ids), self.runner.pool.max_tokens
        if tokens >= most:
            raise SettingError(
                f"`context` has {tokens} tokens, and a sequence at most `max_tokens` positions, "
                f"which are {most}: raise them where the model has more"
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text as the tokenizer gives them, special tokens included; ids as they
        are."""
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
        self, messages: str | Sequence[Mapping[str, str]], /, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation by the chat template, which may know `variables`. Raises
        ValueError for one that is longer than any sequence, and as `text.render_chat`."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template: pass tokenizer= to LLM")
        text = render_chat(self.tokenizer, messages, **variables)
        self.check_size(text)
        return encode(self.tokenizer, text)

    def _check_budget(self, own: CacheParams) -> None:
        mine, evict = self.cache, self.cache.evict
        if evict is None and own.limited:
            raise ValueError(
                f"cache={own} limits what a request keeps, but this LLM evicts nothing: give it a "
                "policy, such as evict='kv-compress'"
            )
        budgets = (mine.keep_tokens, mine.max_cache_tokens, own.keep_tokens, own.max_cache_tokens)
        if evict is not None and not any(budgets):
            raise ValueError(
                f"evict={str(evict)!r} needs a budget: set keep_tokens or max_cache_tokens of the "
                "LLM or of the request; keep_tokens=1 evicts nothing"
            )

    def summary(self) -> list[tuple[str, str]]:
        """Sizes, and how much fits, as (name, value): what a server prints when it starts."""
        shares = "on" if self.shares_no_prefix is None else f"off: {self.shares_no_prefix}"
        return [*sizes(self.runner, self.cache), ("prefix caching", shares)]


class Opening:
    """Makes requests that belong together; `context` and `whole` as of `LLM.request`. A prompt that
    several of them have is tokenised once, and settings that they share are checked once."""

    def __init__(self, llm: LLM, context: PackedContext | None, *, whole: bool = False) -> None:
        self.llm, self.context, self.whole = llm, context, whole
        self._default = SamplingParams()
        self._shared: dict[tuple[int, ...], Shared] = {}
        self._prompts: dict[str | int, list[int]] = {}

    def requests(self, asked: Sequence[Asked]) -> list[tuple[Request, Answer]]:
        """Of prompts and settings, which must stay alive between calls. Raises as
        `LLM.request`."""
        self.llm.check_weights()
        return [self._request(*one) for one in asked]

    def _request(
        self, prompt: Prompt, sampling: SamplingParams | None, cache: CacheParams | None
    ) -> tuple[Request, Answer]:
        check_params(sampling, cache)
        sampling = sampling or self._default
        name = prompt if isinstance(prompt, str) else id(prompt)
        if name not in self._prompts:
            self._prompts[name] = self.llm.encode_behind(self.context, prompt)
        shared = self._shared.get(sampling.but_seed) or self.llm.shared(sampling)
        self._shared[sampling.but_seed] = shared
        ids, context = self._prompts[name], self.context
        return self.llm.choice(ids, sampling, cache, shared, whole=self.whole, context=context)


def _cache(settings: dict[str, Any]) -> CacheConfig:
    known = settings_of(CacheConfig)
    if unknown := settings.keys() - known.keys():
        legal = ", ".join(known)
        raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}; of the cache: {legal}")
    return CacheConfig(**settings)


def _most_tokens(config: Any, wanted: int | None) -> int:
    """The longest request: `wanted`, or the model's positions. Raises ValueError for more than
    these, and for none where the model states none."""
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
    found = model.generation_config.eos_token_id
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def completion_of(outputs: list[StepOutput]) -> Completion:
    """A request's outputs, put together."""
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
