"""Rows of two widths: what narrow ones are, who becomes narrow, and whose bytes they are.

Without a GPU the kernels run in Triton's interpreter.
"""

import os
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from commands import refused
from kvfold import recipes
from kvfold.attention import hybrid as attention
from kvfold.attention.selector import kernels
from kvfold.cache.pool import Pool, PoolFull
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig, Ratios
from kvfold.engine.api.llm import LLM
from kvfold.engine.requests.request import Batch, SamplingParams
from kvfold.engine.runner import demotion, eviction
from kvfold.engine.runner.build import build_runner, check_served
from kvfold.engine.runner.demotion import Demoter, low_rank_columns
from kvfold.evaluation import ratios
from kvfold.evaluation.gpu_memory import GIB, GPUMemory
from kvfold.evaluation.importance import orders
from kvfold.evaluation.measure import Measurement, measure
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import window_perplexity
from kvfold.experimental.hybrid import check_recipe, with_leaders
from kvfold.hub.checkpoint import mark, spec_of
from kvfold.hub.loading import load_tokenizer
from kvfold.layout import CacheSpec
from kvfold.layout.pages import cache_layout
from kvfold.models.families import family_of
from kvfold.models.folded import layer_shapes
from kvfold.ops.store import append, gather
from kvfold.utils.errors import SettingError
from kvfold.vllm_plugin.tensor_parallel import ProcessShare
from models import tiny, tokens
from steps import DEVICE, backends, even, logits_of, sequences_of, step

pytestmark = pytest.mark.gpu

PROMPT, PAGE, ALIGN = 57, 4, 2
RATIOS = Ratios(keys=0.2, low_rank_keys=0.6, values=0.2, low_rank_values=0.4, important_last=0.6)
FAMILIES = ("llama-gqa", "llama-mha", "llama3-scaling", "qwen3", "opt", "gpt-neox")
CAPTURED = "kvfold_test_captured"


def folded(name: str, given: Ratios = RATIOS, recipe: str = "zack", hybrid: bool = True, **how):
    """A tiny model with rows of two widths, or with the wide ones alone."""
    model = tiny(name, **how)
    settings = even(recipe)
    found = calibrate(
        model, family_of(model.config), tokens(8, 64), Compressor(model, settings).needs
    )
    prepared = Compressor(model, settings).prepare(found)
    spec = prepared.plan_hybrid(given, ALIGN)
    prepared.fold(spec if hybrid else replace(spec, hybrid=None), {})
    return model


def session_of(model, **settings) -> PagedSession:
    config = CacheConfig(kv_bytes=2**21, page=PAGE, **settings)
    runner = build_runner(model, config, num_slots=2, max_tokens=128)
    return PagedSession(runner, chunk=20)


def wide_positions(session: PagedSession) -> list[set[int]]:
    """Of every group, positions whose rows are wide."""
    slot = session.sequence.open_slot
    _, positions, valid = session.runner.eviction.tracked(slot)
    return [set(row[own].tolist()) for row, own in zip(positions[0], valid[0], strict=True)]


def truncate(session: PagedSession, wide: list[set[int]], narrow: CacheSpec) -> None:
    """Zero what narrow rows leave out of the rows of all tokens but the wide ones, in place."""
    pool, slot = session.runner.pool, torch.tensor([session.sequence.open_slot])
    size = session.sequence.num_computed
    for layer, where in enumerate(pool.layout.layer_groups):
        pages = pool.pages(where)
        rows = gather(pages, slot, pages.lengths[slot], torch.float32, size).rows[0].clone()
        gone = [i for i in range(size) if i not in wide[where.start]]
        keep = low_rank_columns(pool.layout.spec.layers[layer], narrow.layers[layer])
        mask = torch.zeros(rows.shape[1]).index_fill_(0, torch.from_numpy(keep), 1)
        index = torch.tensor(gone)[:, None].expand(-1, len(pages.groups))
        append(pages, rows[gone] * mask, slot.expand(len(gone)), index)


