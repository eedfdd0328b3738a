"""The prefill kernel against the formula in float64: ragged, windowed, evicted, poisoned.

Without a GPU it runs in Triton's interpreter, in fp16.
"""

import os
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from prefill_triton_cases import (
    CUT,
    DEVICE,
    GPU,
    RAGGED,
    Case,
    poisoned,  # noqa: F401
)

if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
import triton.language as tl
from triton.runtime import interpreter

if not GPU and not isinstance(tl.sum, interpreter.InterpretedFunction):
    pytest.skip(
        "Triton was imported before TRITON_INTERPRET=1 was set: set it for the whole run",
        allow_module_level=True,
    )

from kvfold.ops.backend import use_triton
from kvfold.ops.prefill import KVView, prefill, why_not
from kvfold.ops.prefill import triton as prefill_triton
from kvfold.ops.prefill.plan import (
    LAST,
    Cut,
    Widths,
    classes_of,
    longest_first,
    parts,
    rescaled_cut,
    widths_of,
)
from matrix import slow

WIDE = replace(CUT, pairs=32, rows=32)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
]


def brute(case: Case) -> Tensor:
    """Outputs, query by query, row by row: what the reference itself must be."""
    out = torch.zeros(*case.q.shape[:3], max(case.values.ranks), dtype=torch.float64)
    o, group = case.seen, case.q.shape[1] // len(case.seen.owner)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, case.q.shape[:3])).tolist():
        head = h // group
        g, at = o.owner[head], int(o.queries[b, t])
        seen = []
        for s in range(int(o.counts[b, g])):
            position = s if o.positions is None else int(o.positions[b, g, s])
            if position <= at and (o.window is None or position > at - o.window):
                seen.append(s)
        if seen:
            k, v = (side.head(head)[b, seen].double() for side in (case.keys, case.values))
            weights = (k @ case.q[b, h, t, : k.shape[-1]].double() * case.scale).softmax(0)
            out[b, h, t, : v.shape[-1]] = weights @ v
    return out


@pytest.mark.parametrize("tracked", [False, True])
def test_tiles_of_equal_work(tracked: bool) -> None:
    """ZACK's B_r by rank: 256, 128 and 64 pairs of one layer, in parts and whole."""
    seen: dict[Widths, int] = {}

    def cut(widths: Widths) -> Cut:
        found = rescaled_cut(widths, 192)
        seen[widths] = found.pairs
        return found

    ranks = ((32, 32), (64, 64), (48, 64), (96, 96))
    case = Case.of(ranks, counts=((70,) * 4, (0, 1, 64, 65)), num_queries=70, group=4,
                   positions=tracked)  # fmt: skip
    case.check(cut)
    wanted = {64: 256, 112: 128, 128: 128, 224: 64}  # by padded widths
    assert {sum(widths): pairs for widths, pairs in seen.items()} == wanted


@pytest.mark.skipif(GPU, reason="slow on a GPU, and says nothing about it")
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_the_reference_is_the_definition(positions: bool, window: int | None) -> None:
    case = Case.of(
        ((3, 2), (0, 5), (4, 0)), ((6, 9), (0, 7)), 5, group=2, first=2, owner=(0, 1, 0),
        positions=positions, window=window,
    )  # fmt: skip
    out, _ = case.expected()
    torch.testing.assert_close(out, brute(case))


# -- every shape ---------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("num_queries", [1, 15, 33])
def test_queries_of_any_number(group: int, num_queries: int) -> None:
    Case.of(((32, 16),), ((40,),), num_queries, group=group).check()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("first", [0, 37])
def test_counts_around_a_tile(count: int, first: int) -> None:
    Case.of(((16, 16), (16, 16)), ((count, 20),), 12, first=first).check()


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("window", [None, 9, 1000])
def test_heads_of_any_rank_in_a_middle_chunk(positions: bool, window: int | None) -> None:
    case = Case.of(
        RAGGED, ((48, 16, 0, 33), (7, 40, 47, 1)), 11, group=2, first=37,
        positions=positions, window=window,
    )  # fmt: skip
    case.check(WIDE if window == 9 else CUT)


def test_windows_around_a_tile() -> None:
    for window in (15, 16, 17, 31, 33):
        Case.of(((16, 16),), ((64,),), 16, first=48, window=window).check()


@pytest.mark.parametrize("window", [None, 9])
def test_padding_of_queries_sees_no_row_behind_the_last(window: int | None) -> None:
    """An exact window pads blocks with queries that come after all tokens."""
    case = Case.of(((16, 16),), ((40,), (3,)), 12, first=28, positions=True, window=window)
    queries = case.seen.queries.clone()
    queries[:, -4:] = LAST
    replace(case, seen=replace(case.seen, queries=queries)).check()


