"""Packed contexts: whoever begins with one, whenever and beside whom, has the logits of the same
context compressed in place."""

import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fuzz_cases import model_of
from kvfold import LLM, CacheParams, PackedContext, SamplingParams
from kvfold.cache.eviction import policies
from kvfold.engine.core.compression import Schedule
from kvfold.engine.runner.sampler import sample
from kvfold.evaluation.paged import PagedSession
from kvfold.utils.errors import SettingError
from models import tiny, tokens
from prefix_cases import shared_prompts
from stub import EOS, VOCAB, Bench, logits_after

BOOK = tokens(1, 120, seed=5)[0].tolist()
QUESTIONS = [tokens(1, n, seed=n)[0].tolist() for n in (9, 4, 23)]
ASKED = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=5)
KEEP = 0.2  # of 120 tokens, in pages of 8


def llm_of(recipe: str | None = None, name: str = "llama-gqa", **settings) -> LLM:
    fixed = {"evict": "kvzip", "keep_tokens": 1.0, "page": 8, "kv_bytes": 2**23, "chunk": 32}
    fixed |= {"max_sequences": 4, "max_tokens": 256}
    return LLM(model_of(name, recipe), **{**fixed, **settings})


def in_place(llm: LLM, question: list[int], answer: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [n, V] behind a question that is read after the context was compressed."""
    with PagedSession(llm.runner, 32) as session:
        session.sequence.cache = CacheParams(keep_tokens=KEEP)
        session.read(BOOK, prompt=len(BOOK))
        session.compress()
        found = [session.read(question)]
        found += [session.read([token]) for token in answer[:-1]]
    return torch.stack(found).log_softmax(-1)


def same(found, wanted: torch.Tensor) -> None:
    for own, row in zip(found.logprobs, wanted, strict=True):
        for token, value in own.top:
            assert abs(value - float(row[token])) < 2e-3, (own, row.topk(5))


CASES = {
    "kvzip": {},
    "copied, since its rows are watched": {"evict": "snapkv-w8"},
    "keydiff, 4 bits": {"evict": "keydiff", "bits": 4},
    "repaired": {"repair": True},
    "joint latents": {"recipe": "small", "bits": 8},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_context_compressed_in_place(case: str, tmp_path) -> None:
    llm = llm_of(**CASES[case])
    factor = 1 / (KEEP * llm.runner.pool.layout.kept_fraction)
    context = llm.pack(BOOK, factor=factor, measure=False)
    assert context.lengths.mean() <= 24 and (context.lengths < 120).all()
    context.save(tmp_path / "book.kvf")
    again, loaded = llm_of(**CASES[case]), PackedContext.load(tmp_path / "book.kvf")
    others = [tokens(1, 40, seed=i)[0].tolist() for i in range(2)]
    found = again.generate(QUESTIONS, ASKED, context=loaded)  # together, then beside others
    request, _ = again.request(QUESTIONS[0], ASKED, None, context=loaded)
    again.engine.submit(request)
    beside = again.generate(others, ASKED)
    assert request.num_cached == 120 and request.finish_reason == "length"
    assert request.outputs == list(found[0].token_ids)
    for question, own in zip(QUESTIONS, found, strict=True):
        same(own, in_place(llm, question, own.token_ids))
    alone = [llm.generate([ids], ASKED)[0] for ids in others]
    assert [x.token_ids for x in beside] == [x.token_ids for x in alone]
    again.runner.pool.check_integrity()
    assert again.runner.pool.used_bytes == 0


def test_pages_are_read_only_and_counted_once() -> None:
    llm = llm_of()
    context = llm.pack(BOOK, factor=4)
    pool = llm.runner.pool
    before = [x.clone() for x in context.pages]
    requests = [llm.request(ids, ASKED, None, context=context)[0] for ids in QUESTIONS]
    for request in requests:
        llm.engine.submit(request)
    llm.engine.step()
    one = pool.cost([], 9) + pool.cost([], 4) + pool.cost([], 23)
    partial = (context.lengths % 8 > 0).sum()
    most = int(one.sum()) + 3 * (partial + len(context.lengths))
    units = pool.layout.groups[0].layout.page_bytes
    assert pool.used_bytes - context.num_bytes <= most * units
    while llm.engine.has_work:
        llm.engine.step()
    (x,) = llm.engine.scheduler.prefix_cache._contexts.values()
    slot = pool.allocate_slot()
    pool.start_from(slot, [x])
    rows, pages = pool.dump(slot)
    assert (rows == context.lengths).all() and all(map(torch.equal, pages, before))


def test_a_budget_copies_the_context_before_it_evicts(monkeypatch) -> None:
    """And what was read again to pack it is not read once more."""
    llm = llm_of()
    context = llm.pack(BOOK, factor=2)
    plain = llm.generate([QUESTIONS[2]], ASKED, context=context)
    less = CacheParams(max_cache_tokens=24)
    again, read = [], llm.runner.rescorer._rescore
    monkeypatch.setattr(llm.runner.rescorer, "_rescore", lambda x, y: again.append(y) or read(x, y))
    llm.generate([QUESTIONS[2]] * 2, ASKED, cache=[less, CacheParams()], context=context)
    assert again and min(x.start for x in again) == 120
    later = llm.generate([QUESTIONS[2]], ASKED, context=context)
    assert later[0].token_ids == plain[0].token_ids
    assert llm.engine.scheduler.compressions.num_done >= 1
    llm.runner.pool.check_integrity()


def test_a_context_s_tokens_are_judged_by_no_other_request_s_queries() -> None:
    """Nobody computed the context's queries in this slot but a request that is gone."""
    found = []
    for others in ([], [tokens(1, 150, seed=3)[0].tolist()]):
        llm = llm_of(evict="expected-attention", keep_tokens=0.3)
        context = llm.pack(BOOK, factor=2, measure=False)
        for ids in others:
            llm.generate([ids], ASKED)
        found += llm.generate([QUESTIONS[1]], ASKED, context=context)
        assert llm.engine.scheduler.compressions.num_done == 1 + len(others)
    alone, later = ([y.chosen for y in x.logprobs] for x in found)
    assert found[0].token_ids == found[1].token_ids
    assert later == pytest.approx(alone, abs=1e-4)


def test_what_it_takes_and_costs_is_said() -> None:
    said: list[tuple[str, int, int]] = []
    llm = llm_of()
    context = llm.pack(BOOK, factor=8, progress=lambda *x: said.append(x))
    report = context.origin["report"]
    assert 0 < report["full_loss"] <= report["loss"] + 1
    assert "120 tokens" in context.summary and "nats/token" in context.summary
    assert ("reading", 120, 120) in said and ("compressing", 1, 1) in said
    assert llm.pack(BOOK, factor=8, measure=False).origin["report"]["loss"] is None
    watched = llm_of(evict="snapkv-w8")
    both = [watched.pack(BOOK, factor=8, measure=x) for x in (True, False)]
    assert all(map(torch.equal, *(x.pages for x in both))), "a sample changed what is kept"


def test_without_eviction_a_context_is_whole() -> None:
    llm = llm_of(evict=None, keep_tokens=None)
    with pytest.raises(SettingError, match="factor=3 asks to evict tokens: set evict"):
        llm.pack(BOOK, factor=3)
    context = llm.pack(BOOK, factor=1)
    assert (context.lengths == 120).all()
    found = llm.generate(QUESTIONS, ASKED, context=context)
    own = CacheParams(prefix_caching=False)
    plain = llm.generate([[*BOOK, *ids] for ids in QUESTIONS], ASKED, cache=own)
    assert [x.token_ids for x in found] == [x.token_ids for x in plain]


def test_chunks_behind_a_context_begin_with_it_whatever_else_is_served(monkeypatch) -> None:
    """A policy that looks at 32 tokens together sees the same ones alone and beside others."""
    policy = policies.get("compactor").changed(chunk=32)
    monkeypatch.setattr(policies, "get", {"compactor": policy}.__getitem__)
    questions, limits = (
        [tokens(1, 50, seed=n)[0].tolist() for n in range(2)],
        CacheParams(max_cache_tokens=40),
    )
    found = []
    for some, most in ((questions[1:], 2048), (questions, 90)):
        llm = llm_of(evict="compactor", chunk=64)
        context = llm.pack(BOOK, factor=2, measure=False)
        llm.engine.scheduler.max_batch_tokens = most
        run, batches = llm.runner.run, []
        llm.runner.run = lambda *x, y=batches, z=run: y.append(x[0]) or z(*x)
        found.append(llm.generate(some, ASKED, cache=limits, context=context)[-1])
        assert llm.engine.scheduler.compressions.num_done == len(some)
    assert found[0].token_ids == found[1].token_ids
    both = ([y.chosen for y in x.logprobs] for x in found)
    assert next(both) == pytest.approx(next(both), abs=1e-4)
    chunks = [len(x.tokens) for batch in batches for x in batch.chunks if not x.is_decode]
    assert chunks == [50, 32, 18], "the second is cut where its own 32 tokens end"


def test_refused(tmp_path) -> None:
    llm = llm_of()
    context = llm.pack(BOOK, factor=8, measure=False)
    torch.manual_seed(1)
    other = tiny("llama-gqa")
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    stored = {"kv_bytes": 2**23, "evict": "kvzip", "keep_tokens": 1.0, "max_tokens": 256}
    with pytest.raises(SettingError, match="another model"):
        LLM(other, page=8, **stored).generate(QUESTIONS, context=context)
    for own in ({"page": 16}, {"bits": 8}):
        with pytest.raises(SettingError, match=r"page=8, .*stores cache entries in another way"):
            llm_of(**own).generate(QUESTIONS, context=context)
    with pytest.raises(ValueError, match="must be a PackedContext"):
        llm.generate(QUESTIONS, context="book.kvf")
    with pytest.raises(SettingError, match=r"has 300 tokens, and max_tokens is 256"):
        llm.pack(tokens(1, 300)[0].tolist())
    with pytest.raises(SettingError, match="sliding window"):
        LLM(tiny("mistral-sliding"), kv_bytes=2**22).pack(BOOK)
    with pytest.raises(ValueError, match="no such file; `kvfold pack` makes one"):
        PackedContext.load(tmp_path / "none.kvf")
    (tmp_path / "text.kvf").write_text("no tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        PackedContext.load(tmp_path / "text.kvf")
    context.save(tmp_path / "book.kvf")
    save_file(load_file(tmp_path / "book.kvf"), tmp_path / "bare.kvf")
    with pytest.raises(ValueError, match="not made by this version"):
        PackedContext.load(tmp_path / "bare.kvf")


def test_a_context_needs_a_free_slot() -> None:
    llm = llm_of(max_sequences=2)
    with llm.stream(BOOK, ASKED) as first, llm.stream(BOOK, ASKED) as second:
        next(first)
        next(second)
        with pytest.raises(SettingError, match="max_sequences: 2 requests are running"):
            llm.pack(BOOK, factor=8)
        tokens_after = [x for output in (*first, *second) for x in output.token_ids]
    assert len(tokens_after) == 2 * (ASKED.max_new_tokens - 1)
    assert llm.pack(BOOK, factor=8, measure=False).token_ids == tuple(BOOK)


# Random events -----------------------------------------------------------------------------------


class Books:
    """Contexts of a stub, and the tokens of whoever goes on from one."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self.bench, self.rng = bench, rng
        self.kept: dict[PackedContext, set[int]] = {}  # positions that both groups hold

    def pack(self) -> None:
        """Read and evict in the bench's own pool, as `LLM.pack` does between steps."""
        pool, stub = self.bench.pool, self.bench.runner
        ids = [self.rng.randrange(1, VOCAB) for _ in range(self.rng.randrange(8, 30))]
        if len(pool.open_slots) == pool.num_slots:
            return
        slot = pool.allocate_slot()
        if pool.make_room_to_extend([slot], [len(ids)]):
            pool.extend([slot], [len(ids)])
            kept = sorted(self.rng.sample(range(len(ids)), self.rng.randrange(1, len(ids))))
            rows = [kept, range(len(ids))]
            for group, positions in enumerate(rows):
                for row, position in enumerate(positions):
                    stub._cell(slot, group, row)[:] = ids[position] + 1, position
            pool.truncate(slot, [len(kept), len(ids)])
            lengths, pages = pool.dump(slot)
            made = PackedContext(
                token_ids=tuple(ids), lengths=lengths, pages=tuple(pages), origin={}
            )
            self.kept[made] = set(kept)
        pool.free_slot(slot)

    def drop(self) -> None:
        self.kept.pop(self.rng.choice(list(self.kept)))

    def wanted(self, context: PackedContext, prompt: list[int], params: SamplingParams):
        return alone(context.token_ids, frozenset(self.kept[context]), tuple(prompt), params)


@cache
def alone(
    read: tuple[int, ...], kept: frozenset[int], prompt: tuple[int, ...], params: SamplingParams
) -> list[int]:
    tokens = [*read, *prompt]
    start = len(tokens)
    while len(tokens) - start < params.max_new_tokens:
        seen = [x if i in kept or i >= len(read) else None for i, x in enumerate(tokens)]
        place = [params.seed or 0], [len(tokens)]
        choice = sample(logits_after(seen)[None], [params], *place).on_host([params])[0]
        tokens.append(choice.token)
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[start:]


@pytest.mark.parametrize("pool", ["shared", "tracked"])
@pytest.mark.parametrize(
    "events", [1_000, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.slow])]
)
def test_many_random_events(events: int, pool: str) -> None:
    """Packing, sharing, evicting, cancelling while pages are short: all pages are conserved, and
    who is not evicted has the tokens that it has alone."""
    rng = random.Random(2)
    bench = Bench(48, pool=pool, num_slots=5, max_tokens=90, schedule=Schedule(every=9))
    bench.prefixes._updates_metrics = pool == "tracked"  # so that contexts are copied
    books, requests = Books(bench, rng), shared_prompts(100)
    wanted: dict[int, list[int]] = {}
    counts: Counter[str] = Counter()

    def ask() -> None:
        prompt, params = rng.choice(requests)
        context = rng.choice([None, *books.kept]) if books.kept else None
        cache = CacheParams(max_cache_tokens=rng.choice([None, None, None, 12]))
        ids = [*(context.token_ids if context else ()), *prompt]
        request = bench.engine.request(ids, params, cache, None, context)
        bench.engine.submit(request)
        counts["with context" if context else "without"] += 1
        if cache.max_cache_tokens is None:
            none = PackedContext(token_ids=(), lengths=np.zeros(2), pages=(), origin={})
            books.kept.setdefault(none, set()) if context is None else None
            wanted[request.id] = books.wanted(context or none, prompt, params)
            books.kept.pop(none, None)

    for i in range(events):
        chance = rng.random()
        if chance < 0.1 and len(bench.engine._requests) < 12:
            ask()
        elif chance < 0.12:
            bench.engine.cancel(rng.choice(list(bench.engine._requests) or [0]))
        elif chance < 0.13:
            books.pack()
        elif chance < 0.135 and len(books.kept) > 2:
            books.drop()
        elif chance < 0.136:
            bench.runner.culprits |= {rng.choice(list(bench.engine._requests) or [0])}
        else:
            bench.step()
        if i % 8 == 0:
            bench.check()
    bench.drain()
    for id, whole in wanted.items():
        reason, found = bench.ended[id].finish_reason, bench.tokens.get(id, [])
        cut = reason not in ("eos", "length")
        assert found == (whole[: len(found)] if cut else whole), (id, reason)
        counts[reason] += 1
    assert counts["with context"] > events / 100 and counts["length"] > events / 100, counts
    assert bench.scheduler.num_preemptions and bench.scheduler.compressions.num_done
    bench.pool.drop_all()
    assert not sum(x.used_pages for x in bench.pool.stats().classes)
