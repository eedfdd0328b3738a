"""KIVI in pages: keys per channel, values per row, a 16-bit residual; against a slow reference."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.cache.pool import Pool
from kvfold.config import CacheConfig
from kvfold.engine.core.engine import Engine, Hooks
from kvfold.engine.requests.request import SamplingParams, ScheduledChunk
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.layout import CacheSpec, LayerSpec
from kvfold.layout.formats.integers import unpack
from kvfold.layout.pages import CacheLayout, Latent, cache_layout
from kvfold.ops.store import residual as kivi
from matrix import slow
from models import tiny, tokens
from steps import logits_of
from store_cases import FLOATS, numbers, one_layer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL = slice(None)  # groups


@st.composite
def kivi_layouts(draw) -> CacheLayout:
    """Ragged heads, rank 0 among them, in pages that divide nothing in particular; rows that share
    scales per token too, which is --bits with a residual."""
    page = draw(st.sampled_from([1, 4, 7, 16]))
    widths = st.sampled_from([0, 1, 5, 8, 16, 20])
    heads = draw(st.integers(1, 3))
    latents = [
        Latent(side=side, heads=(head,), rank=draw(widths))
        for side in "kv"
        for head in range(heads)
    ]
    return one_layer(
        latents,
        page=page,
        itemsize=draw(st.sampled_from([2, 4])),
        bits=draw(st.sampled_from([8, 4, 3, 2])),
        sub_group=draw(st.sampled_from([None, 8])),
        zeros=True,
        format=draw(st.sampled_from(["integers", "kivi"])),
        residual=page * draw(st.sampled_from([1, 2, 3])),
    )


def pool_of(layout: CacheLayout, slots: int = 3, rows: int = 40) -> Pool:
    """Workspace for `slots` sequences, in memory full of NaN."""
    pages = layout.page_bytes * (rows // layout.page) + layout.residual_bytes
    pool = Pool(layout, 3 * slots * pages + 2**14, num_slots=slots, max_tokens=rows, device=DEVICE)
    pool.arena.fill_(255)
    return pool


def feed(pool: Pool, slots: list[int], counts: list[int], rows: list[Tensor]) -> None:
    """The next counts[i] rows of slots[i], from rows[i] [T, R], as many at once as tails allow."""
    starts = pool.host_lengths[slots, 0].tolist()
    rest = counts
    counts = [
        min(n, pool.layout.max_tokens_in_step(a)) for a, n in zip(starts, counts, strict=True)
    ]
    pool.extend(slots, counts)
    slot = [s for s, n in zip(slots, counts, strict=True) for _ in range(n)]
    index = [a + i for a, n in zip(starts, counts, strict=True) for i in range(n)]
    new = torch.cat([x[a : a + n] for x, a, n in zip(rows, starts, counts, strict=True)])
    fill = kivi.Fill.of(slot, index, pool.layout.residual, DEVICE)
    place = torch.tensor([slot, index], dtype=torch.int64, device=DEVICE).unbind()
    kivi.append(pool.pages(ALL), new.to(DEVICE), *place, fill)
    pool.check_integrity()
    if any(rest := [n - fed for n, fed in zip(rest, counts, strict=True)]):
        feed(pool, slots, rest, rows)


def read(pool: Pool, slots: list[int], dtype: torch.dtype) -> Tensor:
    on, size = torch.tensor(slots, device=DEVICE), int(pool.host_lengths[slots].max())
    found = kivi.gather(pool.pages(ALL), on, pool.lengths[on], dtype, size)
    assert torch.equal(found.valid.sum(-1), pool.lengths[on].long())
    return found.rows.cpu()


def slow_quantized(x: Tensor, bits: int) -> Tensor:
    """Numbers [n] that share a scale, one group at a time."""
    low, high = x.float().min(), x.float().max()
    scale, zero = ((high - low) / (2**bits - 1)).half().float(), low.half().float()
    if scale == 0:
        return zero.expand_as(x)
    return ((x.float() - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def slow_kivi(rows: Tensor, layout: CacheLayout) -> Tensor:
    """rows [T, R] as they come back: page by page, channel by channel, row by row. All but the last
    1 to R rows are packed."""
    found, page = rows.clone(), layout.page
    packed = max(len(rows) - 1, 0) // layout.residual * layout.residual
    for group in layout.groups:
        for x in group.layout.segments:
            for start in range(0, packed, page):
                part = found[start : start + page, x.start : x.start + x.width]
                for line in part.T if x.per_channel else part:
                    line.copy_(slow_quantized(line, x.bits))
    return found


@settings(max_examples=40, deadline=None)
@given(layout=kivi_layouts(), seed=st.integers(0, 999), data=st.data())
def test_pages_equal_a_slow_reference(layout: CacheLayout, seed: int, data) -> None:
    """Sequences of unequal length, fed together in chunks that fill none or several pages."""
    dtype = data.draw(st.sampled_from(FLOATS[layout.groups[0].layout.itemsize]))
    width = layout.spec.layers[0].row_width
    pool, rows = pool_of(layout), [numbers(seed + i, dtype, 40, width) for i in range(3)]
    slots = [pool.allocate_slot() for _ in rows]
    rounds = st.lists(st.integers(0, 13), min_size=3, max_size=3)
    for counts in data.draw(st.lists(rounds, min_size=1, max_size=3)):
        feed(pool, slots, counts, rows)
    order = [2, 0]
    found = read(pool, order, dtype)
    for b, slot in enumerate(order):
        n = int(pool.host_lengths[slot, 0])
        assert torch.equal(found[b, :n], slow_kivi(rows[slot][:n], layout))
        assert not found[b, n:].any()


def full_pages(pool: Pool, slot: int) -> list[bytes]:
    """Every byte of the blocks of its full pages; padding between blocks is never written."""
    data, found = pool.arena.cpu().numpy().tobytes(), []
    for g, group in enumerate(pool.layout.groups):
        form = group.layout
        for i in range(int(pool.layout.num_quantized(pool.host_lengths[slot, g])) // form.page):
            page = int(pool.block_tables[slot, g, i]) * 64
            for offset, size in (*form.blocks.codes, *form.blocks[1:]):
                found.append(data[page + offset : page + offset + size])
    return found


@settings(max_examples=12, deadline=None)
@given(layout=kivi_layouts(), seed=st.integers(0, 999), cuts=st.sets(st.integers(1, 36)))
def test_bytes_do_not_depend_on_chunks(layout: CacheLayout, seed: int, cuts: set[int]) -> None:
    dtype = FLOATS[layout.groups[0].layout.itemsize][0]
    rows = numbers(seed, dtype, 37, layout.spec.layers[0].row_width)
    pools = []
    for edges in (range(38), [0, *sorted(cuts), 37]):
        pool = pool_of(layout)
        slot = pool.allocate_slot()
        for a, b in pairwise(edges):
            feed(pool, [slot], [b - a], [rows])
        pools.append(pool)
    single, chunked = pools
    assert full_pages(single, 0) == full_pages(chunked, 0)
    assert torch.equal(read(single, [0], dtype), read(chunked, [0], dtype))


def test_bytes_are_where_the_layout_says() -> None:
    latents = [Latent(side=side, heads=(0,), rank=rank) for side, rank in (("k", 8), ("v", 16))]
    layout = one_layer(latents, page=4, bits=4, format="kivi", residual=8)
    form = layout.groups[0].layout
    places = (*form.blocks.codes, *form.blocks[1:])
    assert tuple(x.size for x in places) == (4 * 4, 4 * 8, 2 * 2 * 8, 4 * 2 * 2, 0, 0)
    assert form.row_bits == 24 * 4 + 2 * 16 + 8 * 2 * 16 / 4
    assert form.residual_block is not None and form.residual_block.page_bytes == 8 * 24 * 2
    pool, rows = pool_of(layout), numbers(0, torch.float16, 9, 24)
    feed(pool, [pool.allocate_slot()], [9], [rows])
    page = pool.arena.cpu()[int(pool.block_tables[0, 0, 0]) * 64 :]
    blocks = [page[a : a + n] for a, n in places]
    scale, zero = blocks[2].view(torch.float16).float().view(2, 8)
    keys = unpack(blocks[0].view(4, 4), 8, 4) * scale + zero
    torch.testing.assert_close(keys, slow_kivi(rows, layout)[:4, :8].float(), atol=2e-3, rtol=0)
    assert torch.equal(zero, rows[:4, :8].amin(0).float())


@pytest.mark.parametrize("seed", range(4))
def test_pages_and_tails_have_one_owner(seed: int) -> None:
    chance, width = np.random.default_rng(seed), (5, 16, 16, 5)
    latents = [Latent(side="kv"[i % 2], heads=(i // 2,), rank=rank) for i, rank in enumerate(width)]
    layout = one_layer(latents, page=8, bits=4, format="kivi", residual=16)
    pool = Pool(layout, 2**14, num_slots=4, max_tokens=100)
    live: list[int] = []
    for _ in range(80):
        if live and chance.random() < 0.2:
            pool.free_slot(live.pop(chance.integers(len(live))))
        elif len(live) < 4:
            live.append(pool.allocate_slot())
        counts = chance.integers(0, 12, len(live)).tolist()
        if pool.make_room_to_extend(live, counts):
            pool.extend(live, counts)
        pool.check_integrity()
        rows = pool.host_lengths[:, 0]
        pages = 2 * ((rows - 1).clip(0) // 16).sum()
        held = pages * layout.page_bytes + (rows > 0).sum() * layout.residual_bytes
        assert pool.used_bytes == held == sum(pool.stats().sequence_bytes.values())
    for slot in live:
        pool.free_slot(slot)
    slot = pool.allocate_slot()
    pool.extend([slot], [pool.capacity()])
    assert pool.capacity() == 100 or not pool.make_room_to_extend([slot], [1])


def test_only_the_tail_can_be_taken_back() -> None:
    layout = one_layer(
        [Latent(side=s, heads=(0,), rank=8) for s in "kv"],
        page=4,
        bits=4,
        format="kivi",
        residual=8,
    )
    pool = pool_of(layout)
    slot = pool.allocate_slot()
    pool.extend([slot], [21])
    pool.truncate(slot, [17])
    with pytest.raises(AssertionError, match="were quantised since"):
        pool.truncate(slot, [16])
    pool.truncate(slot, [0])
    assert pool.used_bytes == 0


@pytest.mark.parametrize(
    ("keys", "latent", "message"),
    [
        ("pre_rope", Latent(side="kv", heads=(0, 1), rank=8), "recipe small"),
        ("absorbed", Latent(side="kv", heads=(0, 1), rank=8), "recipe small"),
        ("pre_rope", Latent(side="k", heads=(0, 1), rank=8), "lorc, palu-g, palu-j"),
    ],
)
def test_rows_that_kivi_cannot_quantize_are_refused(keys, latent: Latent, message: str) -> None:
    plain = one_layer([Latent(side="k", heads=(0,), rank=8)]).spec
    layer = LayerSpec(keys=keys, values="fused", latents=(latent,))
    spec = CacheSpec(geometry=plain.geometry, layers=(layer,))
    with pytest.raises(ValueError, match=message):
        cache_layout(spec, bits=4, format="kivi")


def test_settings_that_contradict_kivi_are_refused() -> None:
    for bits in (None, 16):
        with pytest.raises(ValueError, match=r"bits must be less than 16; (none are given|got 16)"):
            CacheConfig(format="kivi", bits=bits)
    with pytest.raises(ValueError, match="evict='kv-compress' exclude each other"):
        CacheConfig(format="kivi", bits=4, evict="kv-compress", keep_tokens=0.5)
    with pytest.raises(ValueError, match="sliding window"):
        build_runner(
            tiny("mistral-sliding"), CacheConfig(format="kivi", bits=4), num_slots=1, max_tokens=64
        )


def test_residuals_that_cannot_be_are_refused() -> None:
    spec = one_layer([Latent(side=side, heads=(0,), rank=8) for side in "kv"]).spec
    for residual in (0, 16, 48):
        with pytest.raises(ValueError, match=f"whole pages of 32 rows.* got {residual}: take 32"):
            cache_layout(spec, bits=4, residual=residual)
    for bits in (None, 16):
        with pytest.raises(ValueError, match=f"residual=32: .* bits={bits} packs none"):
            cache_layout(spec, bits=bits, residual=32)
    with pytest.raises(ValueError, match="residual=32 and evict='h2o' exclude each other"):
        CacheConfig(bits=4, residual=32, evict="h2o", keep_tokens=0.5)


def test_kivi_is_as_published_unless_told_otherwise() -> None:
    """Groups of 32 tokens a channel of keys, of 32 numbers a value, 128 tokens in 16 bits."""
    latents = [Latent(side=side, heads=(0,), rank=64) for side in "kv"]
    layout = one_layer(latents, bits=2, format="kivi")
    keys, *values = layout.groups[0].layout.segments
    assert (layout.page, layout.residual) == (32, 128)
    assert (keys.width, keys.per_channel) == (64, True)
    assert [x.width for x in values] == [32, 32]
    metadata = 64 * 2 * 16 / 32 + 2 * 2 * 16  # a scale and a zero for every 32 numbers of both
    assert layout.groups[0].layout.row_bits == 128 * 2 + metadata == 128 * 3


def logits(name: str, chunk: int, **settings) -> Tensor:
    """Of 61 tokens, of which the last 11 are fed one by one."""
    config = CacheConfig(**{"kv_bytes": 2**21, "page": 8, **settings})
    runner = build_runner(tiny(name), config, num_slots=2, max_tokens=100)
    ids = tokens(1, 61)[0].tolist()
    with PagedSession(runner, chunk) as session:
        found = [
            logits_of(session, ids[:50], prompt=50),
            *(logits_of(session, [x]) for x in ids[50:]),
        ]
        runner.pool.check_integrity()
    assert runner.pool.used_bytes == 0
    return torch.cat(found)


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("name", ["llama-gqa", "opt"])
def test_model_stays_close_to_16_bits(name: str, chunk: int) -> None:
    whole = logits(name, chunk)
    errors = {
        bits: float((logits(name, chunk, **soon_packed(bits)) - whole).norm() / whole.norm())
        for bits in (8, 4, 2)
    }
    assert errors[8] < 0.01 and errors[4] < 0.15
    assert 0 < errors[8] < errors[4] < errors[2]


@pytest.mark.parametrize("settings", [{"format": "kivi"}, {}], ids=["kivi", "per token"])
@pytest.mark.parametrize("name", ["llama-gqa", "opt"])
def test_chunks_do_not_matter(name: str, settings: dict) -> None:
    """Tokens one by one, in chunks that cross a tail's end, and as many at once as there are."""
    settings = {"bits": 2, "residual": 16, **settings}
    one, *others = (logits(name, chunk, **settings) for chunk in (1, 7, 16, 64))
    for found in others:
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(one, logits(name, 1, **{**settings, "residual": 8}), atol=1e-2)


