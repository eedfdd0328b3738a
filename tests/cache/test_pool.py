"""The page pool: every page has one owner, whatever opens, grows, shrinks and closes."""

import re
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.cache.pool import Pool, PoolFull
from kvfold.layout.pages import UNIT
from pool_cases import MIXED, layout, pool

pytestmark = pytest.mark.gpu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif("not torch.cuda.is_available()"))]
WAITS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique")


class Stamps:
    """Fills each page with its owner's number when it is handed out, and checks that it stays."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.arena = pool.arena.numpy().view(np.int32)
        self.tables = pool.block_tables.numpy()
        self.words = [group.layout.page_bytes // 4 for group in pool.layout.groups]
        self.stamps: dict[tuple[int, int, int], int] = {}
        self.pages = pool.host_lengths.tolist()
        self.last = 0

    def page(self, owner: tuple[int, int, int]) -> np.ndarray:
        start = int(self.tables[owner]) * UNIT // 4
        return self.arena[start : start + self.words[owner[1]]]

    def update(self, slot: int) -> None:
        """Stamp the slot's new pages, forget those it lost."""
        pages = (-(-self.pool.host_lengths[slot] // self.pool.layout.page)).tolist()
        for g, (old, new) in enumerate(zip(self.pages[slot], pages, strict=True)):
            for i in range(new, old):
                del self.stamps[slot, g, i]
            for i in range(old, new):
                self.last += 1
                self.stamps[slot, g, i] = self.last
                self.page((slot, g, i))[:] = self.last
        self.pages[slot] = pages

    def check(self) -> None:
        for owner, stamp in self.stamps.items():
            assert (self.page(owner) == stamp).all(), f"page {owner} was overwritten"
        self.pool.check_integrity()


def snapshot(pool: Pool) -> dict[str, object]:
    """What a caller can see."""
    return {
        "lengths": pool.host_lengths.tolist(),
        "tables": pool.block_tables.tolist(),
        **asdict(pool.stats()),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_life_of_a_sequence(device: str) -> None:
    p = pool(device=device)
    slot = p.allocate_slot()
    assert p.host_lengths[slot].tolist() == [0] * 6
    p.extend([slot], [9])
    assert p.stats().sequence_bytes == {slot: 3 * p.layout.page_bytes}
    tables = p.block_tables[slot].clone()
    p.extend([slot], [3])  # the third page still has room
    assert torch.equal(p.block_tables[slot], tables)
    p.truncate(slot, [12, 8, 7, 4, 1, 0])
    p.check_integrity()
    assert p.lengths[slot].tolist() == [12, 8, 7, 4, 1, 0]
    assert torch.equal(p.block_tables[slot], tables)
    sizes = [group.layout.page_bytes for group in p.layout.groups]
    kept = sum(pages * size for pages, size in zip([3, 2, 2, 1, 1, 0], sizes, strict=True))
    assert p.used_bytes == kept
    p.free_slot(slot)
    p.check_integrity()
    assert p.used_bytes == 0 and p.allocate_slot() == slot


def test_groups_get_different_pages_in_order() -> None:
    p = pool((8, 8), num_bytes=64 * 6)
    a, b = p.allocate_slot(), p.allocate_slot()
    p.extend([a, b], [5, 4])
    owned = [*p.block_tables[a, :, :2].flatten().tolist(), *p.block_tables[b, :, 0].tolist()]
    assert sorted(owned) == [0, 1, 2, 3, 4, 5]


def test_stats() -> None:
    p = pool((8, 24), num_bytes=192 * 6 + 64 + 30, num_slots=2, max_tokens=16)
    assert p.arena.numel() == 192 * 6 + 64
    slot = p.allocate_slot()
    p.extend([slot], [5])  # 2 pages of 64 B (a slab holds 3) and 2 of 192 B
    stats = p.stats()
    assert (stats.total_bytes, stats.used_bytes, stats.free_bytes) == (1216, 512, 64 + 3 * 192)
    small, large = stats.classes
    assert asdict(small) == {"page_bytes": 64, "used_pages": 2, "free_pages": 1, "slabs": 1}
    assert asdict(large) == {"page_bytes": 192, "used_pages": 2, "free_pages": 0, "slabs": 2}
    assert stats.fragmentation == 64 / 1216
    assert stats.entry_occupancy == 10 / 16
    assert stats.sequence_bytes == {slot: 512}
    assert stats.table_bytes >= 4 * (2 * 2 * 4 + 2 * 2 + 1)
    p.truncate(slot, [1, 1])
    assert p.used_bytes == 256 and p.stats().high_water_bytes == 512
    p.extend([slot], [1])
    assert p.stats().high_water_bytes == 512
    p.reset_high_water()
    assert p.stats().high_water_bytes == 256
    p.free_slot(slot)
    closed = p.stats()
    assert (closed.used_bytes, closed.free_bytes, closed.fragmentation) == (0, 192 * 6, 0.0)
    assert closed.entry_occupancy == 1.0 and closed.sequence_bytes == {}


def test_all_or_nothing() -> None:
    p = pool()
    a, b = p.allocate_slot(), p.allocate_slot()
    p.extend([a, b], [3, 70])
    before = snapshot(p)
    assert not p.make_room_to_extend([a, b], [1, 100])
    with pytest.raises(PoolFull, match=r"\d+ free slabs of \d+ B; needed: .* pages of 64 B"):
        p.extend([a, b], [1, 100])
    assert p.make_room_to_extend([a], [1])
    with pytest.raises(PoolFull, match="max_tokens=200"):
        p.extend([a], [198])
    p.check_integrity()
    assert snapshot(p) == before


def test_nothing_to_extend() -> None:
    p = pool()
    slot = p.allocate_slot()
    p.extend([], [])
    p.extend([slot], [0])
    p.check_integrity()
    assert p.used_bytes == 0


def test_slots_run_out_and_return() -> None:
    p = pool(num_slots=2)
    assert (p.allocate_slot(), p.allocate_slot()) == (0, 1)
    with pytest.raises(PoolFull, match="2 slots"):
        p.allocate_slot()
    p.free_slot(0)
    assert p.allocate_slot() == 0


@pytest.mark.parametrize("wrong", [[-1, 0], [6, 0], [5], [5, 5, 5]])
def test_lengths_that_shrink_cannot_reach(wrong: list[int]) -> None:
    p = pool((8, 8))
    slot = p.allocate_slot()
    p.extend([slot], [5])
    with pytest.raises(AssertionError):
        p.truncate(slot, wrong)


@pytest.mark.parametrize("slots", [[0, 0], [0, 2], [0, -1], [0]])
def test_slots_that_shrink_cannot_take(slots: list[int]) -> None:
    p = pool((8, 8))
    p.extend([p.allocate_slot(), p.allocate_slot()], [5, 5])
    with pytest.raises(AssertionError):
        p.truncate(slots, torch.ones(2, 2, dtype=torch.int32))


def test_slots_that_extend_cannot_take() -> None:
    p = pool()
    slot = p.allocate_slot()
    for slots, tokens in (
        ([1], [1]),
        ([-8], [1]),
        ([slot, slot], [1, 1]),
        ([slot, slot], [1]),
        ([slot], [1, 1]),
        ([slot], [-1]),
    ):
        with pytest.raises(AssertionError):
            p.extend(slots, tokens)


def test_classes_trade_slabs() -> None:
    """When one class frees everything, the other grows beyond what it had in the full pool."""
    p = pool((8, 72), num_bytes=1 << 15, max_tokens=1000)
    slot = p.allocate_slot()
    p.extend([slot], [p.capacity()])
    full = p.stats().classes
    with pytest.raises(PoolFull):
        p.extend([slot], [8])
    p.truncate(slot, [p.capacity(), 0])
    assert p.stats().classes[1].slabs == 0
    p.extend([slot], [p.capacity() // 2])
    p.check_integrity()
    assert p.stats().classes[0].slabs > full[0].slabs
    p.free_slot(slot)
    assert [c.slabs for c in p.stats().classes] == [0, 0]


def test_trading_survives_a_changing_mix() -> None:
    """Sequences live for random times; eviction favours one half of the groups, then the other."""
    random = np.random.default_rng(0)
    p = pool(2 * (8, 16, 24, 40), 1 << 20, num_slots=256, max_tokens=256)
    live: list[int] = []
    for even in (True, False, True):
        keep = np.where((np.arange(8) % 4 < 2) == even, 0.9, 0.15)
        used = []
        for _ in range(300):
            slot, tokens = p.allocate_slot(), int(random.integers(16, 128))
            while live and not p.make_room_to_extend([slot], [tokens]):
                used.append(p.used_bytes / (1 << 20))
                p.free_slot(live.pop(random.integers(len(live))))
            p.extend([slot], [tokens])
            p.truncate(slot, np.ceil(keep * p.host_lengths[slot]).astype(int))
            live.append(slot)
        p.check_integrity()
        assert np.mean(used[-100:]) > 0.85


def test_exhaustion_and_recovery() -> None:
    p = pool(num_slots=64, num_bytes=1 << 15)
    first = 0
    for _ in range(3):
        slots = []
        while True:
            slot = p.allocate_slot()
            if not p.make_room_to_extend([slot], [7]):
                break
            p.extend([slot], [7])
            slots.append(slot)
        p.check_integrity()
        first = first or len(slots)
        assert len(slots) == first > 3
        for opened in (*slots, slot):
            p.free_slot(opened)
        assert p.used_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_never_waits_for_the_device(device: str) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert not any(name in str(func) for name in WAITS), func
            return func(*args, **(kwargs or {}))

    p = pool(device=device)
    a, b = p.allocate_slot(), p.allocate_slot()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with Watch():
            p.extend([a, b], [9, 2])
            p.truncate(a, [9, 4, 0, 1, 5, 9])
            assert p.make_room_to_extend([a, b], [1, 3])
            p.extend([a, b], [1, 3])
            p.free_slot(b)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    p.check_integrity()


@given(
    widths=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    num_bytes=st.integers(64, 1 << 16),
    page=st.sampled_from([1, 4, 32]),
)
@settings(max_examples=60, deadline=None)
def test_capacity(widths: list[int], num_bytes: int, page: int) -> None:
    """Exactly `capacity` tokens fit; a pool too small for one page of all names what it needs."""

    def build(size: int) -> Pool:
        return pool(tuple(widths), size, page=page, num_slots=2, max_tokens=300)

    try:
        p = build(num_bytes)
    except ValueError as error:
        least = int(re.search(r"at least (\d+)", str(error)).group(1))
        with pytest.raises(ValueError, match=f"got {least - 64}"):
            build(least - 64)
        p = build(least)
    capacity = p.capacity()
    assert capacity >= min(page, 300)
    assert p.fits(capacity) and not p.fits(capacity + 1)
    slot = p.allocate_slot()
    assert not p.make_room_to_extend([slot], [capacity + 1])
    p.extend([slot], [capacity])
    p.check_integrity()


def test_demand_is_what_extending_takes() -> None:
    p = pool((20, 40, 40))
    a, b = p.allocate_slot(), p.allocate_slot()
    p.extend([a], [6])
    slots, more = [a, b], [7, 9]
    pages = p.pages_needed(p.host_lengths[slots], more)
    assert p.make_room(pages) and not p.make_room(pages + 10_000)
    before = [x.used_pages for x in p.stats().classes]
    p.extend(slots, more)
    after = [x.used_pages for x in p.stats().classes]
    assert (np.array(after) - before == pages).all()


def test_windows_free_pages_on_the_way() -> None:
    """Of the second layer 10 - 1 + 4 - 1 rows stay after a step, and a chunk of 8 comes on top."""
    built = layout(20, 40)
    p = Pool(built, 2**15, num_slots=2, max_tokens=400, sliding_windows=[None, 10])
    empty = np.zeros((1, 2), dtype=np.int64)
    ends = p.pages_needed(empty, [100], chunk=8)
    assert ends.tolist() == [25, 5] and p.pages_needed(empty, [100]).tolist() == [25, 25]
    assert p.capacity() < p.capacity(chunk=8)
    assert p.pages_needed(np.array([[50, 12]]), [3], chunk=8).tolist() == [1, 1]


def test_a_tiny_arena_takes_the_slab_that_serves_all() -> None:
    """Slabs of one large page lose less at their ends here, but there are too few of them."""
    p = pool((288,) * 11 + (320,) * 10, 200 * UNIT, page=1)
    p.extend([p.allocate_slot()], [1])
    p.check_integrity()


@given(widths=st.lists(st.integers(1, 40), min_size=1, max_size=24))
@settings(max_examples=30, deadline=None)
def test_a_big_arena_is_nearly_all_usable(widths: list[int]) -> None:
    widths = [8 * width for width in widths]
    built = layout(*widths, page=32)
    num_bytes = 4000 * len(set(widths)) * max(group.layout.page_bytes for group in built.groups)
    p = Pool(built, num_bytes, num_slots=1, max_tokens=1 << 24, device="meta")
    assert p.capacity() / 32 * built.page_bytes > 0.98 * num_bytes - built.page_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": 0}, "num_bytes must be at least 2304 .* 6 groups .* got 0"),
        ({"num_bytes": 2**38}, "num_bytes must be at most 137438953472"),
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool(**change)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: p.lengths.add_(1), "differ from mirror"),
        (lambda p: p.block_tables[0, 1, 0].copy_(p.block_tables[1, 1, 0]), "overlap"),
        (lambda p: p.block_tables[0, 2, 0].add_(1), "outside of slabs"),
        (lambda p: p._slabs.slabs_per_class.__iadd__(1), r"used \d+ \+ free \d+ = \d+, but"),
        (lambda p: p._is_open.__setitem__(1, False), "closed slot"),
    ],
)
def test_integrity_notices(harm, message: str) -> None:
    p = pool()
    slots = [p.allocate_slot(), p.allocate_slot()]
    p.extend(slots, [5, 9])
    p.check_integrity()
    harm(p)
    with pytest.raises(AssertionError, match=message):
        p.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls; a model keeps the lengths, stamps prove that no page is shared."""

    @initialize(
        widths=st.sampled_from([MIXED, (8,), (8, 8), (40, 8)]),
        size=st.sampled_from([1 << 12, 1 << 14, 3 << 14]),
        page=st.sampled_from([1, 4]),
    )
    def build(self, widths: tuple[int, ...], size: int, page: int) -> None:
        self.pool = pool(widths, size, page=page, num_slots=4, max_tokens=90)
        self.stamps = Stamps(self.pool)
        self.model: dict[int, np.ndarray] = {}

    @precondition(lambda self: len(self.model) < 4)
    @rule()
    def open(self) -> None:
        slot = self.pool.allocate_slot()
        assert slot not in self.model
        self.model[slot] = np.zeros(len(self.pool.layout.groups), dtype=int)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        tokens = data.draw(st.lists(st.integers(0, 40), min_size=len(slots), max_size=len(slots)))
        before = snapshot(self.pool)
        possible = self.pool.make_room_to_extend(slots, tokens)
        assert snapshot(self.pool) == before
        if not possible:
            with pytest.raises(PoolFull):
                self.pool.extend(slots, tokens)
            assert snapshot(self.pool) == before
            return
        self.pool.extend(slots, tokens)
        for slot, more in zip(slots, tokens, strict=True):
            self.model[slot] = self.model[slot] + more
            self.stamps.update(slot)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.model[slot] = np.array([data.draw(st.integers(0, n)) for n in self.model[slot]])
        self.pool.truncate(slot, self.model[slot])
        self.stamps.update(slot)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def shrink_together(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        for slot in slots:
            self.model[slot] = np.array([data.draw(st.integers(0, n)) for n in self.model[slot]])
        lengths = np.stack([self.model[slot] for slot in slots])
        self.pool.truncate(slots, torch.from_numpy(lengths).int())
        for slot in slots:
            self.stamps.update(slot)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.pool.free_slot(slot)
        del self.model[slot]
        self.stamps.update(slot)

    @precondition(lambda self: not self.model)
    @rule()
    def fill(self) -> None:
        """An empty pool takes what it says it takes, whatever happened before."""
        slot = self.pool.allocate_slot()
        self.pool.extend([slot], [self.pool.capacity()])
        assert not self.pool.make_room_to_extend([slot], [1])
        self.pool.free_slot(slot)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.stamps.check()
        for slot, lengths in self.model.items():
            assert self.pool.host_lengths[slot].tolist() == lengths.tolist()
        stats = self.pool.stats()
        sizes = np.array([group.layout.page_bytes for group in self.pool.layout.groups])
        pages = {slot: -(-x // self.pool.layout.page) for slot, x in self.model.items()}
        assert stats.sequence_bytes == {slot: int(x @ sizes) for slot, x in pages.items()}
        assert stats.used_bytes == sum(stats.sequence_bytes.values()) <= stats.high_water_bytes
        assert stats.used_bytes + stats.free_bytes <= stats.total_bytes


def test_any_order_of_calls() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )


def test_thousands_of_events() -> None:
    random = np.random.default_rng(1)
    p = pool((8, 24, 40, 24), 3 << 12, num_slots=6, max_tokens=64)
    stamps, live, refused = Stamps(p), [], 0
    for event in range(5_000):
        kind = random.random()
        if not live or (kind < 0.1 and len(live) < 6):
            live.append(p.allocate_slot())
        elif kind < 0.2:
            slot = live.pop(random.integers(len(live)))
            p.free_slot(slot)
            stamps.update(slot)
        elif kind < 0.35:
            slot = live[random.integers(len(live))]
            p.truncate(slot, random.integers(0, p.host_lengths[slot] + 1))
            stamps.update(slot)
        else:
            slots = live[: random.integers(1, len(live) + 1)]
            try:
                p.extend(slots, random.integers(0, 9, len(slots)).tolist())
            except PoolFull:
                refused += 1
            for slot in slots:
                stamps.update(slot)
        if event % 100 == 0:
            stamps.check()
    stamps.check()
    assert 125 < refused < 2_500
