"""Shared pages: whoever opens, shares, copies, evicts and closes, nobody's rows change, and pages
are conserved."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvfold.cache.pool import PoolFull
from kvfold.cache.sharing import CachedPages, SharingPool
from kvfold.layout.pages import UNIT, cache_layout
from pool_cases import MIXED, layout

pytestmark = pytest.mark.gpu

PAGE = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif("not torch.cuda.is_available()"))]


def pool(size: int = 1 << 14, slots: int = 6, device: str = "cpu") -> SharingPool:
    built = layout(*MIXED, page=PAGE)
    return SharingPool(built, size, num_slots=slots, max_tokens=60, device=device)


class Rows:
    """A number in every row of a pool, written and read through its tables."""

    def __init__(self, pool: SharingPool) -> None:
        self.pool = pool
        self.sizes = [x.layout.page_bytes // PAGE // 16 * 4 for x in pool.layout.groups]

    def cells(self, slot: int, group: int, start: int, stop: int) -> torch.Tensor:
        row = torch.arange(start, stop, device=self.pool.device)
        page = self.pool.block_tables[slot, group, row // PAGE].long()
        return page * (UNIT // 4) + row % PAGE * self.sizes[group]

    def write(self, slot: int, group: int, start: int, values: list[int]) -> None:
        cells = self.cells(slot, group, start, start + len(values))
        new = torch.tensor(values, dtype=torch.int32, device=self.pool.device)
        self.pool.arena.view(torch.int32)[cells] = new

    def read(self, slot: int, group: int) -> list[int]:
        cells = self.cells(slot, group, 0, int(self.pool.host_lengths[slot, group]))
        return self.pool.arena.view(torch.int32)[cells].tolist()


class Crowd:
    """Sequences on a pool, and the rows that each should have in every group.

    Tokens of all sequences are drawn from few, so that many begin alike. index: chains by tokens.
    """

    def __init__(self, seed: int, copy: bool, device: str = "cpu") -> None:
        self.rng, self.copy = random.Random(seed), copy
        self.pool = pool(device=device)
        self.rows = Rows(self.pool)
        self.groups = range(len(self.pool.layout.groups))
        self.tokens: dict[int, list[int]] = {}
        self.model: dict[int, list[list[int]]] = {}
        self.index: dict[tuple[int, ...], CachedPages] = {}
        self.shared: dict[int, int] = {}  # blocks that are in the index or read, by slot
        self.whole: set[int] = set()  # sequences of which nothing was evicted
        self.seen = dict.fromkeys(("attach", "share", "swap", "own", "evict", "full"), 0)

    def match(self, tokens: list[int]) -> list[CachedPages]:
        found = []
        for stop in range(PAGE, len(tokens) + 1, PAGE):
            x = self.index.get(tuple(tokens[:stop]))
            if x is None or not (x.ref_count or x in self.pool._evictable):
                break
            found.append(x)
        return found

    def open(self) -> None:
        if len(self.tokens) == self.pool.num_slots:
            return
        slot = self.pool.allocate_slot()
        ids = [self.rng.choice([1, 1, 1, 2]) for _ in range(self.rng.randrange(40))]
        chain = self.match(ids)
        rows = len(chain) * PAGE
        cost = self.pool.cost(chain, len(ids) - rows, copy=self.copy)
        if not self.pool.make_room(cost, chain):
            self.pool.free_slot(slot)
            self.seen["full"] += 1
            return
        self.pool.start_from(slot, chain, copy=self.copy) if chain else None
        self.seen["attach"] += bool(chain)
        self.tokens[slot], self.model[slot] = ids[:rows], [ids[:rows] for _ in self.groups]
        self.shared[slot] = len(chain)
        self.whole.add(slot)
        self.extend(slot, ids[rows:])

    def extend(self, slot: int, ids: list[int]) -> None:
        lengths = self.pool.host_lengths[slot].copy()
        if not self.pool.make_room_to_extend([slot], [len(ids)]):
            with pytest.raises(PoolFull):
                self.pool.extend([slot], [len(ids)])
            return
        self.pool.extend([slot], [len(ids)])
        for g in self.groups:
            self.rows.write(slot, g, int(lengths[g]), ids)
            self.model[slot][g] = self.model[slot][g] + ids
        self.tokens[slot] = self.tokens[slot] + ids

    def share(self, slot: int) -> None:
        if slot not in self.whole:
            return
        ids, first = self.tokens[slot], self.shared[slot]
        for number in range(first, len(ids) // PAGE):
            name = tuple(ids[: (number + 1) * PAGE])
            known = self.match(list(name))
            if len(known) > number:
                if not self.copy:
                    self.pool.deduplicate(slot, known[-1])
                    self.seen["swap"] += 1
            elif self.copy:
                for x in self.pool.cache_copies(slot, number, 1):
                    self.index[name] = x
            else:
                (self.index[name],) = self.pool.share(slot, 1)
            self.seen["share"] += 1
            self.shared[slot] = number + 1

    def own(self, slot: int) -> None:
        if self.pool.make_room_to_copy(slot):
            self.seen["own"] += self.pool.num_blocks(slot) > 0
            self.pool.make_private(slot)
            self.whole.discard(slot)

    def evict(self, slot: int) -> None:
        """Some rows of every group go, the others move together."""
        self.own(slot)
        if slot in self.whole:
            return
        kept = []
        for g in self.groups:
            mine = self.model[slot][g]
            mine = [x for x in mine if self.rng.random() < 0.6]
            self.rows.write(slot, g, 0, mine)
            self.model[slot][g] = mine
            kept.append(len(mine))
        self.pool.truncate(slot, kept)
        self.seen["evict"] += 1

    def close(self, slot: int) -> None:
        self.pool.free_slot(slot)
        for x in (self.tokens, self.model, self.shared):
            del x[slot]
        self.whole.discard(slot)

    def event(self) -> None:
        what = self.rng.choice(
            ["open", "open", "extend", "share", "share", "own", "evict", "close"]
        )
        if what == "open":
            self.open()
        elif self.tokens:
            slot = self.rng.choice(sorted(self.tokens))
            if what == "extend":
                self.extend(slot, [self.rng.choice([1, 2]) for _ in range(self.rng.randrange(9))])
            else:
                getattr(self, what)(slot)

    def check(self) -> None:
        self.pool.check_integrity()
        for slot, groups in self.model.items():
            for g, mine in enumerate(groups):
                assert self.rows.read(slot, g) == mine, f"rows of slot {slot}, group {g}"
        stats = self.pool.stats()
        assert (
            self.pool.used_bytes + self.pool.evictable_bytes + stats.free_bytes <= stats.total_bytes
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("copy", [False, True])
def test_rows_stay_and_pages_are_conserved(copy: bool, device: str) -> None:
    seen = {}
    for seed in range(3):
        crowd = Crowd(seed, copy, device)
        for _ in range(400):
            crowd.event()
            crowd.check()
        seen = {name: seen.get(name, 0) + count for name, count in crowd.seen.items()}
        for slot in list(crowd.tokens):
            crowd.close(slot)
        crowd.check()
        assert crowd.pool.used_bytes == 0
        crowd.pool.drop_all()
        crowd.check()
        stats = crowd.pool.stats()
        assert crowd.pool.evictable_bytes == 0 and not sum(x.used_pages for x in stats.classes)
    assert all(seen[x] for x in seen if x not in ("swap", "own") or not copy), seen


def opened(p: SharingPool, tokens: int) -> int:
    slot = p.allocate_slot()
    p.extend([slot], [tokens])
    return slot


def test_a_page_that_many_read_counts_once() -> None:
    p = pool()
    first = opened(p, 10)
    alone = p.used_bytes
    chain = p.share(first, 2)
    others = [p.allocate_slot() for _ in range(3)]
    for slot in others:
        p.start_from(slot, chain)
        p.extend([slot], [1])
    page = p.layout.page_bytes
    assert p.used_bytes == alone + 3 * page and p.evictable_bytes == 0
    assert p.host_lengths[others[0]].tolist() == [9] * 6
    p.check_integrity()
    for slot in (first, *others):
        p.free_slot(slot)
    assert p.used_bytes == 0 and p.evictable_bytes == 2 * page
    p.check_integrity()


def test_what_nobody_reads_makes_room_oldest_and_deepest_first() -> None:
    p = pool()
    chains = []
    for _ in range(2):
        slot = opened(p, 8)
        chains.append(p.share(slot, 2))
        p.free_slot(slot)
    assert list(p._evictable) == [chains[0][1], chains[0][0], chains[1][1], chains[1][0]]
    p.touch(chains[0])
    assert next(iter(p._evictable)) is chains[1][1]
    p.extend([p.allocate_slot()], [p.capacity()])
    assert p.evictable_bytes == 0
    p.check_integrity()


def test_what_is_to_be_read_is_spared() -> None:
    p = pool()
    slot = opened(p, 8)
    chain = p.share(slot, 2)
    p.free_slot(slot)
    most = p.capacity()
    whole = p.cost([], most)
    assert not p.make_room(whole, chain) and p.evictable_bytes
    assert p.make_room(p.cost(chain, most - 8 - 2 * PAGE), chain) and p.evictable_bytes
    assert p.make_room(whole) and not p.evictable_bytes


def test_nothing_is_dropped_where_that_does_not_help() -> None:
    p = pool()
    slot = opened(p, 8)
    p.share(slot, 2)
    p.free_slot(slot)
    kept = p.evictable_bytes
    assert not p.make_room(2 * p.cost([], p.capacity())) and p.evictable_bytes == kept


def test_a_reader_copies_before_it_changes_pages() -> None:
    p = pool()
    rows = Rows(p)
    a = opened(p, 8)
    for g in range(6):
        rows.write(a, g, 0, list(range(8)))
    chain = p.share(a, 2)
    b = p.allocate_slot()
    p.start_from(b, chain)
    with pytest.raises(AssertionError, match="`make_private` first"):
        p.truncate(b, [3] * 6)
    p.make_private(b)
    for g in range(6):
        rows.write(b, g, 0, [7, 7, 7])
    p.truncate(b, [3] * 6)
    assert rows.read(a, 0) == list(range(8)) and rows.read(b, 5) == [7, 7, 7]
    p.check_integrity()


def test_all_or_nothing() -> None:
    p = pool()
    slot = opened(p, 16)
    chain = p.share(slot, 4)
    filler = opened(p, (p.capacity() - 16) // PAGE * PAGE - PAGE)
    other = p.allocate_slot()
    before = p.block_tables.clone(), p.used_bytes
    with pytest.raises(PoolFull, match="no room to copy"):
        p.start_from(other, chain, copy=True)
    p.start_from(other, chain)
    assert not p.make_room_to_copy(other)
    with pytest.raises(PoolFull):
        p.make_private(other)
    assert p.used_bytes == before[1] and torch.equal(p.block_tables[slot], before[0][slot])
    p.check_integrity()
    p.free_slot(filler)
    assert p.make_room_to_copy(other)


def test_as_many_are_copied_as_there_is_room_for() -> None:
    p = pool()
    slot = opened(p, p.capacity() // PAGE * PAGE - 2 * PAGE)
    assert (
        len(p.cache_copies(slot, 0, 4)) == 2 and len(p.cache_copies(slot, 2, 4)) == 2
    )  # in place of the others
    p.extend([slot], [2 * PAGE])
    assert not p.cache_copies(slot, 4, 1)
    p.check_integrity()


def test_reset_frees_everything() -> None:
    p = pool()
    a = opened(p, 9)
    chain = p.share(a, 2)
    p.start_from(p.allocate_slot(), chain)
    p.reset()
    p.check_integrity()
    assert not p.open_slots and p.used_bytes == p.evictable_bytes == 0
    p.extend([p.allocate_slot()], [p.capacity()])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda p, x: p.block_tables[1, 0, :2].copy_(p.block_tables[1, 0, :2].flip(0)),
            "reads other pages",
        ),
        (lambda p, x: setattr(x, "ref_count", 3), "ref_count 3, 2 readers found"),
        (lambda p, x: p._num_evictable.__iadd__(1), "evictable pages counted"),
    ],
)
def test_integrity_notices(harm, message: str) -> None:
    p = pool()
    a = opened(p, 8)
    chain = p.share(a, 2)
    b = p.allocate_slot()
    p.start_from(b, chain)
    harm(p, chain[0])
    with pytest.raises(AssertionError, match=message):
        p.check_integrity()


def test_blocks_follow_one_another() -> None:
    p = pool()
    a = opened(p, 7)
    with pytest.raises(AssertionError, match=r"blocks 0..2 of 1"):
        p.share(a, 2)
    p.share(a, 1)
    p.extend([a], [9])
    chain = [*p._chains[a], *p.share(a, 2)]
    assert [int(x.first[0]) for x in chain] == [0, 1, 2]
    assert all(int(b.first[0]) * PAGE == int(a.lengths[0]) for a, b in pairwise(chain))
    assert isinstance(chain[0].pages, np.ndarray)


def test_what_is_dumped_and_loaded_is_the_same_and_nobody_elses() -> None:
    p, counts = pool(), [9, 8, 3, 1, 0, 5]
    rows = Rows(p)
    p.arena.fill_(255)
    slot = opened(p, 9)
    for g in range(6):
        rows.write(slot, g, 0, list(range(9)))
    p.truncate(slot, counts)
    lengths, content = p.dump(slot)
    assert lengths.tolist() == counts and sum(map(len, content)) == 3 + 2 + 1 + 1 + 2
    assert not content[0][2, 16:].any() and not content[1][2, 48:].any()  # pages of 1 row
    assert content[0][2, 4:16].all() and content[1][2, 4:48].all()
    other = pool()
    x = other.placeholder(9, lengths)
    assert not other.has(x)
    other.load(x, content)
    other.check_integrity()
    readers = [other.allocate_slot() for _ in range(2)]
    for reader in readers:
        other.start_from(reader, [x])
        other.extend([reader], [2])
        other.check_integrity()
    for g in range(6):
        assert Rows(other).read(readers[1], g)[: counts[g]] == list(range(counts[g]))
    full = sum(counts[g] // PAGE * other.layout.groups[g].layout.page_bytes for g in range(6))
    once = other.used_bytes - full
    other.free_slot(readers[0])
    assert other.used_bytes - full < once and not other.evictable_bytes
    other.make_private(readers[1])
    other.truncate(readers[1], [0] * 6)
    other.check_integrity()
    other.drop_all()
    assert not other.has(x)
    other.load(x, content)
    other.check_integrity()


@pytest.mark.parametrize("device", DEVICES)
def test_a_dump_has_no_metrics_gaps_or_later_entries(device: str) -> None:
    spec = layout(*MIXED).spec
    built = cache_layout(spec, page=PAGE, bits=4, tracked=True)
    p = SharingPool(built, 1 << 14, num_slots=1, max_tokens=60, device=device)
    p.arena.fill_(255)
    slot, counts = opened(p, 9), [9, 8, 3, 1, 0, 5]
    p.truncate(slot, counts)
    _, content = p.dump(slot)
    expected = 0
    for group, count in zip(built.groups, counts, strict=True):
        x = group.layout.blocks
        blocks = (*x.codes, x.scales, x.positions)
        expected += count * sum(block.size for block in blocks) // PAGE
    assert sum(int((x == 255).sum()) for x in content) == expected
    assert sum(int((x > 0).sum()) for x in content) == expected < sum(x.numel() for x in content)