def test_recent_tokens_are_exact() -> None:
    """Until the first tail is full nothing is lost, and more is lost where fewer rows wait."""
    whole, found = logits("llama-gqa", 16), []
    for residual in (8, 16, 32):
        config = {"bits": 2, "format": "kivi", "residual": residual}
        error = (logits("llama-gqa", 16, **config) - whole).abs().amax(-1)
        assert error[:residual].max() < 1e-4 < error[residual]
        found.append(float(error.norm()))
    assert found == sorted(found, reverse=True)


def soon_packed(bits: int) -> dict:
    """Of 61 tokens that are 16 bits until 8 are packed."""
    return {"bits": bits, "format": "kivi", "residual": 8}


def test_reported_bytes_are_held_bytes() -> None:
    config = CacheConfig(kv_bytes=2**20, page=8, bits=4, format="kivi", residual=24)
    runner = build_runner(tiny("llama-gqa"), config, num_slots=2, max_tokens=100)
    layout = runner.pool.layout
    with PagedSession(runner) as session:
        logits_of(session, tokens(1, 61)[0].tolist())
        held = session.footprint()
        assert held.cache_bytes == runner.pool.used_bytes
        assert held.cache_bytes == 6 * layout.page_bytes + layout.residual_bytes
        full = 48 / 61 * layout.kept_fraction + 13 / 61  # 13 rows wait in 16-bit tails
        assert held.kept_fraction == pytest.approx(full)
        assert held.kept_fraction < held.pool_fraction


