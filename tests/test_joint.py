"""Decoding in one pass over values that all heads share: which rows it serves, and on Hopper the
formula."""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.ops.decode import joint, triton_split
from kvfold.spec.layout import CacheLayout
from pages import Case
from test_decode_triton import check
from test_split_triton import swift

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SERVED = {
    "4x": (swift([((24, 8), (104, 4))] * 8, [((128, 8), (384, 4), (256, 2))], page=64), 4),
    "5x": (swift([((8, 8), (80, 4), (32, 2))] * 8, [((64, 8), (384, 4), (256, 2))], page=32), 4),
    "four bits": (swift([((128, 4),)] * 8, [((576, 4),)], page=64), 4),
    "eight bits": (swift([((64, 8),)] * 4, [((256, 8),)], page=16), 4),
    "eight queries": (swift([((64, 4), (64, 2))] * 2, [((96, 4), (64, 2))], page=64), 8),
    "two groups": (swift([((64, 4),)] * 8, [((128, 4),)] * 2, heads=4, page=64), 4),
    "odd": (swift([((32, 8), (96, 4))] * 8, [((144, 8), (416, 4), (64, 2))], page=64), 4),
    "two bits": (swift([((128, 2),)] * 4, [((320, 2),)], page=64), 4),
}
OTHERS = {
    "queries of 32 bits": swift([((64, 4),)] * 8, [((96, 4),)], page=64, itemsize=4),
    "groups of unlike": swift([((64, 4),)] * 8, [((64, 4),), ((96, 4),)], heads=4, page=64),
    "6 KV heads of": swift([((64, 4),)] * 6, [((96, 4),)], page=64),
    "other runs": swift([((64, 4),)] * 4 + [((32, 4),)] * 4, [((96, 4),)], page=64),
    "no multiple": swift([((64, 4),)] * 8, [((72, 4),)], page=64),
    "with metrics": swift([((64, 4),)] * 8, [((96, 4),)], page=64, tracked=True),
    "pages of 128": swift([((64, 4),)] * 8, [((96, 4),)], page=128),
    "more values": swift([((64, 4),)] * 8, [((1024, 4),)], page=64),
}


@pytest.mark.parametrize("name", SERVED)
def test_rows_that_are_served(name: str) -> None:
    layout, queries = SERVED[name]
    assert joint.unread(layout.groups, queries) is None


@pytest.mark.parametrize("reason", OTHERS)
def test_and_which_are_not(reason: str) -> None:
    assert reason in str(joint.unread(OTHERS[reason].groups, 4))


def test_every_number_of_a_row_is_weighed_once() -> None:
    (values,) = joint.latents_of(SERVED["4x"][0].groups[0], "v")
    found: list[int] = []
    for run, block, half, column in joint._items(values):
        bits = values[run].bits
        words = range(block * 16, block * 16 + (32 if bits == 8 else 16))
        codes = range(4 * half, 4 * half + 4) if bits == 2 else range(16 // bits)
        found += [column + word * 16 // bits + code for word in words for code in codes]
    assert sorted(found) == list(range(768))


@pytest.mark.skipif(not HOPPER, reason="for Hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SERVED)
def test_one_pass_is_the_formula(name: str, dtype: torch.dtype) -> None:
    layout, queries = SERVED[name]
    case = of(layout, queries, dtype, ([2000], [1], [0], [64], [65], [777], [63]))
    q, pages, slots, scale = case.args
    plan = joint.plan_layers([pages.groups], pages.lengths[slots], queries)[0]
    check(case, *triton_split.decode(q, pages, slots, scale, plan))


@pytest.mark.skipif(not HOPPER, reason="for Hopper")
@pytest.mark.parametrize("rows,one_pass", [(joint.ROWS, True), (joint.ROWS - 1, False)])
def test_few_rows_take_two_passes(rows: int, one_pass: bool) -> None:
    layout, queries = SERVED["4x"]
    lengths = torch.tensor([[100]], dtype=torch.int32, device="cuda")
    plan = triton_split.plan_layers([layout.groups], lengths, queries, rows)[0]
    assert isinstance(plan, joint.JointPlan) == one_pass


def of(layout: CacheLayout, queries: int, dtype: torch.dtype, rows: Sequence[list[int]]) -> Case:
    each = [x * len(layout.groups) for x in rows]
    return Case.of(layout, each, queries, dtype, seed=queries, peak=30.0)
