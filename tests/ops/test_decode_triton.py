"""The decode kernel against float64 on the same cache: every path of it, ragged and poisoned.

Without a GPU it runs in Triton's interpreter. Interpreted cases are tiny; on a GPU the same tests
have longer rows.
"""

import os
import random
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from decode_triton_cases import (
    GPU,
    LIMITS,
    check,
    cut,
    poisoned,  # noqa: F401
    run,
)

if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

if not GPU and not isinstance(tl.sum, interpreter.InterpretedFunction):
    pytest.skip(
        "Triton was imported before TRITON_INTERPRET=1 was set: set it for the whole run",
        allow_module_level=True,
    )

from kvfold.ops.backend import use_triton  # noqa: E402
from kvfold.ops.common import combine  # noqa: E402
from kvfold.ops.common.plan import longest_first  # noqa: E402
from kvfold.ops.common.tuning import Tuning  # noqa: E402
from kvfold.ops.decode import decode  # noqa: E402
from kvfold.ops.decode import triton as decode_triton  # noqa: E402
from kvfold.ops.decode.triton import plan_layers  # noqa: E402
from pages import Case, error, mixed, per_head  # noqa: E402
from store_cases import DEVICE  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
]


def spread(page: int, block: int, seed: int) -> list[list[int]]:
    """Lengths of 2 groups of some sequences: what is around a page and a tile, and some longer."""
    near = [0, 1, page - 1, page, page + 1, block - 1, block + 1, 100 + 7 * seed]
    if GPU:
        near += [4095, 700, 2 * block, 2 * page + 1, 333, 1, 0, 5 * block + 3]
    random.Random(seed).shuffle(near)
    few = near if GPU else near[:4]
    return [few[i : i + 2] for i in range(0, len(few), 2)]


# -- every pair of properties -------------------------------------------------------------------

PROPERTIES = {
    "queries": (1, 2, 4, 7, 8, 16),
    "block": (16, 32, 64, 128),
    "page": (16, 32, 64),
    "bits": (None, 8, 4),
    "ranks": (
        ((64, 64), (64, 64)),
        ((96, 48), (16, 128)),
        ((0, 64), (48, 0)),
        ((128, 16), (64, 96)),
    ),
    "zeros": (False, True),
    "tracked": (False, True),
    "dtype": (torch.float16, torch.bfloat16),
}


def pairs(case: dict) -> set:
    return set(combinations(case.items(), 2))


def covering() -> list[dict]:
    """Few cases in which every two values of different properties meet: greedy, always the same."""
    chance = random.Random(0)
    wanted = {
        ((a, x), (b, y))
        for a, b in combinations(PROPERTIES, 2)
        for x, y in product(PROPERTIES[a], PROPERTIES[b])
    }
    found = []
    while wanted:
        (a, x), (b, y) = min(wanted, key=str)
        tries = [
            {name: chance.choice(values) for name, values in PROPERTIES.items()} | {a: x, b: y}
            for _ in range(60)
        ]
        found.append(max(tries, key=lambda case: len(pairs(case) & wanted)))
        wanted -= pairs(found[-1])
    return found


def name_of(case: dict) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in case.values()).replace(" ", "")


@pytest.mark.parametrize("how", covering(), ids=name_of)
def test_kernel_is_the_formula(how: dict) -> None:
    layout = per_head(
        how["ranks"],
        page=how["page"],
        bits=how["bits"],
        zeros=how["zeros"],
        tracked=how["tracked"],
    )
    seed = len(name_of(how)) + how["queries"]
    lengths = spread(how["page"], how["block"], seed % 10)
    case = Case.of(layout, lengths, how["queries"], how["dtype"], seed=seed)
    check(case, *run(case, Tuning(block=how["block"]), 40 if GPU else 3))


def test_the_cases_meet_every_pair() -> None:
    found = set().union(*map(pairs, covering()))
    assert all(
        ((a, x), (b, y)) in found
        for a, b in combinations(PROPERTIES, 2)
        for x, y in product(PROPERTIES[a], PROPERTIES[b])
    )


# -- numbers ------------------------------------------------------------------------------------

RAGGED = [(48, 32), (64, 16), (0, 64)]


def ragged(*, bits: int | None = 8, batch: int = 2, **options) -> Case:
    """Three unequal groups of two queries, of a few pages."""
    lengths = [[70, 1, 33], [0, 64, 17]][:batch]
    return Case.of(per_head(RAGGED, page=16, bits=bits), lengths, 2, torch.float16, **options)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_large_scores(bits: int | None, zeros: bool, dtype: torch.dtype) -> None:
    layout = per_head([(64, 64)], page=16, bits=bits, zeros=zeros)
    case = Case.of(layout, [[300 if GPU else 60]], 2, dtype, peak=60.0)
    check(case, *run(case, Tuning(block=16), 2))


@pytest.mark.parametrize("bits", [(8, 4), (16, 8), (4, 16)])
def test_keys_and_values_of_different_bits(bits: tuple[int, int]) -> None:
    case = Case.of(mixed(bits, bits, zeros=True), [[40, 17]], 2, torch.float16)
    check(case, *run(case, Tuning(block=16), 2))


