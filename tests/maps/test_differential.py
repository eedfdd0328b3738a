"""A differential fuzzer: random tiny models with random maps, used in callers' random ways, answer
as the original does with the same maps applied plainly (`plain_maps`).

A short part runs with the other tests. The long one takes KVFOLD_FUZZ_SECONDS (default: 300), from
seed KVFOLD_FUZZ_SEED on (printed; the default is the same on every machine):

    pytest tests/maps/test_differential.py -m slow -s
"""

import copy
import os
import pickle
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import kvfold
from drawn_models import EAGER, POSITIONS, VOCABULARY, SubjectCase, seeds, subject_cases
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import CACHE
from plain_maps import Reference
from tolerance import model_terms, rounding

LONGEST = 64  # tokens of a sequence, and of a static cache
counts: Counter[str] = Counter()
worst = [0.0]  # of the tolerance


def allowed(case: SubjectCase, logits: Tensor) -> float:
    """How far logits of two right implementations may differ: maps add sums over latents to those
    of a model, and rotate keys back and forth."""
    config, width = case.model.config, 2 * case.model.kv_heads * case.model.head_dim
    if case.model.kind == "gpt2":
        config = hf.LlamaConfig(**case.model.shape, intermediate_size=4 * config.n_embd)
    terms = model_terms(config, LONGEST) + case.model.layers * (4 * width + 64)
    return rounding(logits.dtype, terms) * float(logits.abs().max().clamp(min=1))


# -- one sequence after another through a cache -------------------------------------------------

PLACES = ("default", "explicit", "counted", "late", "repeat", "backwards", "restart", "random")
PLACES += ("rows", "negative", "far")
PADS = ("none", "left", "right", "holes")
CACHES = ("dynamic", "windows", "static", "model's own", "none")


