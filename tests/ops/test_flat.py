"""Attention over pages as they are: what a rectangle of decoded rows gives."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flat_cases import filled
from kvfold.layout.formats.integers import PLANES, codes_by_position, unpack
from kvfold.layout.pages import Latent
from kvfold.ops.common.pages import PageClass, locate, plan_pages
from kvfold.ops.decode import cpu as flat
from kvfold.ops.store.reference import read_metrics
from store_cases import Store, numbers, one_layer, split
from tolerance import attention_errors, rounding

CPU = torch.device("cpu")
WIDTHS = st.sampled_from([0, 1, 5, 8, 16, 33])


@st.composite
def per_head_layouts(draw):
    heads = draw(st.integers(1, 3))
    bits = draw(st.lists(st.sampled_from([16, 8, 6, 4, 3, 2, 1]), min_size=1, max_size=2))
    latents = [
        Latent(side=side, heads=(head,), rank=rank, tiers=split(rank, bits))
        for side in "kv"
        for head in range(heads)
        for rank in [draw(WIDTHS)]
    ]
    return one_layer(
        latents,
        page=draw(st.sampled_from([1, 16, 32])),
        # Where both occur, `gather` rounds quantised numbers to the dtype of the others.
        itemsize=draw(st.sampled_from([4] if len({x == 16 for x in bits}) > 1 else [2, 4])),
        sub_group=draw(st.sampled_from([None, 8])),
        zeros=draw(st.booleans()),
        tracked=True,
    )


def columns(rows, group, side: str):
    """A side's numbers fp32 [B, T, w] of a group."""
    mine = [x for x in group.layout.segments if x.side == side]
    parts = [rows[..., x.start : x.start + x.width] for x in mine]
    return torch.cat([rows[..., :0], *parts], -1).float()


@settings(max_examples=60, deadline=None)
@given(layout=per_head_layouts(), seed=st.integers(0, 999))
def test_flat_attention_equals_attention_over_gathered_rows(layout, seed: int) -> None:
    store, dtype, lengths, each = filled(layout, seed)
    slots = torch.tensor([2, 0])
    num_groups = len(layout.groups)
    plan = plan_pages(store.groups, CPU)
    exact = torch.float32 if plan.itemsize is None else dtype
    found = store.gather(slots, lengths[slots], exact)
    q = numbers(seed + 1, dtype, 2, num_groups, 2, 64)
    where = slice(0, num_groups)
    (lists,) = flat.list_pages([(where, plan)], store.tables, slots, lengths[slots])
    total = torch.zeros(found.valid.shape, dtype=torch.float64)
    slack = torch.zeros_like(total)
    for pages in lists:
        data = pages.read(store.arena)
        out, weights = flat.attend_pages(q, data, pages, 0.5)
        flat.add_metrics(store.arena, data, pages, weights.sum(1))
        for i, g in enumerate(pages.kind.numbers.tolist()):
            for b, inside in enumerate(found.valid[:, g]):
                k, v = (columns(found.rows[b, inside], store.groups[g], x).double() for x in "kv")
                mine = q[b, g, :, : k.shape[-1]].double()
                own = each[slots[b], : len(k)]
                own = tuple(columns(own, store.groups[g], x) for x in "kv")
                dense = (mine @ k.mT * 0.5).softmax(-1)
                errors = attention_errors(mine, k, v, 0.5, own)
                assert ((out[b, i] - dense @ v).abs() <= errors.out).all()
                total[b, g, inside] = dense.sum(0)
                slack[b, g, inside] = errors.weights.sum(0)
    kept = read_metrics(store.pages, slots, found.valid)
    assert ((kept - total).abs() <= slack + rounding(torch.float32, q.shape[2]) * total).all()
    again = store.gather(slots, lengths[slots], exact)
    assert torch.equal(again.rows, found.rows) and torch.equal(again.positions, found.positions)