def test_rows_that_all_queries_are_behind() -> None:
    """No mask is needed but for the rows that do not exist."""
    Case.of(((16, 16), (16, 32)), ((37, 48), (1, 0)), 5, first=500, positions=True).check()


@pytest.mark.parametrize("rows", [40, slow(2100)])  # 2100: more tiles than are looked at together
def test_tiles_that_no_query_sees_are_not_read(rows: int) -> None:
    """A chunk's first queries do not read its last rows: were they read, they would be numbers."""
    case = Case.of(((16, 16), (16, 16)), ((rows, rows - 3),), 16, first=rows - 36, positions=True)
    in_order = torch.arange(rows + 5, device=DEVICE, dtype=torch.int32).expand(1, 2, -1)
    case = replace(case, seen=replace(case.seen, positions=in_order.contiguous()))
    last = case.seen.queries.max() // CUT.rows * CUT.rows + CUT.rows
    case.check()
    case.values.data[:, last:] = torch.nan
    place = case.q, case.keys, case.values, case.seen, case.scale
    assert prefill_triton.prefill(*place, cut=lambda _: CUT)[0].isfinite().all()


@pytest.mark.parametrize(
    "ranks", [((0, 16),), ((16, 0),), ((0, 0), (5, 3)), ((0, 0),), ((250, 200),), ((96, 80),)]
)
def test_ranks_of_all_kinds(ranks: tuple[tuple[int, int], ...]) -> None:
    Case.of(ranks, ((40,) * len(ranks),), 10, first=20).check()


@pytest.mark.parametrize("rank", [256, 300, 512])
def test_joint_values_serve_all_heads(rank: int) -> None:
    case = Case.of(((16, rank), (48, 8)), ((40,), (21,)), 7, first=20, group=2, owner=(0, 0))
    starts = (case.values.starts[0],) * 2
    case.values = replace(case.values, starts=starts, ranks=(rank, rank))
    case.check()


def test_many_sequences_and_groups_of_heads() -> None:
    counts = ((16, 3), (40, 40), (0, 0), (33, 1), (1, 17))
    case = Case.of(RAGGED, counts, 11, first=13, owner=(1, 0, 0, 1))
    queries = case.seen.queries + torch.arange(5, device=DEVICE)[:, None] * 9
    case.seen = replace(case.seen, queries=queries)
    case.check(WIDE)


@pytest.mark.parametrize("window", [None, 8])
def test_rebuilt_keys_and_strided_queries(window: int | None) -> None:
    """Keys [B, Hk, S, d], values [B, Hk, S, d] of another tensor, queries of a projection."""
    case = Case.of(((16, 16),) * 2, ((40,) * 2, (33,) * 2), 12, group=2, first=25, window=window)
    k, v = (torch.randn(2, 2, 45, d, device=DEVICE).half() for d in (16, 24))
    case.keys, case.values = (
        KVView(x.transpose(1, 2), tuple(h * x.stride(1) for h in range(2)), (x.shape[-1],) * 2)
        for x in (k, v)
    )
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = case.check()
    q = case.q.double()
    row, query = torch.arange(45, device=DEVICE), case.seen.queries[0, :, None]
    seen = (row <= query) & (row > query - (window or 99)) & (row < 40)
    want = torch.nn.functional.scaled_dot_product_attention(
        q[:1], k[:1].double(), v[:1].double(), seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out[:1].double(), want, atol=2e-3, rtol=2e-3)


def test_large_scores() -> None:
    case = Case.of(((32, 32),), ((60,),), 20, first=40)
    case.q *= 40
    case.check()


def test_the_result_hardly_moves_with_the_cut() -> None:
    case = Case.of(RAGGED[1:3], ((41, 16),), 12, first=35)
    want, _ = case.check()
    for cut in (Cut(stages=1), replace(CUT, pairs=64, rows=16)):
        out, _ = case.check(cut)
        torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-2)
    assert torch.equal(case.check()[0], want)


# -- classes, order ------------------------------------------------------------------------------


def test_every_number_belongs_to_one_unit() -> None:
    ranks = (0, 16, 96, 300, 512)
    classes = classes_of((0,) * 5, (*ranks[::-1][1:], 8), (0,) * 5, ranks, (0,) * 5, DEVICE)
    columns: dict[int, int] = dict.fromkeys(range(5), 0)
    for kind in classes:
        for head, _, _, k_rank, value, v_rank, column, _ in kind.units.tolist():
            assert k_rank <= sum(kind.widths[:2]) and v_rank <= kind.widths[2] <= 256
            assert value == column <= columns[head] <= column + 256
            columns[head] += v_rank
    assert tuple(columns.values()) == ranks
    sums = [sum(kind.widths) for kind in classes]
    assert sums == sorted(sums, reverse=True)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, (16, 0)), (16, (16, 0)), (17, (32, 0)), (40, (32, 16)), (48, (32, 16)), (49, (64, 0)),
     (96, (64, 32)), (112, (128, 0)), (144, (128, 16)), (192, (128, 64)), (256, (256, 0))],
)  # fmt: skip
def test_parts_hold_a_rank(rank: int, expected: tuple[int, int]) -> None:
    assert parts(rank) == expected