@pytest.mark.parametrize(
    ("name", "count", "given"),
    [
        *((name, count, RATIOS) for name in FAMILIES for count in (1, 5)),
        ("llama-gqa", 5, Ratios(low_rank_keys=0.96, important_last=0.1)),  # keys leave no number
        ("opt", 5, Ratios(low_rank_keys=0.0, low_rank_values=0.96, important=0, important_last=0)),
    ],
)
def test_computes_what_truncated_rows_give(name: str, count: int, given: Ratios) -> None:
    """Through prefill, and demotions as a sequence goes on, in decode steps and in chunks."""
    model, plain = folded(name, given), folded(name, given, hybrid=False)
    narrow = spec_of(model).low_rank
    ids = tokens(1, 120)[0].tolist()
    with session_of(model) as found, session_of(plain) as wanted:
        prompt = {"prompt": PROMPT}
        first = [logits_of(x, ids[:PROMPT], **prompt) for x in (found, wanted)]
        torch.testing.assert_close(*first, rtol=1e-4, atol=1e-4)
        rounds = set()
        for at in range(PROMPT, PROMPT + 8 * count, count):
            found.compress()
            wide = wide_positions(found)
            truncate(wanted, wide, narrow)
            both = [logits_of(x, ids[at : at + count]) for x in (found, wanted)]
            torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
            found.runner.pool.check_integrity()
            rounds.add(int(found.runner.pool.coarse.host_lengths.sum()))
        pool, slot = found.runner.pool, found.sequence.open_slot
        both = pool.host_lengths[slot] + pool.coarse.host_lengths[slot]
        assert (both == found.sequence.num_computed).all() and len(rounds) > 1