@pytest.mark.parametrize("ranks", [[(0, 16), (0, 48)], [(16, 0), (64, 0)], [(0, 0)]])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_side_that_stores_nothing(ranks: list, bits: int | None) -> None:
    layout = per_head(ranks, page=16, bits=bits)
    case = Case.of(layout, [[20] * len(ranks)], 1, torch.float16)
    check(case, *run(case, Tuning(block=16), 1))


def test_codes_of_a_model_in_single_precision() -> None:
    layout = per_head([(32, 64)], page=16, itemsize=4, bits=8)
    case = Case.of(layout, [[40]], 4, torch.float32)
    check(case, *run(case, Tuning(block=16), 2))


def test_groups_in_any_order() -> None:
    layout = per_head(RAGGED, page=16)
    layout = replace(layout, groups=layout.groups[::-1])
    case = Case.of(layout, [[20, 33, 1]], 2, torch.float16)
    check(case, *run(case, Tuning(block=32), 2))


@pytest.mark.skipif(not GPU, reason="the interpreter copies the arena of 2 GiB")
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_pages_beyond_two_gigabytes(bits: int | None) -> None:
    case = ragged(bits=bits, page_offset=2**25)
    check(case, *run(case, Tuning(block=16), 7))


@pytest.mark.parametrize("bits", [None, 4])
def test_any_number_of_slices(bits: int | None) -> None:
    """The result moves by no more than rounding, and not at all when it is asked for again."""
    case, tuning = ragged(bits=bits, batch=2 if GPU else 1), Tuning(block=16)
    want, _ = first = run(case, tuning, 1)
    check(case, *first)
    for num_slices in (7, 132, 400):
        found = run(case, tuning, num_slices)
        check(case, *found)
        assert error(found[0], want.cpu().double()) <= LIMITS[torch.float16] / 2
        if num_slices == 7 or GPU:
            again = run(case, tuning, num_slices)
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_more_parts_than_are_merged_at_once() -> None:
    """Most are of one item, and as many are merged at once as an item has on average."""
    layout = per_head([(16, 16)] * 2, page=16)
    case = Case.of(layout, [[16 * 18 - 1, 1], [0, 1]], 8, torch.float16, peak=20.0)
    most = cut(case, Tuning(block=16), 12).slices.counts.max()
    assert most > 2 * combine.cut(13, 4, 16)["BLOCK"]
    check(case, *run(case, Tuning(block=16), 12))


@pytest.mark.parametrize("num_slices", [1, 3, 20])
def test_longest_first(num_slices: int) -> None:
    """ZACK's order computes the same, also with more slices than items."""
    case, tuning = ragged(), Tuning(block=16)
    plan = cut(case, tuning, num_slices)
    _, pages, slots, _ = case.args
    lengths = pages.lengths
    tiles = (-(-lengths[slots] // tuning.block)).flatten().tolist()
    slices = longest_first(tiles, [3, 2, 1] * len(slots), num_slices)
    assert slices.order.tolist() != sorted(slices.order.tolist()) or num_slices > 1
    plan = replace(plan, slices=slices.to(DEVICE))
    check(case, *decode_triton.decode(*case.args, plan=plan))


def test_layers_planned_together() -> None:
    """Two layers of unlike groups in one arena's tables; q a part of more; lengths of slots."""
    cases = [ragged(seed=1), ragged(seed=2)]
    counts = torch.cat([case.args[1].lengths[case.args[2]] for case in cases], 1)
    lengths, slots = counts.new_full((3, counts.shape[1]), 999), counts.new_tensor([2, 0]).long()
    lengths[slots] = counts
    layers = [case.args[1].groups for case in cases]
    plans = plan_layers(layers, lengths, 2, tuning=Tuning(block=16), num_slices=5, slots=slots)
    for case, plan in zip(cases, plans, strict=True):
        q, pages, *rest = case.args
        q = torch.cat((q, q), 1)[:, : q.shape[1]]
        tables, lengths = (torch.cat((x, x), 1)[:, : x.shape[1]] for x in pages[1:3])
        pages = pages._replace(tables=tables, lengths=lengths)
        check(case, *decode_triton.decode(q, pages, *rest, plan=plan))


def test_decode_takes_the_kernel_where_there_is_one(monkeypatch) -> None:
    monkeypatch.setenv("KVFOLD_BACKEND", "triton")
    use_triton.cache_clear()
    case = ragged()
    q, *rest = case.args
    check(case, decode(q, *rest)[0], decode_triton.decode(q, *rest)[1])
    monkeypatch.setattr(decode_triton, "decode", lambda *_: pytest.fail("no kernel for 3 bits"))
    case = Case.of(per_head([(16, 16)], page=16, bits=3), [[9]], 2, torch.float16)
    assert error(decode(*case.args)[0], case.out) <= LIMITS[torch.float16]
    use_triton.cache_clear()