@pytest.mark.parametrize(
    ("keys", "values", "expected"),
    [(16, 16, (16, 0, 16)), (32, 16, (32, 0, 32)), (96, 32, (64, 32, 64)), (128, 8, (128, 0, 64)),
     (32, 96, (32, 0, 128)), (48, 16, (32, 16, 32)), (256, 256, (256, 0, 256))],
)  # fmt: skip
def test_values_are_no_narrower_than_keys(
    keys: int, values: int, expected: tuple[int, int, int]
) -> None:
    assert widths_of(keys, values) == expected


def ranks_of_every_class(which: int) -> tuple[tuple[int, int], ...]:
    """(keys, values): of all pairs that are padded alike, and so have one kernel, that with the
    narrowest values (0), which are padded, or the widest (-1), most of which are not."""
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for pair in product((16, 32, 48, 64, 96, 128), (8, 16, 32, 48, 64, 96, 128)):
        found.setdefault(widths_of(*pair), []).append(pair)
    return tuple(pairs[which] for pairs in found.values())


@pytest.mark.skipif(not GPU, reason="the interpreter has no warp groups")
@pytest.mark.parametrize(
    ("which", "positions", "cut"),
    [(0, False, Cut()), (-1, True, Cut()), (0, True, Cut(pairs=64, warps=4))],
)
def test_every_class_of_ranks_over_many_tiles(which: int, positions: bool, cut: Cut) -> None:
    ranks = ranks_of_every_class(which)
    owner = (0,) * len(ranks) + (1,) * len(ranks)
    Case.of(
        2 * ranks, ((500, 470),), 200, group=4, first=280, owner=owner, positions=positions
    ).check(cut)


def test_classes_are_fewer_than_pairs() -> None:
    narrow, wide = map(ranks_of_every_class, (0, -1))
    assert len(set(narrow)) == len(set(wide)) == 16
    assert {widths_of(*pair) for pair in narrow} == {widths_of(*pair) for pair in wide}
    assert (128, 8) in narrow and (128, 64) in wide and (16, 8) in narrow and (16, 16) in wide


def test_most_rows_come_first() -> None:
    units = torch.tensor([[0, 0], [1, 1], [2, 0]])
    counts = torch.tensor([[100, 50], [300, 60]])
    queries = torch.stack((torch.arange(60, 100), torch.arange(260, 300)))
    order = longest_first(units, counts, None, queries, None, 4)
    rows = [
        min(int(queries[i // 3 % 2, 40 - 10 * (i // 6) - 1]) + 1, int(counts[i // 3 % 2, u]))
        for i, u in ((i, (0, 1, 0)[i % 3]) for i in order.tolist())
    ]
    assert sorted(order.tolist()) == list(range(24)) and rows == sorted(rows, reverse=True)
    spread = longest_first(units, counts, counts, queries, None, 4).tolist()
    assert spread[:8] == [3, 5, 9, 11, 15, 17, 21, 23]
    assert longest_first(units, counts, None, queries, 30, 4).tolist() == list(range(24))


# -- dispatch ------------------------------------------------------------------------------------


def test_prefill_takes_the_kernel_where_there_is_one(monkeypatch) -> None:
    monkeypatch.setenv("KVFOLD_BACKEND", "triton")
    use_triton.cache_clear()
    case = Case.of(((16, 16),), ((20,),), 5, first=15)
    want, _ = case.expected()
    found, _ = prefill(case.q, case.keys, case.values, case.seen, case.scale)
    torch.testing.assert_close(found.double(), want, atol=2e-3, rtol=2e-3)
    monkeypatch.setattr(prefill_triton, "prefill", lambda *_, **__: pytest.fail("no kernel"))
    single = [replace(side, data=side.data.float()) for side in (case.keys, case.values)]
    found, _ = prefill(case.q.float(), *single, case.seen, case.scale)
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)
    for keys, values, there in ((256, 512, True), (257, 16, False), (16, 513, False)):
        sides = (replace(case.keys, ranks=(keys,)), replace(case.values, ranks=(values,)))
        assert (why_not(case.q, *sides) is None) is there
    use_triton.cache_clear()