@dataclass(frozen=True, kw_only=True)
class Feed:
    """A forward of some tokens."""

    count: int
    places: str
    pads: str
    mask: str  # "none" where that is possible, "2d", "bool", "float"
    hide: bool
    embeds: bool
    weights: bool
    seed: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something done to the cache or the model between two forwards."""

    what: str
    seed: int


CHANGES = ("crop", "reorder", "select", "repeat", "copy", "pickle", "fork", "reset", "attach")
CHANGES += ("switch", "restart")

feeds = st.builds(
    Feed,
    count=st.sampled_from([7, 1, 2, 3, 5, 9, 12]),
    places=st.sampled_from(PLACES),
    pads=st.sampled_from(PADS),
    mask=st.sampled_from(["none", "2d", "bool", "float"]),
    hide=st.sampled_from([False, False, False, True]),
    embeds=st.sampled_from([False, False, False, True]),
    weights=st.sampled_from([False, False, False, True]),
    seed=seeds,
)
changes = st.builds(Change, what=st.sampled_from(CHANGES), seed=seeds)


@dataclass(frozen=True, kw_only=True)
class SessionCase:
    subject: SubjectCase
    cache: str
    batch: int
    steps: tuple[Feed | Change, ...]


sessions = st.builds(
    SessionCase,
    subject=subject_cases(),
    cache=st.sampled_from(CACHES),
    batch=st.integers(1, 3),
    steps=st.tuples(
        feeds, st.lists(st.one_of(feeds, feeds, changes), min_size=1, max_size=8).map(tuple)
    ).map(lambda x: (x[0], *x[1])),
)


@dataclass
class Tape:
    """All tokens so far [B, S], where they are, which are no padding, and what each one's forward
    let it see [B, S, S], but for windows."""

    ids: Tensor
    places: Tensor
    seen: Tensor
    visible: Tensor

    @classmethod
    def empty(cls, batch: int) -> "Tape":
        none = torch.zeros(batch, 0, dtype=torch.long)
        return cls(none, none, none.bool(), torch.zeros(batch, 0, 0, dtype=torch.bool))

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def append(self, ids: Tensor, places: Tensor, seen: Tensor, rows: Tensor) -> None:
        """rows bool [B, T, S + T]: what the new tokens see. seen: of all tokens [B, S + T]."""
        old = torch.nn.functional.pad(self.visible, (0, ids.shape[1]))
        self.ids, self.seen = torch.cat((self.ids, ids), 1), seen
        self.places = torch.cat((self.places, places), 1)
        self.visible = torch.cat((old, rows), 1)

    def select(self, rows: Tensor) -> None:
        self.ids, self.places = self.ids[rows], self.places[rows]
        self.seen, self.visible = self.seen[rows], self.visible[rows]

    def crop(self, length: int) -> None:
        self.ids, self.places = self.ids[:, :length], self.places[:, :length]
        self.seen, self.visible = self.seen[:, :length], self.visible[:, :length, :length]


@dataclass
class Session:
    """A model that is used step by step, beside its reference."""

    case: SessionCase
    model: hf.PreTrainedModel
    reference: Reference
    mapped: bool  # whether maps are attached to the model
    tape: Tape = field(init=False)
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        self.start(self.case.batch)

    @property
    def kind(self) -> str:
        return self.case.subject.model.kind

    @property
    def attention(self) -> str:
        """The implementation in use."""
        return self.model.config._attn_implementation.removeprefix("kvfold_over_")

    @property
    def windows(self) -> list[int]:
        return [x for x in self.case.subject.model.windows if x is not None]

    def start(self, batch: int) -> None:
        self.tape, self.cache = Tape.empty(batch), None
        config = self.model.config
        if self.case.cache == "dynamic":
            self.cache = hf.DynamicCache()
        elif self.case.cache == "windows":
            self.cache = hf.DynamicCache(config=config)
        elif self.case.cache == "static":
            self.cache = hf.StaticCache(config=config, max_cache_len=LONGEST)

    def run(self) -> None:
        for step in self.case.steps:
            if isinstance(step, Feed):
                counts[f"feed {self.case.cache}"] += 1
                self.feed(step)
            else:
                getattr(self, step.what)(step.seed)

    # -- forwards ---------------------------------------------------------------------------

    def feed(self, step: Feed) -> None:
        if self.case.cache == "none":
            self.start(self.tape.batch)
        tape, random = self.tape, torch.Generator().manual_seed(step.seed)
        count = min(step.count * (3 if self.case.cache == "none" else 1), LONGEST - tape.length)
        if not count:
            return
        ids = torch.randint(3, VOCABULARY, (tape.batch, count), generator=random)
        seen = torch.cat((self._still_seen(step, random), self._pads(step.pads, count, random)), 1)
        places = self._places(step.places, seen, count, random)
        rows, mask = self._rows(step, seen, places, count, random)
        default = torch.arange(tape.length, tape.length + count).expand(tape.batch, -1)
        tape.append(ids, default if places is None else places.expand(tape.batch, -1), seen, rows)
        out = self._forward(ids, places, mask, step)
        self._compare(out, count)

    def _still_seen(self, step: Feed, random: torch.Generator) -> Tensor:
        """Which earlier tokens are still seen."""
        seen = self.tape.seen
        if step.hide and self.kind != "opt":
            seen = seen & (torch.rand(seen.shape, generator=random) < 0.7)
        return seen

    def _pads(self, pads: str, count: int, random: torch.Generator) -> Tensor:
        if pads == "holes":
            seen = torch.rand(self.tape.batch, count, generator=random) < 0.7
        else:
            most = 0 if pads == "none" else count
            padded = torch.randint(0, most + 1, (self.tape.batch, 1), generator=random)
            seen = torch.arange(count) >= padded
        return seen.flip(1) if pads == "right" else seen

    def _places(self, how: str, seen: Tensor, count: int, random: torch.Generator) -> Tensor | None:
        """position_ids [1 or B, T]; None: none are given."""
        slots = torch.arange(count) + self.tape.length
        if how == "default" or self.kind == "opt":
            return None
        rows = torch.arange(self.tape.batch)[:, None]
        places = {
            "explicit": slots[None],
            "counted": (seen.cumsum(1) - 1).clamp(min=0)[:, -count:],
            "late": slots[None] + int(torch.randint(1, 90, (1,), generator=random)),
            "repeat": slots[None] // 2,
            "backwards": slots.flip(0)[None],
            "restart": slots[None] % 5,
            "random": torch.randint(0, 200, (self.tape.batch, count), generator=random),
            "rows": slots + 7 * rows,
            "negative": slots[None] - 3,
            "far": slots[None] + 70_000,
        }[how]
        embedded = self.kind == "gpt2"  # positions are rows of a table
        return places.clamp(0, POSITIONS - 1) if embedded else places

    def _rows(
        self, step: Feed, seen: Tensor, places: Tensor | None, count: int, random: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """What the new tokens see [B, T, S + T], and the mask that says so."""
        length = seen.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[-count:]
        rows = causal & seen[:, None]
        unscheduled = step.mask in ("bool", "float") and not self.windows
        if unscheduled and self.kind != "opt":
            return self._by_hand(step.mask, rows, random)
        if step.mask == "none" and bool(seen.all()):
            if self.case.cache == "none" and places is not None:
                rows = rows & _same_document(places)
            return rows, None
        return rows, seen.to((torch.long, torch.bool, torch.float32)[step.seed % 3])

    def _by_hand(self, how: str, rows: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """A mask [B, 1, T, S] as of a tree: tokens see themselves and some of those before."""
        count, length = rows.shape[1:]
        itself = torch.eye(length, dtype=torch.bool)[-count:]
        rows = rows & (torch.rand(rows.shape, generator=random) < 0.7) | itself
        mask = rows[:, None]
        if self.case.cache == "static":
            mask = torch.nn.functional.pad(mask, (0, LONGEST - length))
        if how == "float" or self.attention == "eager":  # which adds a mask to scores
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        return rows, mask

    @torch.no_grad()
    def _forward(self, ids: Tensor, places: Tensor | None, mask: Tensor | None, step: Feed) -> Any:
        more: dict[str, Any] = {"use_cache": self.case.cache != "none"}
        if places is not None:
            more["position_ids"] = places.int() if step.seed % 5 == 0 else places
        if mask is not None:
            more["attention_mask"] = mask
        if self.cache is not None:
            more[CACHE] = self.cache
        if step.weights and self.attention == "eager":
            more["output_attentions"] = True
        if step.embeds:
            more["inputs_embeds"] = self.model.get_input_embeddings()(ids)
        else:
            more["input_ids"] = ids
        out = self.model(**more)
        if self.case.cache == "model's own":
            self.cache = out[CACHE]
        return out

    def _compare(self, out: Any, count: int) -> None:
        tape, logits = self.tape, out.logits
        more, places = {}, tape.places
        if self.kind == "opt":
            more, places = {"attention_mask": tape.seen.long()}, None
        wanted = self.reference.logits(tape.ids, places, tape.visible, **more)[:, -count:]
        valid = tape.seen[:, -count:]
        apart = (logits - wanted)[valid].abs()
        if apart.numel():
            limit = allowed(self.case.subject, wanted[valid])
            worst[0] = max(worst[0], float(apart.max()) / limit)
            assert apart.max() <= limit, f"{float(apart.max()):.3g} apart, {limit:.3g} allowed"
        if self.case.cache == "static" and self.windows:
            return  # whose weights begin at another token in each step
        for got, whole in zip(out.get("attentions") or (), self.reference.weights, strict=False):
            self._compare_weights(got, whole[:, :, -count:].float(), valid)

    def _compare_weights(self, got: Tensor, wanted: Tensor, valid: Tensor) -> None:
        """Of the tokens [B, Hq, T, S] that the cache still has, or has room for."""
        size = min(got.shape[3], wanted.shape[3])
        if self.case.cache == "static":
            got, wanted = got[..., :size], wanted[..., :size]
        got, wanted = got[..., -size:], wanted[..., -size:]
        apart = (got - wanted).transpose(1, 2)[valid].abs()
        assert not apart.numel() or apart.max() <= allowed(self.case.subject, apart), "weights"

    # -- changes ----------------------------------------------------------------------------

    @property
    def filled(self) -> bool:
        return self.cache is not None and self.tape.length > 0

    @property
    def grows(self) -> bool:
        return self.case.cache in ("dynamic", "windows", "model's own")

    def crop(self, seed: int) -> None:
        passed = any(self.tape.length >= x for x in self.windows)
        if self.filled and (self.case.cache == "dynamic" or not passed):
            count = seed % self.tape.length
            if count and not (self.case.cache == "static" and self.windows):
                self.cache.crop(-count)
                self.tape.crop(self.tape.length - count)

    def reorder(self, seed: int) -> None:
        """With rows that come twice, as beams do."""
        if self.filled:
            random = torch.Generator().manual_seed(seed)
            rows = torch.randint(0, self.tape.batch, (self.tape.batch,), generator=random)
            self.cache.reorder_cache(rows)
            self.tape.select(rows)

    def select(self, seed: int) -> None:
        if self.filled and self.grows:
            random = torch.Generator().manual_seed(seed)
            rows = torch.randint(0, self.tape.batch, (1 + seed % 4,), generator=random)
            self.cache.batch_select_indices(rows)
            self.tape.select(rows)

    def repeat(self, seed: int) -> None:
        times = 2 + seed % 2
        if self.filled and self.grows and self.tape.batch * times < 9:
            self.cache.batch_repeat_interleave(times)
            self.tape.select(torch.arange(self.tape.batch).repeat_interleave(times))

    def copy(self, _: int) -> None:
        self.cache = copy.deepcopy(self.cache)

    def pickle(self, _: int) -> None:
        self.cache = pickle.loads(pickle.dumps(self.cache))

    def fork(self, seed: int) -> None:
        """Another continuation, from a copy."""
        before = self.tape, self.cache
        self.tape, self.cache = copy.deepcopy(before)
        about = {"pads": "none", "mask": "none", "hide": False, "embeds": False, "weights": False}
        self.feed(Feed(count=1 + seed % 5, places="default", seed=seed, **about))
        self.tape, self.cache = before

    def reset(self, _: int) -> None:
        if self.filled and self.case.cache == "static":
            self.cache.reset()
            self.tape = Tape.empty(self.tape.batch)

    def attach(self, _: int) -> None:
        """The same maps again, which a cache that they filled goes on with."""
        if self.mapped:
            kvfold.detach(self.model)
            kvfold.attach(self.model, self.case.subject.sidecar(self.model))

    def switch(self, _: int) -> None:
        """Another implementation of attention."""
        if self.kind not in EAGER:
            name = "sdpa" if self.attention == "eager" else "eager"
            self.model.set_attn_implementation(name)

    def restart(self, seed: int) -> None:
        """With a new cache, of another batch size."""
        self.start(1 + seed % 4)


def _same_document(places: Tensor) -> Tensor:
    """Packed sequences, which transformers takes apart where positions do not go on by one: bool
    [B, T, T]."""
    starts = torch.nn.functional.pad(places.diff(dim=1) != 1, (1, 0))
    number = starts.cumsum(1)
    return number[:, :, None] == number[:, None]


def check_session(case: SessionCase) -> None:
    subject = case.subject
    counts["sessions"] += 1
    has_maps = not subject.folded and any(x.latents for x in subject.plans)
    Session(case, subject.subject, subject.reference, has_maps).run()


def session_is_of_transformers(case: SessionCase) -> bool:
    """Whether the original model, used in this way, differs from itself computed plainly."""
    try:
        model = copy.deepcopy(case.subject.model.model)
        Session(case, model, case.subject.original, False).run()
    except Exception:
        return True
    return False


def unless_of_transformers(check: Any, is_of_transformers: Any) -> Any:
    """A check that lets cases by in which the original model differs from itself too."""

    def run(case: Any) -> None:
        try:
            check(case)
        except Exception as error:
            if not is_of_transformers(case):
                raise
            counts[f"of transformers: {type(error).__name__} {str(error)[:40]}"] += 1

    return run


# -- tokens that a model generates ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GenerateCase:
    """A call of `generate`. lengths: of the prompts, which are padded to the left; end: a token
    that ends a sequence; more: tokens of a second turn, through the cache of the first one."""

    subject: SubjectCase
    how: str
    cache: str
    lengths: tuple[int, ...]
    new: int
    beams: int
    chunk: int | None
    end: int | None
    more: int
    seed: int


HOWS = ("greedy", "beams", "lookup", "assistant", "assistant without maps")
generations = st.builds(
    GenerateCase,
    subject=subject_cases(),
    how=st.sampled_from(HOWS),
    cache=st.sampled_from(["default", "static", "dynamic", "windows", "none"]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    new=st.integers(1, 10),
    beams=st.integers(2, 4),
    chunk=st.sampled_from([None, None, 1, 4, 7]),
    end=st.sampled_from([None, None, 5, 9]),
    more=st.sampled_from([0, 0, 1, 6]),
    seed=seeds,
)


@dataclass
class Generation:
    case: GenerateCase
    model: hf.PreTrainedModel
    assistant: hf.PreTrainedModel
    reference: Reference

    @property
    def alone(self) -> bool:
        """Whether one sequence is generated at a time."""
        return self.case.how not in ("greedy", "beams")

    def run(self) -> None:
        case, random = self.case, torch.Generator().manual_seed(self.case.seed)
        lengths = torch.tensor(case.lengths[:1] if self.alone else case.lengths)
        longest = int(lengths.max())
        ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=random)
        mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
        ids = ids * mask
        counts[f"generate {case.how} {case.cache}"] += 1
        out = self.compare(ids, mask, self._cache())
        if case.more and case.how == "greedy" and case.cache != "none" and case.end is None:
            turn = torch.randint(3, VOCABULARY, (len(lengths), case.more), generator=random)
            ids = torch.cat((out.sequences, turn), 1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - longest), value=1)
            self.compare(ids, mask, {CACHE: out[CACHE]})

    def _cache(self) -> dict[str, Any]:
        """As arguments of `generate`."""
        config, size = self.model.config, {"max_cache_len": 2 * LONGEST}
        if self.case.cache == "none" and not self.alone:
            return {"use_cache": False}
        if self.case.cache == "static" and not self.alone:
            if self.case.more:
                return {CACHE: hf.StaticCache(config=config, **size)}
            return {"cache_implementation": "static"}
        if self.case.cache in ("dynamic", "windows") and not self.alone:
            about = {"config": config} if self.case.cache == "windows" else {}
            return {CACHE: hf.DynamicCache(**about)}
        return {}

    def compare(self, ids: Tensor, mask: Tensor, cache: dict[str, Any]) -> Any:
        """Raises AssertionError where the model generates something else."""
        case, more = self.case, {}
        if case.chunk is not None and case.cache != "none" and not self.alone:
            more["prefill_chunk_size"] = case.chunk
        if case.how == "lookup":
            more["prompt_lookup_num_tokens"] = 3
        elif self.alone:
            more["assistant_model"] = self.assistant
        out = self._generate(self.model, ids, mask, **cache, **more)
        wanted = self._generate(self.reference.model, ids, mask, use_cache=False)
        limit = 2 * allowed(case.subject, torch.stack(wanted.logits))
        if case.how == "beams":
            apart = (out.sequences_scores - wanted.sequences_scores).abs().max()
            assert apart <= limit, f"scores of beams are {float(apart):.3g} apart"
            return out
        length = max(x.shape[1] for x in (out.sequences, wanted.sequences))
        both = (
            torch.nn.functional.pad(x.sequences, (0, length - x.sequences.shape[1]))
            for x in (out, wanted)
        )
        for row, (tokens, others) in enumerate(zip(*both, strict=True)):
            if torch.equal(tokens, others):
                continue
            first = int((tokens != others).nonzero()[0])
            logits = wanted.logits[first - ids.shape[1]][row]
            behind = float(logits.max() - logits[tokens[first]])
            assert behind <= limit, f"row {row}, token {first} is {behind:.3g} less likely"
        return out

    def _generate(self, model: Any, ids: Tensor, mask: Tensor, **more: Any) -> Any:
        if self.case.how == "beams":
            more |= {"num_beams": self.case.beams, "num_return_sequences": self.case.beams - 1}
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=self.case.new,
            do_sample=False,
            eos_token_id=self.case.end,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            **more,
        )


def check_generation(case: GenerateCase) -> None:
    subject = case.subject
    original = copy.deepcopy(subject.model.model)
    model = subject.subject
    assistant = original if case.how == "assistant without maps" else copy.deepcopy(model)
    Generation(case, model, assistant, subject.reference).run()


def generation_is_of_transformers(case: GenerateCase) -> bool:
    try:
        model, assistant = (copy.deepcopy(case.subject.model.model) for _ in range(2))
        Generation(case, model, assistant, case.subject.original).run()
    except Exception:
        return True
    return False


# -- the engine ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request: so many tokens of a beginning that others share, so many others, and new ones.
    step: when it comes; cancel: after how many steps it is given up (None: never)."""

    shared: int
    other: int
    new: int
    step: int
    cancel: int | None


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """pages: in the pool, beyond what the longest request needs; None: enough for all. headroom:
    tokens for which running requests have pages before another one starts."""

    subject: SubjectCase
    requests: tuple[Asked, ...]
    page: int
    chunk: int
    most: int
    pages: int | None
    headroom: int
    seed: int