def _captured(module, query, key, value, attention_mask, scaling=None, **_):
    """Eager attention that keeps every token's softmax denominators, summed over heads."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query.double() @ key.double().mT * scaling
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).bool().tril(), -torch.inf)
    module.denominators = scores.exp().sum((1, 3))[0]
    weights = scores.softmax(-1)
    module.attended = weights.sum((1, 2))[0]
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(CAPTURED, _captured)


@pytest.mark.parametrize("by", ["denominators", "attention"])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_important_tokens_have_the_largest_denominators(name: str, by: str) -> None:
    """Those of the original model, from which one without removals differs by rounding."""
    given = replace(RATIOS, keys=0, values=0, by=by)
    original, ids = tiny(name), tokens(1, PROMPT)
    original.set_attn_implementation(CAPTURED)
    with torch.no_grad():
        original(ids)
    with session_of(folded(name, given)) as session:
        logits_of(session, ids[0].tolist(), prompt=PROMPT)
        session.compress()
        wide = wide_positions(session)
        layout = session.runner.pool.layout
    modules = list(family_of(original.config).attentions(original))
    for group, own in zip(layout.groups, wide, strict=True):
        worth = getattr(modules[group.layer], {"attention": "attended"}.get(by, by))
        share = layout.spec.hybrid.important[group.layer]
        assert len(own) == -(-round(share * PROMPT, 6) // PAGE) * PAGE
        assert own == set(worth.argsort(descending=True)[: len(own)].tolist())


def test_layers_that_agree_follow_one() -> None:
    """They take its tokens; a layer whose tokens differ leads itself."""
    model = folded("llama-gqa")
    spec, ids = spec_of(model), tokens(2, PROMPT)
    same = [np.stack([np.arange(40)] * 2), np.stack([np.arange(40)] * 2)]
    found = with_leaders(spec, same)
    assert found.hybrid.leaders == (0, 0) and found.hybrid.important == (0.25, 0.25)
    other = [np.stack((np.arange(40), np.arange(40)[::-1]))]
    assert with_leaders(spec, other).hybrid.leaders == (0, 1)
    mark(model, found, {})
    with session_of(model) as session:
        logits_of(session, ids[0].tolist(), prompt=PROMPT)
        session.compress()
        wide = wide_positions(session)
        assert all(own == wide[0] for own in wide)
        for at in range(40):
            logits_of(session, [5 + at])
        later = wide_positions(session)
        assert all(own == later[0] for own in later) and len(later[0]) > len(wide[0])
    assert [x.shape for x in orders(model, ids)] == [(2, PROMPT)] * 2


def test_bytes_are_those_of_pages() -> None:
    """Of both widths, as the layouts count them; narrow ones carry no positions and metrics."""
    with session_of(folded("llama-gqa")) as session:
        pool, slot = session.runner.pool, session.sequence.open_slot
        logits_of(session, tokens(1, PROMPT)[0].tolist(), prompt=PROMPT)
        whole = pool.used_bytes
        session.compress()
        layouts = pool.layout, pool.layout.coarse
        rows = pool.host_lengths[slot], pool.coarse.host_lengths[slot]
        size = sum(
            -(-int(count) // PAGE) * group.layout.page_bytes
            for layout, counts in zip(layouts, rows, strict=True)
            for group, count in zip(layout.groups, counts, strict=True)
        )
        assert pool.used_bytes == size < whole
        stats, held = pool.stats(), session.footprint()
        assert stats.sequence_bytes[slot] == held.cache_bytes == size
        assert stats.used_bytes == sum(x.used_pages * x.page_bytes for x in stats.classes)
        narrow = layouts[1].groups[0].layout
        assert narrow.blocks.positions.size == narrow.blocks.metrics.size == 0
        assert sum(x.width for x in narrow.segments) == sum(
            x.rank for x in layouts[1].spec.layers[0].latents if x.heads == (0,)
        )
        bits = sum(
            int(count) * group.layout.row_bits
            for layout, counts in zip(layouts, rows, strict=True)
            for group, count in zip(layout.groups, counts, strict=True)
        )
        full = 16 * layouts[0].spec.geometry.full_numbers * PROMPT
        assert held.kept_fraction == pytest.approx(bits / full)
    assert pool.used_bytes == 0
    pool.check_integrity()


def test_random_events() -> None:
    """Sequences that grow, become narrow and end, in a pool that is too small for all."""
    rng = np.random.default_rng(0)
    layout = cache_layout(spec_of(folded("llama-gqa")), page=PAGE, tracked=True)
    pool = Pool(layout, 40 * layout.page_bytes, num_slots=5, max_tokens=64)
    full = 0
    for _ in range(600):
        slots = pool.open_slots
        event = rng.choice(["open", "extend", "demote", "close"], p=[0.2, 0.5, 0.2, 0.1])
        try:
            if event == "open" or not slots:
                pool.allocate_slot()
            elif event == "extend":
                pool.extend(slots, rng.integers(0, 6, len(slots)))
            elif event == "demote":
                count = rng.integers(0, pool.host_lengths[slots] + 1)
                pool.coarse.extend(slots, count)
                pool.truncate(slots, pool.host_lengths[slots] - count)
            else:
                pool.free_slot(rng.choice(slots))
        except PoolFull:
            full += 1
        pool.check_integrity()
    assert full > 20
    for slot in pool.open_slots:
        pool.free_slot(slot)
    pool.check_integrity()
    assert pool.used_bytes == 0 and not pool.coarse.host_lengths.any()


def engine(kv_bytes: int, **settings) -> LLM:
    sizes = {"kv_bytes": kv_bytes, "page": PAGE, "max_sequences": 4, "max_tokens": 100}
    return LLM(folded("llama-gqa"), **sizes, **settings)


def test_tokens_do_not_depend_on_others() -> None:
    """Each becomes narrow by itself, as it goes on; nothing is left of it."""
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (30, 12, 40, 3, 25)]
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (40, 33, 5, 50, 18)]
    together = engine(2**21)
    found = [x.token_ids for x in together.generate(prompts, params)]
    scheduler = together.engine.scheduler
    assert scheduler.compressions.num_done > 10 and scheduler.compressions.num_evicted == 0
    together.runner.pool.check_integrity()
    assert together.runner.pool.used_bytes == 0
    alone = [
        engine(2**21).generate([x], [p])[0].token_ids for x, p in zip(prompts, params, strict=True)
    ]
    assert found == alone


@pytest.mark.parametrize("by", ["denominators", "attention"])
def test_a_step_is_repeated_only_if_importance_stays(
    by: Literal["denominators", "attention"],
) -> None:
    """A step that fails, for want of memory, runs again in halves."""
    config = CacheConfig(kv_bytes=2**21, page=PAGE)
    runner = build_runner(
        folded("llama-gqa", replace(RATIOS, by=by)), config, num_slots=2, max_tokens=96
    )
    (request,) = sequences_of(runner, 30)
    step(runner, (request, 20))
    chunk = request.next_chunk(10)
    runner.pool.extend([request.open_slot], [10])
    importance = []
    for _ in range(2):
        runner.run(Batch(chunks=(chunk,)))
        importance.append(runner.eviction.tracked(request.open_slot)[0])
    assert torch.allclose(*importance) is runner.can_retry is (by == "denominators")


def test_goes_on_where_memory_is_short() -> None:
    params = SamplingParams(max_new_tokens=80, ignore_eos=True)
    small = engine(64 * 2**10)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (5, 6, 7, 8, 9)]
    for x in small.generate(prompts, params):
        assert len(x.token_ids) == 80 and x.finish_reason == "length"
    small.runner.pool.check_integrity()
    assert small.engine.scheduler.num_preemptions > 0 and small.runner.pool.used_bytes == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
def test_kernels_compute_what_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, demotions, and decode steps beside them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    found = []
    for use in backends(monkeypatch):
        for name, taken in (("reference", "MixedRankAttention"), ("triton", "MixedRankKernels")):
            use(name)
            model = folded("llama3-scaling", dtype=torch.float16).to(DEVICE)
            config = CacheConfig(kv_bytes=2**21, page=16)
            runner = build_runner(model, config, num_slots=2, max_tokens=96)
            chosen = runner.attention.selected
            assert {x.__name__ for x in (*chosen.decode, *chosen.prefill)} == {taken}
            first, second = sequences_of(runner, 35, 41)
            step(runner, (first, 20), (second, 41))
            runner.compress([second])
            logits = [step(runner, (second, 1), (first, 15))]
            runner.compress([first])
            assert runner.pool.coarse.host_lengths[:2].all()
            logits += [step(runner, (first, 1), (second, 1)) for _ in range(3)]
            logits.append(step(runner, (first, 4), every=True))
            runner.pool.check_integrity()
            found.append(torch.cat(logits))
    error = (found[0] - found[1]).abs().max()
    assert error < 2e-2 * found[0].abs().max()


def test_merges_by_log_sum_exp() -> None:
    """Of a part of the keys and of the rest, or of none, what attention to all gives."""
    q, k, v = (
        torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 9, 9)
    )

    def weigh(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ keys.mT
        return scores.softmax(-1) @ values, scores.logsumexp(-1) * attention.LOG2_E

    v[:, :, 4:, 6:] = 0
    less = weigh(k[:, :, 4:], v[:, :, 4:, :6])
    out, lse = attention.merged(*weigh(k[:, :, :4], v[:, :, :4]), *less)
    for a, b in zip((out, lse), weigh(k, v), strict=True):
        torch.testing.assert_close(a, b)
    nothing = torch.zeros(1, 2, 3, 6), torch.full((1, 2, 3), -torch.inf)
    torch.testing.assert_close(attention.merged(out, lse, *nothing), (out, lse))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"evict": "kv-compress", "keep_tokens": 0.5}, "evict"),
        ({"bits": 4}, "rotate=False"),
        ({"bits": 4, "format": "kivi"}, "format"),
    ],
)
def test_refuses_what_does_not_go_with_it(settings: dict, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        session_of(folded("llama-gqa"), **settings)


@pytest.mark.parametrize("command", ["generate", "eval", "advise", "pack"])
def test_commands_refuse_it_before_weights_are_read(command: str, tmp_path, capsys) -> None:
    model = tmp_path / "model"
    folded("llama-gqa").config.save_pretrained(model)
    (model / "model.safetensors").touch()
    load_tokenizer("reference:gqa").save_pretrained(model)
    given = {
        "generate": ["--prompt", "x"],
        "pack": ["--context", __file__, "--output", tmp_path / "x.kvf"],
    }
    settings = given.get(command, [])
    if command != "pack":
        settings += ["--evict", "h2o", "--keep-tokens", 0.5]
    line = refused(capsys, command, model, *settings)
    assert "--evict" in line and "entries have two widths (--hybrid)" in line


def test_rows_become_narrow_where_wide_ones_fill_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer after another, as pages come free, to what a large pool gives; or not at all."""
    units, moves = [], Demoter._move

    def recorded(self, slots, goes, count, layers=None) -> bool:
        done = moves(self, slots, goes, count, layers)
        units.append((layers, done))
        return done

    monkeypatch.setattr(Demoter, "_move", recorded)
    ids, found = tokens(1, 120)[0].tolist(), []
    model = folded("llama-gqa", replace(RATIOS, important_last=0.25))
    layout = session_of(model).runner.pool.layout
    most = layout.page_bytes * -(-PROMPT // PAGE)
    for size in (2**21, most * 5 // 4, most * 21 // 20):
        config = CacheConfig(kv_bytes=size, page=PAGE)
        runner = build_runner(model, config, num_slots=1, max_tokens=128)
        with PagedSession(runner) as session:
            pool, slot = runner.pool, session.sequence.open_slot
            logits_of(session, ids[:PROMPT], prompt=PROMPT)
            try:
                session.compress()
            except PoolFull:
                assert size < most * 5 // 4 and not pool.coarse.host_lengths.any()
                continue
            pool.check_integrity()
            assert pool.coarse.host_lengths[slot].all()
            found.append(logits_of(session, ids[PROMPT : PROMPT + 3]))
    assert len(found) == 2
    torch.testing.assert_close(*found)
    none = [(None, False), ((0,), False), ((1,), False)]
    assert units == [(None, True), (None, False), ((0,), True), ((1,), True), *none]


def test_layers_of_one_leader_need_room_together() -> None:
    """Which a pool of the size that a layout asks for has, for one sequence after another."""
    model = folded("llama-gqa", replace(RATIOS, important_last=0.25))
    layout = session_of(model).runner.pool.layout
    apart, spec = layout.spare_page_bytes, layout.spec
    mark(model, replace(spec, hybrid=replace(spec.hybrid, leaders=(0, 0))), {})
    layout, tokens_each = session_of(model).runner.pool.layout, 240
    assert layout.spare_page_bytes == layout.coarse.page_bytes == 2 * apart
    enough = layout.bytes_for(2, tokens_each) - 2**20
    for size in (enough, enough - layout.spare_page_bytes * tokens_each // PAGE):
        config = CacheConfig(kv_bytes=size, page=PAGE)
        runner = build_runner(model, config, num_slots=2, max_tokens=tokens_each)
        requests = sequences_of(runner, tokens_each, tokens_each)
        for x in requests:
            step(runner, (x, tokens_each))
        if size < enough:
            with pytest.raises(PoolFull, match="no free pages for low-rank entries"):
                runner.compress(requests)
            assert not runner.pool.coarse.host_lengths.any()
        else:
            runner.compress(requests)
            held = set(runner.pool.stats().sequence_bytes.values())
            assert held == {layout.sequence_bytes(tokens_each)}
        runner.pool.check_integrity()


def test_gpu_memory_counts_both_widths() -> None:
    """Wide rows alone while a prompt is read; more requests fit than of wide rows alone."""
    model = folded("llama-gqa")
    spec, cache = spec_of(model), CacheConfig(page=PAGE)
    both = [
        GPUMemory(config=model.config, spec=x, cache=cache, gpu_bytes=4 * GIB)
        for x in (spec, replace(spec, hybrid=None))
    ]
    mean, wide = (x.request_bytes(240) for x in both)
    assert mean < 0.9 * wide and both[0].room(240).requests > both[1].room(240).requests
    assert both[0].layout.spare_page_bytes > both[1].layout.spare_page_bytes == 0


def test_work_space_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of few sequences at a time become narrow as all do at once."""
    model, found, sizes = folded("llama-gqa"), [], []

    def seen(pages, slots, lengths, dtype, size):
        sizes.append((len(slots), size))
        return gather(pages, slots, lengths, dtype, size)

    monkeypatch.setattr(demotion, "gather", seen)
    for numbers, rows in ((2**24, 10**7), (600, 10**7), (600, 1)):
        monkeypatch.setattr(demotion, "NUMBERS", numbers)
        monkeypatch.setattr(eviction, "MAX_ENTRIES", rows)
        config = CacheConfig(kv_bytes=2**21, page=PAGE)
        runner = build_runner(model, config, num_slots=3, max_tokens=128)
        lengths = 60, 47, 90
        requests = sequences_of(runner, *lengths)
        for x, length in zip(requests, lengths, strict=True):
            step(runner, (x, length))
        sizes.clear()
        runner.compress(requests)
        width = max(x.row_width for x in spec_of(model).layers)
        assert numbers > 600 or all(b * t * width <= 600 for b, t in sizes)
        assert {b for b, _ in sizes} == ({3} if rows > 1 else {1})
        runner.pool.check_integrity()
        after = [step(runner, *((x, 1) for x in requests)) for _ in range(2)]
        found.append([torch.from_numpy(runner.pool.coarse.host_lengths), *after])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_quantized_rows_become_narrow() -> None:
    """At 8 bits, not turned, close to what 16 bits give."""
    ids, found = tokens(1, 100)[0].tolist(), []
    for settings in ({}, {"bits": 8, "rotate": False}):
        with session_of(folded("llama-gqa"), **settings) as session:
            logits_of(session, ids[:PROMPT], prompt=PROMPT)
            session.compress()
            found.append(logits_of(session, ids[PROMPT:]))
            session.runner.pool.check_integrity()
    assert 0 < (found[0] - found[1]).abs().max() < 0.05 * found[0].abs().max()


@pytest.mark.parametrize("recipe", ["palu-m", "lorc"])
def test_refuses_recipes_without_narrow_rows(recipe: str) -> None:
    with pytest.raises(SettingError, match="hybrid"):
        folded("llama-gqa", recipe=recipe)


def test_refuses_ratios_that_leave_nothing() -> None:
    with pytest.raises(SettingError, match="no number of a head: lower keys or values"):
        folded("llama-gqa", Ratios(values=0.97, low_rank_values=0.97))
    with pytest.raises(SettingError, match="unimportant tokens no number: lower low_rank_keys"):
        folded("llama-gqa", Ratios(low_rank_keys=0.97, low_rank_values=0.97))
    with pytest.raises(SettingError, match="hybrid is empty: give some of keys"):
        Ratios.parse("")


def test_former_names_of_ratios_are_parsed() -> None:
    former = "narrow_keys=0.6,keys=0.2,narrow_values=0.5"
    assert Ratios.parse(former) == Ratios(keys=0.2, low_rank_keys=0.6, low_rank_values=0.5)


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma2"])
def test_refuses_models_whose_attention_reads_one_width(name: str) -> None:
    with pytest.raises(SettingError, match="sliding window or capped"):
        folded(name)


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma2"])
def test_an_engine_refuses_a_saved_spec_of_theirs(name: str) -> None:
    config, spec = tiny(name).config, spec_of(folded("llama-gqa"))
    spec = replace(spec, geometry=family_of(config).geometry(config))
    with pytest.raises(SettingError, match="which attention with a sliding window or capped"):
        check_served(config, spec, None, CacheConfig())


@pytest.mark.parametrize(
    ("recipe", "said"),
    [("palu-m", "stores pre_rope keys"), ("fast", "share latents")],
)
def test_recipes_are_refused_before_they_are_calibrated(recipe: str, said: str) -> None:
    wrong = replace(recipes.get(recipe), values="joint")
    with pytest.raises(SettingError, match=said):
        check_recipe(wrong, "post_rope" if recipe == "fast" else "pre_rope")


def test_spec_survives_json() -> None:
    spec = spec_of(folded("llama-gqa"))
    assert CacheSpec.from_dict(spec.to_dict()) == spec and spec.hybrid is not None
    plain = replace(spec, hybrid=None)
    assert "hybrid" not in plain.to_dict() and CacheSpec.from_dict(plain.to_dict()) == plain
    assert spec.low_rank.kept_fraction < spec.kept_fraction < plain.kept_fraction


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", [[1, 2]]),
        ("ranks", [[99] * 4] * 2),
        ("important", [0.5, 1.5]),
        ("leaders", [0, 5]),
        ("leaders", [0, 0]),  # of unequal shares
        ("by", "size"),
    ],
)
def test_refuses_an_edited_spec(field: str, value: list) -> None:
    saved = spec_of(folded("llama-gqa")).to_dict()
    saved["hybrid"][field] = value
    with pytest.raises(ValueError, match=r"cache\.hybrid"):
        CacheSpec.from_dict(saved)


def test_a_page_of_rows_goes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a row with every token, which would read all rows in every step."""
    rounds = []
    demote = Demoter.demote_entries

    def counted(self, requests) -> None:
        rounds.append(len(requests))
        demote(self, requests)

    monkeypatch.setattr(Demoter, "demote_entries", counted)
    params = SamplingParams(max_new_tokens=48, ignore_eos=True)
    engine(2**21).generate([tokens(1, 16)[0].tolist()], params)
    assert 5 < len(rounds) <= 1 + 48 / PAGE


def test_evaluation_measures_both_widths() -> None:
    """On pages, though nothing else asks for them."""
    model = folded("llama-gqa")
    ids = tokens(1, 64)
    found = measure(model, None, Measurement(windows={"text": ids}))
    with session_of(model) as session:
        logits_of(session, ids[0, :32].tolist(), prompt=32)
        session.compress()
        assert (
            session.footprint().kept_fraction
            < spec_of(folded("llama-gqa", hybrid=False)).kept_fraction
        )
    assert found.footprint is not None and found.footprint.tokens == 32


def test_shares_no_prefix_and_packs_no_context() -> None:
    with pytest.raises(SettingError, match="become low-rank"):
        engine(2**21, prefix_caching=True)
    llm = engine(2**21)
    with pytest.raises(SettingError, match="two widths"):
        llm.pack(tokens(1, 40)[0].tolist())


def test_says_what_kernels_do_not_read() -> None:
    """Of either width; nothing falls back silently on a GPU."""
    model = folded("llama-gqa", dtype=torch.bfloat16)
    spec = spec_of(model)
    shapes = layer_shapes(model.config, spec)
    assert kernels(shapes, cache_layout(spec, tracked=True), torch.bfloat16).complete
    odd = cache_layout(spec, tracked=True, bits=3)
    found = kernels(shapes, odd, torch.bfloat16)
    assert found.decode == 0 and found.prefill == 2 and "8, 4 and 2 bits" in str(found)
    less = odd.coarse
    assert less is not None
    mixed = replace(cache_layout(spec, tracked=True), coarse=less)
    assert kernels(shapes, mixed, torch.bfloat16).decode == 0


def test_vllm_refuses_it() -> None:
    stored = pytest.importorskip("kvfold.vllm_plugin.model_cache")
    model = folded("llama-gqa")
    with pytest.raises(ValueError, match="two widths"):
        stored.ModelCache.from_checkpoint(
            model.config, CacheConfig(), torch.float32, ProcessShare()
        )


def test_search_takes_the_smallest_choice_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those measured, none smaller is within it."""
    model, ids = tiny("llama-gqa"), tokens(2, 48)
    monkeypatch.setattr(Compressor, "windows", lambda self: ids)
    monkeypatch.setattr(ratios, "held_out", lambda *_: ids)
    losses = iter([0.0, *np.linspace(1.0, 0.0, 60)])  # the original's, then ever less
    tried: list[float] = []

    def measured(sessions, rows, *, scored_from, progress):
        spec = sessions.args[0].pool.layout.spec
        tried.append(spec.kept_fraction)
        result, held = window_perplexity(sessions, rows[:1], scored_from=scored_from)
        return replace(result, perplexity=float(np.exp(next(losses)))), held

    monkeypatch.setattr(ratios, "window_perplexity", measured)
    settings = even("zack")
    needs = Compressor(model, settings).needs
    found = calibrate(model, family_of(model.config), tokens(8, 64), needs)
    prepared = Compressor(model, settings).prepare(found)
    chosen, ratio = ratios.search_ratios(prepared, np.exp(0.9), align=ALIGN)
    assert len(tried) == 1 + 7 and tried[1:] == sorted(tried[1:]) and ratio <= np.exp(0.9)
    assert prepared.plan_hybrid(chosen, ALIGN).kept_fraction == tried[-1]
    losses = iter([0.0] + [1.0] * 60)
    with pytest.raises(SettingError, match="none of 60 choices"):
        ratios.search_ratios(prepared, 1.01, align=ALIGN)


def test_choices_are_what_the_text_allows() -> None:
    """Unimportant tokens lose more, keys at least what values do, deeper layers keep more whole."""
    for x in ratios.candidate_ratios():
        assert (
            x.low_rank_keys > x.keys >= x.values and x.low_rank_keys >= x.low_rank_values > x.values
        )
        assert x.important < x.important_last
