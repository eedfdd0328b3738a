"""What fails halfway leaves pages with their owners: any operation on a tensor may run out of
memory, a policy may raise."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.cache.pool import Pool
from kvfold.engine.runner import eviction
from paged_eviction_cases import filled, survivors
from pool_cases import pool


class Boom(RuntimeError):
    """As torch.OutOfMemoryError is one."""


class OutOfMemory(TorchDispatchMode):
    """The operation number `after`, and those behind it, raise."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise Boom(func)
        return func(*args, **(kwargs or {}))


# -- the pool -------------------------------------------------------------------------------------


def busy() -> Pool:
    """Three sequences, some pages of which came free, so that slabs can be taken back."""
    p = pool(num_bytes=1 << 16)
    slots = [p.allocate_slot() for _ in range(4)]
    p.extend(slots[:3], [60, 9, 92])
    p.truncate(0, [58, 6, 58, 2, 58, 1])
    p.free_slot(1)
    assert p.allocate_slot() == 1
    return p


def owned(p: Pool) -> tuple[list[list[int]], int, list[list[int]]]:
    """Lengths, bytes, and the pages of every sequence."""
    pages = -(-p.host_lengths // p.layout.page)
    tables = p.block_tables.numpy()
    live = [tables[slot, g, :n].tolist() for (slot, g), n in np.ndenumerate(pages)]
    return p.host_lengths.tolist(), p.used_bytes, live


CALLS: dict[str, Callable[[Pool], object]] = {
    "extend, free pages and slabs": lambda p: p.extend([0, 1, 2], [3, 9, 3]),
    "extend, no page": lambda p: p.extend([0], [1]),
    "extend, slabs to take back": lambda p: p.extend([1, 2], [44, 1]),
    "make_room_to_extend": lambda p: p.make_room_to_extend([1, 2], [44, 1]),
    "shrink one": lambda p: p.truncate(2, [40, 1, 0, 4, 20, 7]),
    "shrink two": lambda p: p.truncate([2, 0], torch.zeros(2, 6, dtype=torch.int32)),
    "close": lambda p: p.free_slot(2),
    "stats": lambda p: p.stats(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_runs_out_of_memory_changes_nothing(name: str) -> None:
    call, whole = CALLS[name], busy()
    call(whole)
    if "take back" in name:
        assert not whole._slabs._emptied
    for after in count():
        p = busy()
        before = owned(p)
        try:
            with OutOfMemory(after):
                call(p)
        except Boom:
            p.check_integrity()
            assert owned(p) == before, after
        else:
            break
        call(p)
        p.check_integrity()
        assert owned(p)[:2] == owned(whole)[:2]
        for slot in np.flatnonzero(p._is_open):
            p.free_slot(slot)
        p.check_integrity()
        assert p.stats().free_bytes == pool(num_bytes=1 << 16).stats().free_bytes
    assert after > 0


# -- eviction -------------------------------------------------------------------------------------


def failing(patch: pytest.MonkeyPatch, where: object, name: str, calls: int) -> None:
    """From so many calls on, a function raises."""
    done, real = count(), getattr(where, name)

    def maybe(*args: object, **how: object) -> object:
        if next(done) >= calls:
            raise Boom(name)
        return real(*args, **how)

    patch.setattr(where, name, maybe)


@pytest.mark.parametrize("name", ["scores", "compaction"])
def test_sequences_are_evicted_from_or_stay_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one: the first is done when the second, or what a layer of it needs, fails."""
    lengths = [44, 50, 71]
    runner, sessions = filled("kv-compress", lengths)
    layers = len(runner.eviction.spans) if name == "compaction" else 1
    for done in range(layers * len(lengths)):
        with monkeypatch.context() as patch:
            patch.setattr(eviction, "MAX_ENTRIES", 1)
            failing(patch, eviction, name, done)
            runner, sessions = filled("kv-compress", lengths)
            with pytest.raises(Boom):
                runner.compress([session.sequence for session in sessions])
        runner.pool.check_integrity()
        for i, session in enumerate(sessions):
            rows = survivors(session)
            assert all(len(set(positions)) == len(positions) for positions in rows), "rows twice"
            whole = all(len(positions) == lengths[i] for positions in rows)
            assert whole == (i >= done // layers)
        runner.compress([session.sequence for session in sessions])
        runner.pool.check_integrity()
        assert not any(runner.eviction.is_over(session.sequence) for session in sessions)