requests = st.builds(
    Asked,
    shared=st.sampled_from([0, 5, 16, 24]),
    other=st.integers(1, 12),
    new=st.integers(1, 12),
    step=st.integers(0, 12),
    cancel=st.sampled_from([None, None, None, 1, 4]),
)
engines = st.builds(
    EngineCase,
    subject=subject_cases(),
    requests=st.lists(requests, min_size=1, max_size=7).map(tuple),
    page=st.sampled_from([8, 1, 4, 16]),
    chunk=st.sampled_from([64, 1, 5, 16]),
    most=st.sampled_from([4, 1, 2, 8]),
    pages=st.sampled_from([None, 0, 2]),
    headroom=st.sampled_from([32, 0, 2]),
    seed=seeds,
)
LONGEST_SERVED = 48


def check_engine(case: EngineCase) -> None:
    llm = _engine(case)
    if llm is None:
        return
    llm.engine.scheduler.headroom = case.headroom
    random = torch.Generator().manual_seed(case.seed)
    shared = torch.randint(3, VOCABULARY, (24,), generator=random)
    prompts, outputs, ids = {}, {}, {}
    reference, capacity = case.subject.reference, llm.runner.pool.capacity(case.chunk)
    step, waiting = 0, sorted(enumerate(case.requests), key=lambda x: x[1].step)
    while waiting or llm.engine.has_work:
        while waiting and waiting[0][1].step <= step:
            number, asked = waiting.pop(0)
            other = torch.randint(3, VOCABULARY, (asked.other,), generator=random)
            prompt = torch.cat((shared[: asked.shared], other)).tolist()
            sampling = kvfold.SamplingParams(max_new_tokens=asked.new, logprobs=3, ignore_eos=True)
            if len(prompt) + 1 > capacity:  # refused, as it must be where no answer would fit
                counts["refused: longer than the pool"] += 1
                continue
            id = llm.add(prompt, sampling)
            prompts[id], outputs[id], ids[number] = prompt, [], id
        for number, id in ids.items():
            asked = case.requests[number]
            if asked.cancel is not None and step == asked.step + asked.cancel:
                llm.engine.cancel(id)
        for output in llm.engine.step():
            outputs[output.id].append(output)
        step += 1
    counts["requests"] += len(prompts)
    counts["pre-empted"] += llm.engine.scheduler.num_preemptions
    for number, id in ids.items():
        _check_request(case, case.requests[number], prompts[id], outputs[id], reference, capacity)
    llm.runner.pool.check_integrity()


