"""Every tile in exactly one slice, evenly, and parts where the combine step looks for them."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.ops.common.plan import Slices, longest_first, stream_k, whole_items

pytestmark = pytest.mark.gpu


def walk(slices: Slices, tiles: list[int]) -> list[list[tuple[int, int]]]:
    """(item, tile) of every slice, as the kernel goes through them."""
    starts = slices.starts.tolist()
    order = range(len(tiles)) if slices.order is None else slices.order.tolist()
    found = []
    for (item, tile), (end_item, end_tile) in pairwise(starts):
        mine = []
        while item <= end_item and item < len(tiles):
            stop = end_tile if item == end_item else tiles[order[item]]
            mine += [(item, t) for t in range(tile, stop)]
            item, tile = item + 1, 0
        found.append(mine)
    return found


works = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None)
@given(works, st.integers(0, 5), st.sampled_from([1, 2, 7, 64, 400]), st.sampled_from([1, 4]))
def test_stream_k_covers_every_tile_once(
    work: list[tuple[int, int]], overhead: int, num_slices: int, smallest: int
) -> None:
    tiles, cost = [n for n, _ in work], [c for _, c in work]
    slices = stream_k(torch.tensor(tiles), torch.tensor(cost), overhead, num_slices, smallest)
    found = walk(slices, tiles)
    assert len(found) == num_slices
    flat = [at for mine in found for at in mine]
    assert flat == [(i, t) for i, n in enumerate(tiles) for t in range(n)]
    for item in range(len(tiles)):
        holders = [s for s, mine in enumerate(found) if any(i == item for i, _ in mine)]
        count = int(slices.counts[item])
        assert len(holders) == count
        if count:
            first = int(slices.firsts[item])
            assert holders == list(range(first, first + count))


@settings(max_examples=100, deadline=None)
@given(works, st.sampled_from([1, 2, 7, 64]))
def test_stream_k_is_even(work: list[tuple[int, int]], num_slices: int) -> None:
    tiles, cost = [n for n, _ in work], [c for _, c in work]
    slices = stream_k(torch.tensor(tiles), torch.tensor(cost), 2, num_slices)
    total = sum(n * c for n, c in work) + 2 * sum(n > 0 for n in tiles)
    loads = [sum(cost[i] for i, _ in mine) for mine in walk(slices, tiles)]
    assert max(loads) <= total / num_slices + 2 * max(cost) + 2


def test_layers_are_planned_together() -> None:
    tiles = torch.tensor([[3, 0, 9], [5, 5, 5]])
    both = stream_k(tiles, torch.tensor([2, 1, 3]), 1, 4)
    for layer in range(2):
        alone = stream_k(tiles[layer], torch.tensor([2, 1, 3]), 1, 4)
        assert torch.equal(both.starts[layer], alone.starts)
        assert torch.equal(both.firsts[layer], alone.firsts)
        assert torch.equal(both.counts[layer], alone.counts)


def test_longest_first_keeps_items_whole() -> None:
    tiles, cost = [4, 9, 1, 0, 7], [1, 1, 2, 1, 1]
    slices = longest_first(tiles, cost, 3)
    found = walk(slices, tiles)
    order = slices.order.tolist()
    assert sorted(order) == list(range(5))
    loads = sorted(sum(cost[order[i]] for i, _ in mine) for mine in found)
    assert loads == [6, 7, 9]


def test_a_slice_an_item_in_order() -> None:
    tiles = [4, 0, 1]
    found = walk(whole_items(tiles), tiles)
    assert found == [[(0, 0), (0, 1), (0, 2), (0, 3)], [], [(2, 0)]]
    assert whole_items(tiles).counts.tolist() == [1, 0, 1]


def both_plans(
    chance: random.Random, layers: int, batch: int, groups: int, num_slices: int, rows: int
) -> None:
    """The kernel's slices are `stream_k`'s: ragged lengths, some 0, of slots in any order."""
    from kvfold.ops.common.plan_triton import plan_slices

    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    longest = chance.choice([1, 40, 3000, 2**20])
    shape = (batch + 2, layers * groups)
    dtype = chance.choice([torch.int32, torch.int64])
    lengths = torch.randint(0, longest + 1, shape, generator=generator, dtype=dtype)
    lengths *= torch.randint(0, 4, shape, generator=generator, dtype=dtype) > 0
    slots = torch.randperm(batch + 2, generator=generator)[:batch]
    cost = torch.randint(1, 5000, (layers, groups), generator=generator, dtype=torch.int32)
    overhead, smallest = chance.choice([0, 1, 512]), chance.choice([1, 4])
    cut = rows, overhead, num_slices, smallest
    mine = lengths[slots]
    counts = mine.unflatten(1, (layers, groups)).transpose(0, 1).flatten(1)
    want = stream_k(-(-counts // rows), cost.repeat(1, batch), overhead, num_slices, smallest)
    for rows_of in ((lengths, slots), (mine, None)):
        moved = [x if x is None else x.to(DEVICE) for x in rows_of]
        slices, found = plan_slices(*moved, cost.to(DEVICE), *cut)
        assert torch.equal(found.cpu(), counts.int())
        for name in ("starts", "firsts", "counts"):
            x, y = getattr(slices, name).cpu(), getattr(want, name)
            assert x.dtype is y.dtype and torch.equal(x, y), name


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(1, 1, 1), (2, 1, 3), (3, 5, 2), (2, 7, 8), (1, 64, 8), (1, 257, 4), (1, 64, 32)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_plans_the_same(size: tuple[int, int, int]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    chance = random.Random(str(size))
    for num_slices in (1, 7, 132, 2112):
        both_plans(chance, *size, num_slices, chance.choice([16, 32, 128]))