@settings(max_examples=40, deadline=None)
@given(layout=per_head_layouts(), seed=st.integers(0, 99))
def test_every_page_is_listed_once(layout, seed: int) -> None:
    store, _, lengths, _ = filled(layout, seed)
    slots = torch.tensor([1, 2, 0])
    plan, page = plan_pages(store.groups, CPU), layout.page
    where = slice(0, len(layout.groups))
    (lists,) = flat.list_pages([(where, plan)], store.tables, slots, lengths[slots])
    for pages in lists:
        wanted = [
            (i * 3 + b, store.tables[s, g, n].item())
            for i, g in enumerate(pages.kind.numbers.tolist())
            for b, s in enumerate(slots.tolist())
            for n in range(-(-int(lengths[s, g]) // page))
        ]
        assert list(zip(pages.item.tolist(), pages.units.tolist(), strict=True)) == wanted
        filled_rows = lengths[slots][:, pages.kind.numbers].T.flatten()
        assert torch.equal(pages.counts * page - pages.hidden.sum(1), filled_rows.long())


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from(sorted(PLANES)), n=st.integers(1, 40), seed=st.integers(0, 99))
def test_places_add_up_to_the_codes(bits: int, n: int, seed: int) -> None:
    size = sum(-(-n * width // 8) for width in PLANES[bits])
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (3, size), generator=generator, dtype=torch.uint8)
    codes = torch.zeros(3, n, dtype=torch.uint8)
    for where, factor, part in codes_by_position(packed, n, bits):
        codes[:, where] += factor * part
    assert torch.equal(codes, unpack(packed, n, bits))


def per_head(keys: list[int], values: list[int], **options):
    sides = (("k", keys), ("v", values))
    latents = [Latent(side=s, heads=(h,), rank=r) for s, x in sides for h, r in enumerate(x)]
    return one_layer(latents, page=16, **options)


def kinds_of(layout) -> tuple[PageClass, ...]:
    return plan_pages(layout.groups, CPU).kinds


def test_spots_say_where_even_groups_have_their_columns() -> None:
    (kind,) = kinds_of(per_head([8, 8, 8], [16, 16, 16], bits=4))
    assert kind.spots == ((0, 8), (24, 16))
    row = torch.arange(72)
    assert kind.columns_of(row, 1).tolist() == [
        list(range(24 + 16 * g, 40 + 16 * g)) for g in range(3)
    ]
    alone = kinds_of(per_head([8, 4], [8, 8], bits=4))
    assert [kind.spots for kind in alone] == [((0, 1), (12, 1)), ((8, 1), (20, 1))]


def test_uneven_groups_have_no_spots() -> None:
    layout = per_head([8, 8, 4, 8], [8, 8, 8, 8], bits=4)
    first, second = kinds_of(layout)
    assert first.numbers.tolist() == [0, 1, 3] and first.spots is None
    assert second.spots is not None and not plan_pages(layout.groups, CPU).even
    assert plan_pages(per_head([8, 8], [4, 4]).groups, CPU).even


def test_locate_names_the_rows_of_every_group() -> None:
    layout = per_head([16, 16], [16, 16], itemsize=4)
    store = Store.of(layout, 2, 40, seed=3)
    size = layout.groups[0].layout.page_units
    # An arena of such pages alone: they begin at its start.
    store.tables, store.arena = (store.tables - 1).cpu(), store.arena[64:].cpu()
    assert not (store.tables % size).any()
    rows = numbers(3, torch.float32, 2, 40, store.width)
    store.fill(rows, torch.zeros(2, 40, dtype=torch.int32))
    store.arena, slots = store.arena.cpu(), torch.tensor([1, 0])
    lengths = torch.tensor([[5, 40], [17, 16]])
    table, index, valid = locate(store.pages, slots, lengths, 40)
    index, valid = index.flatten(2), valid.flatten(2)
    assert torch.equal(valid.sum(-1), lengths)
    for b, slot in enumerate(slots.tolist()):
        for g in range(2):
            n, mine = int(lengths[b, g]), index[b, g]
            keys, values = rows[slot, :, 16 * g : 16 * g + 16], rows[slot, :, 32 + 16 * g :]
            assert torch.equal(table[mine[:n]], keys[:n]) and valid[b, g, :n].all()
            assert torch.equal(table[mine[:n] + 16], values[:n, :16])
            assert (mine[n:] == mine[0]).all()