def _engine(case: EngineCase) -> kvfold.LLM | None:
    """None where it refuses the model by name."""
    about = {"max_sequences": case.most, "max_tokens": LONGEST_SERVED, "page": case.page}
    try:
        llm = case.subject.engine(**about, chunk=case.chunk, kv_bytes=2**22)
        if case.pages is None:
            return llm
        pages = -(-LONGEST_SERVED // case.page) + 1 + case.pages
        size = pages * llm.runner.pool.layout.page_bytes
        return case.subject.engine(**about, chunk=case.chunk, kv_bytes=size)
    except SettingError as error:
        counts[f"refused: {str(error)[:60]}"] += 1
        return None


def _check_request(
    case: EngineCase,
    asked: Asked,
    prompt: list[int],
    outputs: list[Any],
    reference: Reference,
    capacity: int,
) -> None:
    """Raises AssertionError unless tokens are the likeliest, and as likely as is said. capacity: of
    the pool, in tokens of one sequence."""
    tokens = [x for output in outputs for x in output.token_ids]
    said = [x for output in outputs for x in output.logprobs or ()]
    reason = outputs[-1].finish_reason
    outgrew = len(prompt) + asked.new - 1 > capacity
    ends = {"length", *(["cancelled"] if asked.cancel is not None else []), *["pool"] * outgrew}
    assert reason in ends, outputs[-1]
    if reason == "length":
        assert len(tokens) == asked.new
    assert len(said) == len(tokens) <= asked.new
    if not tokens:
        return
    ids = torch.tensor([prompt + tokens])
    causal = torch.ones(1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    places = None if case.subject.model.kind == "opt" else torch.arange(ids.shape[1])[None]
    logits = reference.logits(ids, places, causal)[0, len(prompt) - 1 : -1]
    limit = 2 * allowed(case.subject, logits)
    wanted = logits.log_softmax(-1)
    for likely, token, logprobs in zip(wanted, tokens, said, strict=True):
        assert likely.max() - likely[token] <= limit, f"{token} is less likely than others"
        for i, x in ((token, logprobs.chosen), *logprobs.top):
            worst[0] = max(worst[0], abs(float(likely[i]) - x) / limit)
            assert abs(float(likely[i]) - x) <= limit, f"{i}: {float(likely[i])}, not {x}"


# -- the long part and the short one --------------------------------------------------------------


def explored(first: int, examples: int, cases: Any, check: Any) -> None:
    """Raises the error of the smallest case that fails."""

    @seed(first)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(case=cases)
    def run(case: Any) -> None:
        check(case)

    run()


@dataclass(frozen=True, kw_only=True)
class Part:
    """cases: a strategy; check: raises an error for a wrong one; few, many: examples in a short
    run, and in each round of a long one."""

    cases: Any
    check: Any
    few: int
    many: int


PARTS = {
    "sessions": Part(
        cases=sessions,
        check=unless_of_transformers(check_session, session_is_of_transformers),
        few=35,
        many=20,
    ),
    "generate": Part(
        cases=generations,
        check=unless_of_transformers(check_generation, generation_is_of_transformers),
        few=15,
        many=15,
    ),
    "engine": Part(cases=engines, check=check_engine, few=4, many=5),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_few(name: str) -> None:
    part = PARTS[name]
    explored(0, part.few, part.cases, part.check)


def test_the_reference_is_the_original() -> None:
    def check(case: SessionCase) -> None:
        model = copy.deepcopy(case.subject.model.model)
        Session(case, model, case.subject.original, False).run()

    explored(1, 15, sessions, check)


def test_wrong_maps_are_noticed() -> None:
    """Of a model that stores other numbers than its reference does."""

    def check(case: SessionCase) -> None:
        Session(case, case.subject.subject, case.subject.original, False).run()

    with pytest.raises(AssertionError, match="apart"):
        explored(2, 15, sessions, check)


@pytest.mark.soak
def test_for_a_while() -> None:
    seconds = float(os.environ.get("KVFOLD_FUZZ_SECONDS", "300"))
    first = int(os.environ.get("KVFOLD_FUZZ_SEED", "20000"))
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        for name, part in PARTS.items():
            print(f"KVFOLD_FUZZ_SEED={number}, {name}, worst {worst[0]:.3f}, {dict(counts)}")
            explored(number, part.many, part.cases, part.check)
        number += 1
