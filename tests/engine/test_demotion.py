"""Pages that are demoted to fewer bits where memory is short (`when_full="demote"`): what they
hold, attention over them, and whose they are."""

import pytest
import torch
from torch import Tensor

from kvfold import LLM, SamplingParams, recipes
from kvfold.attention.backend import AttentionBackend
from kvfold.attention.coarse import CoarseDecode, NumbaCoarseDecode
from kvfold.attention.metadata import AttentionMetadata
from kvfold.cache.pool import Pool
from kvfold.cache.sharing import SharingPool
from kvfold.config import CacheConfig
from kvfold.engine.requests.request import Batch, Request
from kvfold.engine.runner import page_demotion
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.page_demotion import KEPT, MOST
from kvfold.engine.runner.runner import ModelRunner
from kvfold.ops.store import append, gather
from kvfold.utils.errors import SettingError
from models import tiny
from steps import folded

PAGE, RATIO = 8, 2
SETTINGS = {"bits": 8, "page": PAGE, "max_sequences": 4, "max_tokens": 200}
PROMPTS = [[*range(5 + i, 65 + i)] for i in range(4)]
OUTPUTS = SamplingParams(max_new_tokens=60, ignore_eos=True)
MANY = [i * 7 % 97 for i in range(123)]


@pytest.fixture(scope="module")
def model():
    return tiny("llama-gqa")