class StoredPages(Hooks):
    """The bytes of every request's full pages before its last token."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.found: dict[int, list[bytes]] = {}

    def on_context_step_end(self, chunks: Sequence[ScheduledChunk]) -> None:
        for request in (chunk.request for chunk in chunks):
            if request.num_outputs + 1 == request.sampling.max_new_tokens:
                self.found[request.id] = full_pages(self.pool, request.open_slot)

    on_generation_step_end = on_context_step_end  # a pre-empted one may end with a prefill


def serve(
    config: CacheConfig, prompts: list[list[int]], arrivals: Sequence[int], slots: int = 4, **how
) -> tuple[list[list[int]], list[bytes], int]:
    """Tokens and stored bytes of requests that arrive in these steps, and how often one was
    pre-empted."""
    runner = build_runner(tiny("llama-gqa"), config, num_slots=slots, max_tokens=140)
    hooks = StoredPages(runner.pool)
    engine = Engine(runner, runner.pool, hooks=hooks, headroom=0, **how)
    found: dict[int, list[int]] = {}
    while engine.has_work or len(found) < len(prompts):
        while len(found) < len(prompts) and arrivals[len(found)] <= engine.scheduler.num_steps:
            seed = len(found)
            sampling = SamplingParams(max_new_tokens=24, temperature=seed % 2, seed=seed)
            found[engine.add(prompts[seed], sampling)] = []
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id] += output.token_ids
        runner.pool.check_integrity()
    assert runner.pool.used_bytes == 0
    pages = [b"".join(hooks.found[i]) for i in found]
    return list(found.values()), pages, engine.scheduler.num_preemptions


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "kivi", "bits": 2, "residual": 16},
        slow({"format": "kivi", "bits": 4, "residual": 24}),
        {"bits": 2, "residual": 16},
        slow({"bits": 4, "residual": 24}),
        slow({"format": "gear", "bits": 2, "residual": 16}),
    ],
    ids=["kivi2", "kivi4", "integers2", "integers4", "gear2"],
)
def test_requests_together_get_what_they_get_alone(settings: dict, monkeypatch) -> None:
    """Whatever arrives beside them, however prompts are cut, and also after pre-emption. Batches of
    another size round otherwise, so that single codes may be on the other side of a border."""
    if settings.get("format") == "gear":  # whose low rank moves with every rounding of a page:
        monkeypatch.setenv("KVFOLD_BACKEND", "reference")  # few tokens' products like many's
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (61, 5, 90, 16, 17)]
    config = CacheConfig(kv_bytes=2**18, page=8, **settings)
    # One after another, in as few chunks as may be.
    wanted, stored, _ = serve(config, prompts, range(0, 250, 50), chunk=512)
    layout = build_runner(tiny("llama-gqa"), config, num_slots=1, max_tokens=140).pool.layout
    small = replace(config, kv_bytes=12 * layout.page_bytes + 3 * layout.residual_bytes)
    for limited, arrivals, how in (
        (config, [0] * 5, {"chunk": 7}),
        (config, (0, 3, 4, 9, 33), {"chunk": 11, "max_batch_tokens": 9}),
        (small, (0, 1, 2, 3, 4), {"chunk": 13, "max_batch_tokens": 20}),
    ):
        found, pages, pre_empted = serve(limited, prompts, arrivals, **how)
        assert (pre_empted > 0) is (limited is small)
        assert found == wanted
        for ours, theirs in zip(pages, stored, strict=True):
            assert len(ours) == len(theirs) > 500
            assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= len(ours) / 100
