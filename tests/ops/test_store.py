"""Rows into and out of pages: any layout, any order of pages, in memory full of NaN."""

import random
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.layout import pages as layouts
from kvfold.layout.formats.integers import (
    SCALES_IN,
    quantize,
)
from kvfold.layout.pages import CacheLayout, Group, Latent
from kvfold.ops.common import pages as addressing
from kvfold.ops.store.reference import (
    add_metrics,
    append,
    gather,
    move,
    read_metrics,
    read_tracked,
    rewrite,
)
from quantize_cases import bound
from store_cases import DEVICE, FLOATS, Store, numbers, one_layer, random_layouts, stored

pytestmark = pytest.mark.gpu


def expected(rows: Tensor, groups: tuple[Group, ...], lengths: Tensor) -> Tensor:
    """rows [B, T, R], lengths [B, G] -> what `gather` should return."""
    inside = torch.arange(rows.shape[1])[:, None] < lengths[:, None]  # [B, T, G]
    return sum(
        torch.where(inside[..., g, None], stored(rows, group), 0) for g, group in enumerate(groups)
    )


@settings(max_examples=120, deadline=None)
@given(layout=random_layouts(), seed=st.integers(0, 999), data=st.data())
def test_gather_returns_what_append_stored(layout: CacheLayout, seed: int, data) -> None:
    """Several sequences, groups of unequal length, in two appends that continue each group."""
    dtype = data.draw(st.sampled_from(FLOATS[layout.groups[0].layout.itemsize]))
    chance = torch.Generator().manual_seed(seed)
    first, new, num_groups = 37, 3, len(layout.groups)
    store = Store.of(layout, 3, first + new, seed)
    rows = numbers(seed, dtype, 3, first, store.width)
    positions = torch.randint(0, 9999, (3, first), generator=chance, dtype=torch.int32)
    store.fill(rows, positions)

    lengths = torch.randint(0, first + 1, (3, num_groups), generator=chance)
    more = numbers(seed + 1, dtype, 3, new, store.width)
    slots = torch.arange(3).repeat_interleave(new)
    index = (lengths[:, None] + torch.arange(new)[:, None]).flatten(0, 1)
    late = torch.arange(3 * new, dtype=torch.int32) + 10000
    store.append(more.flatten(0, 1), slots, index, late)
    store.forget(lengths + new)

    order = torch.tensor([2, 0])
    found = store.gather(order, lengths[order] + new, dtype)
    total = int(lengths[order].max()) + new
    inside = torch.arange(total) < lengths[order][..., None] + new
    assert found.rows.dtype is dtype and torch.equal(found.valid, inside)
    want, where = torch.zeros(2, total, store.width, dtype=dtype), torch.zeros_like(inside).int()
    where += torch.arange(total, dtype=torch.int32)
    for b, slot in enumerate(order.tolist()):
        for g, group in enumerate(layout.groups):
            n = int(lengths[slot, g])
            whole = torch.cat((rows[slot, :n], more[slot]))
            want[b, : n + new] += stored(whole.to(DEVICE), group).cpu()
            if group.layout.tracked:
                known = torch.cat((positions[slot, :n], late[slot * new : (slot + 1) * new]))
                where[b, g] = torch.nn.functional.pad(known, (0, total - n - new))
    # A GPU adds the squares of unequal batches in unequal order, so that of two scales that are as
    # good as each other it may choose either: a row in a hundred, at most.
    differ = (found.rows != want).any(-1)
    assert differ.sum() <= (max(1, differ.numel() // 100) if DEVICE.type == "cuda" else 0)
    assert torch.equal(found.positions, where)
    again = store.gather(order, lengths[order] + new, dtype, size=total)
    assert torch.equal(again.rows, found.rows)


@settings(max_examples=30, deadline=None)
@given(layout=random_layouts(), seed=st.integers(0, 999))
def test_every_layout_keeps_its_error_bound(layout: CacheLayout, seed: int) -> None:
    dtype = FLOATS[layout.groups[0].layout.itemsize][-1]
    store = Store.of(layout, 1, 20, seed)
    rows = numbers(seed, dtype, 1, 20, store.width)
    store.fill(rows, torch.arange(20, dtype=torch.int32)[None])
    full = torch.full((1, len(layout.groups)), 20)
    exact = all(x.quantized for group in layout.groups for x in group.layout.segments)
    found = store.gather(torch.tensor([0]), full, torch.float32 if exact else dtype).rows.float()
    for group in layout.groups:
        for x in group.layout.segments:
            part = slice(x.start, x.start + x.width)
            error = (found[..., part] - rows[..., part].float()).abs()
            if not x.quantized:
                assert not error.any()
                continue
            if group.layout.scale == 1:  # numbers here are too small and too large for fp8 scales
                continue
            allowed = bound(rows[..., part].float(), x.bits, group.layout.has_zero_points)
            rounding = 0.0 if exact else torch.finfo(dtype).eps * found[..., part].abs()
            assert (error <= allowed * (1 + 1e-4) + rounding).all()


@settings(max_examples=25, deadline=None)
@given(layout=random_layouts(), seed=st.integers(0, 999), cuts=st.sets(st.integers(1, 39)))
def test_appends_in_steps_equal_one_append(layout: CacheLayout, seed: int, cuts: set[int]) -> None:
    whole, steps = Store.of(layout, 2, 40, seed), Store.of(layout, 2, 40, seed)
    rows = numbers(seed, FLOATS[layout.groups[0].layout.itemsize][0], 80, whole.width)
    slots = torch.arange(80) % 2
    index = (torch.arange(80) // 2)[:, None].expand(-1, len(layout.groups))
    positions = torch.arange(80, dtype=torch.int32)
    whole.append(rows, slots, index, positions)
    edges = [0, *sorted(2 * cut - 1 for cut in cuts), 80]
    for a, b in pairwise(edges):
        steps.append(rows[a:b], slots[a:b], index[a:b], positions[a:b])
    assert torch.equal(whole.arena, steps.arena)


def slow_numbers(page: bytes, start: int, width: int, bits: int) -> list[int]:
    if bits in (3, 6):
        first = 2 * bits // 3
        low = slow_numbers(page, start, width, first)
        high = slow_numbers(page, start + -(-width * first // 8), width, bits - first)
        return [a | b << first for a, b in zip(low, high, strict=True)]
    per = 8 // bits
    return [page[start + i // per] >> (i % per * bits) & (2**bits - 1) for i in range(width)]


@settings(max_examples=40, deadline=None)
@given(layout=random_layouts(), seed=st.integers(0, 999))
def test_bytes_are_where_the_layout_says(layout: CacheLayout, seed: int) -> None:
    """One row, read byte by byte; every other byte of the arena stays as it was."""
    dtype = FLOATS[layout.groups[0].layout.itemsize][-1]
    store = Store.of(layout, 1, 40, seed)
    rows = numbers(seed, dtype, 1, store.width)
    index = torch.randint(
        0, 40, (1, len(layout.groups)), generator=torch.Generator().manual_seed(seed)
    )
    store.append(rows, torch.tensor([0]), index, torch.tensor([77], dtype=torch.int32))
    data, touched = bytes(store.arena.cpu().numpy()), set()
    for g, group in enumerate(layout.groups):
        form = group.layout
        number, row = divmod(int(index[0, g]), form.page)
        page = int(store.tables[0, g, number]) * 64
        starts = []
        for offset, size in (*form.blocks.codes, *form.blocks[1:]):
            step = size // form.page
            starts.append(page + offset + row * step)
            touched |= set(range(starts[-1], starts[-1] + step))
        letter, count = {2: "e", 4: "f"}[form.itemsize], 0
        size = form.scales_per_row * form.scale
        stored = torch.tensor(list(data[starts[-3] : starts[-3] + size]), dtype=torch.uint8)
        scales = stored.view(SCALES_IN[form.scale]).tolist()
        for x, start in zip(form.segments, starts, strict=False):
            part = rows[:, x.start : x.start + x.width]
            if not x.quantized:
                found = struct.unpack_from(f"<{x.width}{letter}", data, start)
                assert list(found) == part[0].tolist()
                continue
            codes, scale, zero = quantize(part, x.bits, form.has_zero_points, SCALES_IN[form.scale])
            assert slow_numbers(data, start, x.width, x.bits) == codes[0].tolist()
            assert scales[count] == float(scale)
            if zero is not None:
                assert scales[count + len(scales) // 2] == float(zero)
            count += 1
        if form.tracked:
            assert struct.unpack_from("<i", data, starts[-2]) == (77,)
            assert struct.unpack_from("<f", data, starts[-1]) == (0.0,)
    assert all(value == 255 for i, value in enumerate(data) if i not in touched)


@settings(max_examples=40, deadline=None)
@given(layout=random_layouts(tracked=True), seed=st.integers(0, 999))
def test_metrics_add_up_and_touch_nothing_else(layout: CacheLayout, seed: int) -> None:
    store = Store.of(layout, 3, 40, seed)
    dtype = FLOATS[layout.groups[0].layout.itemsize][0]
    store.fill(numbers(seed, dtype, 3, 40, store.width), torch.arange(120).int().view(3, 40))
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 41, (3, len(layout.groups)), generator=chance)
    lengths[0] = 0
    store.forget(lengths)
    slots = torch.tensor([2, 0])
    valid = torch.arange(40) < lengths[slots][..., None]
    before = store.arena.clone()
    common = (store.pages, slots.to(DEVICE))
    total = torch.zeros(valid.shape)
    for _ in range(2):
        values = torch.rand(valid.shape, generator=chance)
        poisoned = torch.where(valid, values, torch.nan)
        add_metrics(*common, poisoned.to(DEVICE), valid.to(DEVICE))
        total += torch.where(valid, values, 0)
    assert torch.equal(read_metrics(*common, valid.to(DEVICE)).cpu(), total)
    found = read_tracked(*common, lengths[slots].to(DEVICE), 40)
    positions = torch.where(valid, torch.arange(120).view(3, 1, 40)[slots], 0)
    for tensor, want in zip(found, (total, positions, valid), strict=True):
        assert torch.equal(tensor.cpu(), want.to(tensor.dtype))
    shrunk = torch.where(valid, -total, 0)
    add_metrics(*common, shrunk.to(DEVICE), valid.to(DEVICE))
    assert torch.equal(store.arena, before)


@settings(max_examples=40, deadline=None)
@given(layout=random_layouts(), seed=st.integers(0, 999))
def test_move_copies_whole_rows(layout: CacheLayout, seed: int) -> None:
    store, num_groups = Store.of(layout, 2, 40, seed), len(layout.groups)
    dtype = FLOATS[layout.groups[0].layout.itemsize][0]
    store.fill(numbers(seed, dtype, 2, 40, store.width), torch.arange(80).int().view(2, 40))
    slots, lengths = torch.tensor([0, 1]), torch.full((2, num_groups), 40)
    pages = store.pages
    tracked = layout.groups[0].layout.tracked
    everything = torch.ones(2, num_groups, 40, dtype=torch.bool, device=DEVICE)
    if tracked:
        values = torch.rand(everything.shape).to(DEVICE)
        add_metrics(pages, slots.to(DEVICE), values, everything)
    before = store.gather(slots, lengths, dtype)

    rng = random.Random(seed)
    moves = []  # slot, group, source, target
    source_of = torch.arange(40).repeat(2, num_groups, 1)
    for s in range(2):
        for g in range(num_groups):
            chosen = rng.sample(range(40), 2 * rng.randrange(15))
            for source, target in zip(chosen[::2], chosen[1::2], strict=True):
                moves.append((s, g, source, target))
                source_of[s, g, target] = source
    rng.shuffle(moves)
    slot, *rest = torch.tensor(moves, dtype=torch.int64).view(-1, 4).to(DEVICE).unbind(-1)
    move(pages, slot, *rest)

    after = store.gather(slots, lengths, dtype)
    for g, group in enumerate(layout.groups):
        for x in group.layout.segments:
            part = before.rows[..., x.start : x.start + x.width]
            want = part.gather(1, source_of[:, g, :, None].expand(-1, -1, x.width))
            assert torch.equal(after.rows[..., x.start : x.start + x.width], want)
    if tracked:
        assert torch.equal(after.positions, before.positions.gather(2, source_of))
        found = read_metrics(pages, slots.to(DEVICE), everything)
        assert torch.equal(found, values.gather(2, source_of.to(DEVICE)))


@settings(max_examples=40, deadline=None)
@given(layout=random_layouts(), seed=st.integers(0, 999))
def test_rewritten_rows_are_those_of_an_append_where_they_were(
    layout: CacheLayout, seed: int
) -> None:
    """With the positions and metrics of before; others stay bit for bit."""
    store, num_groups = Store.of(layout, 2, 40, seed), len(layout.groups)
    dtype = FLOATS[layout.groups[0].layout.itemsize][0]
    store.fill(numbers(seed, dtype, 2, 40, store.width), torch.arange(80).int().view(2, 40))
    slots, lengths = torch.tensor([0, 1]), torch.full((2, num_groups), 40)
    tracked = layout.groups[0].layout.tracked
    everything = torch.ones(2, num_groups, 40, dtype=torch.bool, device=DEVICE)
    if tracked:
        values = torch.rand(everything.shape).to(DEVICE)
        add_metrics(store.pages, slots.to(DEVICE), values, everything)
    before = store.gather(slots, lengths, dtype)
    chance = torch.Generator().manual_seed(seed)
    rows = numbers(seed + 1, dtype, 12, store.width)
    slot = torch.randint(0, 2, (12,), generator=chance)
    index = torch.rand(num_groups, 40, generator=chance).argsort(1)[:, :12].T
    keep = torch.rand(12, num_groups, generator=chance) < 0.7
    entry, group = keep.nonzero(as_tuple=True)
    sides = dict[str, list[Tensor]]()
    for i, g in zip(entry.tolist(), group.tolist(), strict=True):
        for side in "k", "v", "kv":
            columns = [x for x in layout.groups[g].layout.segments if x.side == side]
            own = [rows[i, x.start : x.start + x.width] for x in columns]
            sides.setdefault(side, []).append(torch.cat([rows.new_empty(0), *own]))
    padded = {side: pad_sequence(x, batch_first=True).to(DEVICE) for side, x in sides.items()}
    rewrite(store.pages, padded, *(x.to(DEVICE) for x in (slot[entry], group, index[entry, group])))

    after = store.gather(slots, lengths, dtype)
    want = before.rows.clone()
    for g, group in enumerate(layout.groups):
        whole = stored(rows.to(DEVICE), group).cpu()
        for i in keep[:, g].nonzero()[:, 0].tolist():
            for x in group.layout.segments:
                columns = slice(x.start, x.start + x.width)
                want[slot[i], index[i, g], columns] = whole[i, columns]
    assert torch.equal(after.rows, want)
    assert torch.equal(after.positions, before.positions)
    if tracked:
        assert torch.equal(read_metrics(store.pages, slots.to(DEVICE), everything), values)


def test_interleaved_widths_come_back_in_row_order() -> None:
    """Groups of one kind whose columns are not evenly spaced, and a step wider than one number."""
    ranks = (16, 16, 8, 16, 8, 24)
    latents = [
        Latent(side=side, heads=(head,), rank=rank)
        for side in "kv"
        for head, rank in enumerate(ranks)
    ]
    layout = one_layer(latents, page=16, bits=16)
    plan = addressing.plan_pages(layout.groups, torch.device("cpu"))
    assert len(plan.kinds) == 3 and plan.step == 8 and plan.row_order is not None
    store = Store.of(layout, 1, 20, seed=1)
    rows = numbers(1, torch.bfloat16, 1, 20, store.width)
    store.fill(rows, torch.zeros(1, 20, dtype=torch.int32))
    found = store.gather(torch.tensor([0]), torch.full((1, 6), 20), torch.bfloat16)
    assert torch.equal(found.rows, rows)


@pytest.mark.parametrize("tracked", [False, True])
def test_nothing_stored_yet(tracked: bool) -> None:
    latents = [Latent(side="k", heads=(0,), rank=0), Latent(side="v", heads=(0,), rank=8)]
    store = Store.of(one_layer(latents, page=16, bits=4, tracked=tracked), 2, 16, seed=0)
    nothing = torch.zeros(2, 1, dtype=torch.int32)
    store.forget(nothing)
    assert store.gather(torch.tensor([0, 1]), nothing, torch.float32).rows.shape == (2, 0, 8)
    padded = store.gather(torch.tensor([0, 1]), nothing, torch.float32, size=5)
    assert padded.rows.shape == (2, 5, 8) and not padded.rows.any() and not padded.valid.any()
    empty = torch.zeros(0, 1, dtype=torch.int64)
    before = store.arena.clone()
    store.append(torch.zeros(0, 8), empty[:, 0], empty, torch.zeros(0, dtype=torch.int32))
    assert torch.equal(store.arena, before)


def test_what_a_layout_cannot_hold_is_refused() -> None:
    store = Store.of(one_layer([Latent(side="kv", heads=(0,), rank=8)], tracked=True), 1, 4, seed=0)
    rows, zero = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    pages = store.pages._replace(arena=store.arena.cpu(), tables=store.tables.cpu())
    with pytest.raises(AssertionError, match="float32"):
        append(pages, rows, zero, zero[:, None], zero.int())
    with pytest.raises(AssertionError, match="positions"):
        append(pages, rows.half(), zero, zero[:, None])
    with pytest.raises(AssertionError, match="not 8"):
        append(pages, rows[:, 1:].half(), zero, zero[:, None], zero.int())
    with pytest.raises(AssertionError, match="float32"):
        gather(pages, zero, zero[:, None], torch.float32)


def test_units_agree_with_the_layout() -> None:
    assert addressing.UNIT == layouts.UNIT