def llm_of(model, share: float | None = None, **settings) -> LLM:
    """An engine with a pool for this share of all requests' pages; None: for more than all."""
    settings = SETTINGS | {"when_full": "demote"} | settings
    if share is None:
        return LLM(model, **settings)
    layout = LLM(model, **settings).runner.pool.layout
    pages = len(PROMPTS) * -(-(len(PROMPTS[0]) + OUTPUTS.max_new_tokens) // PAGE)
    return LLM(model, **settings, kv_bytes=int(layout.page_bytes * pages * share))


def check_empty(llm: LLM) -> None:
    """No page and no entry is left of any sequence."""
    pool = llm.runner.pool
    pool.check_integrity()
    assert pool.used_bytes == 0 and not pool.host_lengths.any()
    assert pool.coarse is not None and not pool.coarse.host_lengths.any()


# -- an engine ----------------------------------------------------------------------------------


def test_tokens_are_equal_where_nothing_is_demoted(model) -> None:
    demoting = llm_of(model)
    found = demoting.generate(PROMPTS, OUTPUTS)
    plain = LLM(model, **SETTINGS).generate(PROMPTS, OUTPUTS)
    assert [x.token_ids for x in found] == [x.token_ids for x in plain]
    assert demoting.engine.scheduler.num_demotions == 0
    check_empty(demoting)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_nobody_is_preempted_if_demotion_frees_enough(model, prefix_caching: bool) -> None:
    llm = llm_of(model, 0.8, prefix_caching=prefix_caching)
    pool, most = llm.runner.pool, 0
    ids = [llm.add(prompt, OUTPUTS) for prompt in PROMPTS]
    ends: dict[int, str] = {}
    while llm.engine.has_work:
        outputs = llm.engine.step()
        pool.check_integrity()
        most = max(most, pool.used_bytes)
        ends |= {x.id: x.finish_reason for x in outputs if x.finish_reason}
    assert ends == dict.fromkeys(ids, "length")
    scheduler = llm.engine.scheduler
    assert scheduler.num_demotions > 0 and scheduler.num_preemptions == 0
    assert most <= pool.num_bytes == pool.arena.numel() - pool.layout.groups[0].layout.page_bytes
    check_empty(llm)


def test_a_cancelled_request_returns_its_coarse_pages(model) -> None:
    llm = llm_of(model, 0.8)
    ids = [llm.add(prompt, OUTPUTS) for prompt in PROMPTS]
    coarse = llm.runner.pool.coarse
    assert coarse is not None
    while not coarse.host_lengths.any():
        llm.engine.step()
    for id in ids:
        assert llm.engine.cancel(id)
    while llm.engine.has_work:
        llm.engine.step()
    check_empty(llm)


def test_requests_are_preempted_once_nothing_is_left_to_demote(model, monkeypatch) -> None:
    monkeypatch.setattr(page_demotion, "KEPT", 9)
    llm = llm_of(model, 0.6)
    found = llm.generate(PROMPTS, OUTPUTS)
    assert {x.finish_reason for x in found} == {"length"}
    scheduler = llm.engine.scheduler
    assert scheduler.num_demotions > 0 and scheduler.num_preemptions > 0
    check_empty(llm)


def test_a_failed_demotion_ends_its_request_alone(model, monkeypatch) -> None:
    llm = llm_of(model, 0.8)
    whole, failed = llm.runner.demote, []

    def fail(request: Request) -> None:
        if not failed:
            failed.append(request.id)
            raise RuntimeError("out of memory")
        whole(request)

    monkeypatch.setattr(llm.runner, "demote", fail)
    found = llm.generate(PROMPTS, OUTPUTS)
    assert sorted(x.finish_reason for x in found) == ["error", "length", "length", "length"]
    check_empty(llm)


# -- what is stored -----------------------------------------------------------------------------


def runner_of(model, when_full: str = "demote", bits: int = 8, page: int = PAGE) -> ModelRunner:
    config = CacheConfig(bits=bits, page=page, when_full=when_full, kv_bytes=2**20)
    return build_runner(model, config, num_slots=3, max_tokens=160)


def start(runner: ModelRunner, tokens: list[int]) -> Request:
    """A sequence of these tokens, all but the last one computed."""
    request = Request.unscheduled(runner.pool.allocate_slot())
    request.token_ids += tokens
    request.prefill_until(len(tokens) - 1)
    feed(runner, [request], [len(tokens) - 1])
    return request


def feed(runner: ModelRunner, requests: list[Request], counts: list[int]) -> Tensor:
    """Logits [N, V] of the next tokens of each."""
    runner.pool.extend([x.open_slot for x in requests], counts)
    chunks = [x.next_chunk(count) for x, count in zip(requests, counts, strict=True)]
    logits = runner.run_all(Batch(chunks=tuple(chunks)))
    for request, count in zip(requests, counts, strict=True):
        request.advance(count)
    return logits


def entries(pool: Pool | None, slot: int) -> list[Tensor]:
    """The stored entries of each layer [T, R]."""
    assert pool is not None
    size, slots = int(pool.host_lengths[slot, 0]), torch.tensor([slot])
    return [
        gather(pages, slots, pages.lengths[slots], torch.float32, size).rows[0]
        for pages in map(pool.pages, pool.layout.layer_groups)
    ]


def test_demoted_entries_are_the_fine_ones_quantised_again(model) -> None:
    """And the others stay bit for bit, in their order."""
    runner = runner_of(model)
    request = start(runner, MANY)  # 122 entries: 15 whole pages
    slot, before = request.open_slot, entries(runner.pool, request.open_slot)
    used = runner.pool.used_bytes
    pages = min((15 - KEPT) // RATIO, MOST)
    runner.demote(request)
    tokens = pages * RATIO * PAGE
    assert runner.pool.used_bytes == used - pages * runner.pool.layout.page_bytes
    coarse = runner_of(model, "pre-empt", bits=4, page=RATIO * PAGE).pool
    coarse.allocate_slot()
    coarse.extend([0], [tokens])
    index = torch.arange(tokens)[:, None].expand(-1, len(coarse.layout.groups_of_layer(0)))
    for fine, pages in zip(before, map(coarse.pages, coarse.layout.layer_groups), strict=True):
        append(pages, fine[:tokens], torch.zeros(tokens, dtype=torch.int64), index)
    expected = entries(coarse, 0)
    for fine, kept, demoted, again in zip(
        before, entries(runner.pool, slot), entries(runner.pool.coarse, slot), expected, strict=True
    ):
        assert torch.equal(kept, fine[tokens:]) and torch.equal(demoted, again)
        assert not torch.equal(demoted, fine[:tokens])
    runner.demote(request)  # a second time, after the first ones
    assert len(entries(runner.pool.coarse, slot)[0]) > tokens
    assert torch.equal(entries(runner.pool.coarse, slot)[0][:tokens], expected[0])
    runner.pool.check_integrity()


@pytest.mark.parametrize("backend", [CoarseDecode, NumbaCoarseDecode])
def test_attention_is_the_formula_over_both(model, backend: type[AttentionBackend]) -> None:
    """One of the decoding sequences has no demoted entries."""
    runner = runner_of(model)
    requests = [start(runner, [*range(3, 94)]), start(runner, [*range(40, 81)])]
    runner.demote(requests[0])
    view, slots = runner.attention.view, [x.open_slot for x in requests]
    positions = torch.tensor([x.num_computed - 1 for x in requests])
    part = AttentionMetadata.for_step(
        view, slots, positions, first_token=0, stop=90, prompt_lengths=None, decode=True
    )
    assert all(issubclass(x, CoarseDecode) for x in runner.attention.selected.for_part(part))
    step = backend.prepare(view, runner.attention.layers, None)(view)
    stored = [(entries(runner.pool, x), entries(runner.pool.coarse, x)) for x in slots]
    for layer in runner.attention.layers:
        heads = layer.geometry.num_query_heads
        q = torch.randn(2, heads, 1, layer.key_width, generator=torch.Generator().manual_seed(0))
        found = step.attend(layer, part, q)
        for i, (fine, coarse) in enumerate(stored):
            rows = torch.cat((coarse[layer.index], fine[layer.index]))[None]
            expected, _ = layer.attend(q[i : i + 1], rows, None, None)
            torch.testing.assert_close(found[i : i + 1], expected, rtol=1e-4, atol=1e-4)


def test_sequences_without_demoted_entries_keep_their_backend(model) -> None:
    runner = runner_of(model)
    demoted, other = start(runner, [*range(3, 94)]), start(runner, [*range(40, 81)])
    runner.demote(demoted)
    part = AttentionMetadata.for_step(
        runner.attention.view,
        [other.open_slot],
        torch.tensor([39]),
        first_token=0,
        stop=40,
        prompt_lengths=None,
        decode=True,
    )
    selected = runner.attention.selected
    assert part.coarse is None and selected.for_part(part) == selected.decode
    assert not set(selected.decode) & {CoarseDecode, NumbaCoarseDecode}


def test_a_demotion_can_be_tried_before_requests_come(model, monkeypatch) -> None:
    runner = runner_of(model)
    demoted = []
    monkeypatch.setattr(page_demotion, "append", lambda *args: demoted.append(len(args[1])))
    runner.dry_demotion()
    assert demoted == [RATIO * PAGE] * 2, "a coarse page of each layer"
    assert runner.pool.used_bytes == 0 and not runner.pool.host_lengths.any()
    runner.pool.check_integrity()
    runner_of(model, "pre-empt").dry_demotion()


# -- shared pages -------------------------------------------------------------------------------


def test_pages_that_others_read_are_not_demoted(model) -> None:
    """Those that it alone reads leave the prefix cache. Once the other reader has ended, the shared
    ones are demoted too."""
    llm = llm_of(model, prefix_caching=True)
    pool, common = llm.runner.pool, [*range(5, 5 + 4 * PAGE)]
    assert isinstance(pool, SharingPool) and pool.coarse is not None
    llm.add([*common, *MANY[:70]], OUTPUTS)
    llm.engine.step()
    other = llm.add([*common, *range(80, 90)], OUTPUTS)
    llm.engine.step()
    llm.engine.step()
    first, second = llm.engine.scheduler.running
    assert pool.num_blocks(second.open_slot) >= 4 and second.num_cached == 4 * PAGE
    shared = pool.block_tables[first.open_slot, :, :4].clone()
    second_before = entries(pool, second.open_slot)
    llm.runner.demote(first)
    pool.check_integrity()
    assert torch.equal(pool.block_tables[first.open_slot, :, :4], shared)
    assert pool.num_blocks(first.open_slot) == 4
    for before, after in zip(second_before, entries(pool, second.open_slot), strict=True):
        assert torch.equal(before, after)
    llm.engine.step()  # neither fails, and what is demoted is not published
    pool.check_integrity()
    assert llm.engine.cancel(other)
    llm.engine.step()
    assert pool.demotable(first.open_slot)[0] == 0
    num_before = int(pool.coarse.host_lengths[first.open_slot, 0])
    llm.runner.demote(first)
    assert int(pool.coarse.host_lengths[first.open_slot, 0]) > num_before
    while llm.engine.has_work:
        llm.engine.step()
        pool.check_integrity()
    check_empty(llm)


def test_a_later_request_does_not_find_demoted_pages(model) -> None:
    llm = llm_of(model, prefix_caching=True)
    prompt = MANY[:120]
    llm.add(prompt, OUTPUTS)
    llm.engine.step()
    llm.runner.demote(llm.engine.scheduler.running[0])
    late = llm.add(prompt, SamplingParams(max_new_tokens=8, ignore_eos=True))
    tokens: list[int] = []
    while llm.engine.has_work:
        tokens += [y for x in llm.engine.step() if x.id == late for y in x.token_ids]
    plain = LLM(model, **SETTINGS).generate(
        [prompt], SamplingParams(max_new_tokens=8, ignore_eos=True)
    )
    assert tuple(tokens) == plain[0].token_ids
    check_empty(llm)


def test_prompts_are_not_demoted_before_they_are_computed(model) -> None:
    runner = runner_of(model)
    request = start(runner, [*range(3, 94)])
    assert runner.num_demotable(request) > 0
    request.prefill_until(request.num_computed + 1)
    assert runner.num_demotable(request) == 0


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "none are given: set bits=8"),
        ({"bits": 4}, "got 4: set bits=8"),
        ({"bits": 8, "evict": "snapkv"}, "evict='snapkv' drops tokens"),
        ({"bits": 8, "residual": 32}, "got residual=32: leave that out"),
        ({"bits": 8, "when_full": "swap"}, "must be one of pre-empt, demote"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict, reason: str) -> None:
    with pytest.raises(SettingError) as caught:
        CacheConfig(**{"when_full": "demote"} | settings)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"), [("mistral-sliding", "sliding window"), ("gemma2", "caps its attention")]
)
def test_models_that_cannot_demote(name: str, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        runner_of(tiny(name))


def test_keys_before_rope_cannot_be_demoted() -> None:
    with pytest.raises(SettingError, match="before RoPE"):
        runner_of(folded(recipes.get("lean")))
