"""Decoding in one pass over values that all heads share: which rows it serves, and on Hopper the
formula."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import hard_heads
import rebuild_triton_cases as rebuild
from decode_triton_cases import check
from kvfold.layout.pages import CacheLayout
from kvfold.ops import one_pass
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.decode import triton_split
from kvfold.ops.latent_decode import reference, rope_table, triton_pieces
from kvfold.ops.one_pass.rows import items, latents_of
from pages import Case
from split_triton_cases import swift

pytestmark = pytest.mark.gpu

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
    "six queries": (swift([((24, 8), (104, 4))] * 2, [((64, 8), (96, 4))], page=64), 6),
    "seven queries": (swift([((64, 4), (64, 2))] * 4, [((96, 4), (64, 2))], page=32), 7),
    "three queries": (swift([((64, 4),)] * 8, [((256, 8),)], page=16), 3),
    "groups of padded": (swift([((64, 4),)] * 8, [((128, 4),)] * 2, heads=4, page=64), 3),
}
OTHERS = {
    "queries of 32 bits": swift([((64, 4),)] * 8, [((96, 4),)], page=64, itemsize=4),
    "groups of unequal": swift([((64, 4),)] * 8, [((64, 4),), ((96, 4),)], heads=4, page=64),
    "6 KV heads of": swift([((64, 4),)] * 6, [((96, 4),)], page=64),
    "other segments": swift([((64, 4),)] * 4 + [((32, 4),)] * 4, [((96, 4),)], page=64),
    "no multiple": swift([((64, 4),)] * 8, [((72, 4),)], page=64),
    "with metrics": swift([((64, 4),)] * 8, [((96, 4),)], page=64, tracked=True),
    "pages of 128": swift([((64, 4),)] * 8, [((96, 4),)], page=128),
    "more values": swift([((64, 4),)] * 8, [((1024, 4),)], page=64),
}


@pytest.mark.parametrize("name", SERVED)
def test_rows_that_are_served(name: str) -> None:
    layout, queries = SERVED[name]
    assert one_pass.unsupported_reason(layout.groups, queries) is None


@pytest.mark.parametrize("reason", OTHERS)
def test_and_which_are_not(reason: str) -> None:
    assert reason in str(one_pass.unsupported_reason(OTHERS[reason].groups, 4))


def test_every_number_of_a_row_is_weighed_once() -> None:
    (values,) = latents_of(SERVED["4x"][0].groups[0], "v")
    found: list[int] = []
    for run, block, half, column in items(values):
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
    plan = one_pass.plan_layers([pages.groups], pages.lengths[slots], queries)[0]
    check(case, *triton_split.decode(q, pages, slots, scale, plan))


@pytest.mark.skipif(not HOPPER, reason="for Hopper")
@pytest.mark.parametrize("rows,whole", [(one_pass.ROWS, True), (one_pass.ROWS - 1, False)])
def test_few_rows_take_two_passes(rows: int, whole: bool) -> None:
    layout, queries = SERVED["4x"]
    lengths = torch.tensor([[100]], dtype=torch.int32, device="cuda")
    plan = triton_split.plan_layers([layout.groups], lengths, queries, rows)[0]
    assert isinstance(plan, one_pass.OnePassPlan) == whole


REBUILT = {
    "6x": ((((32, 4), (64, 2)), ((128, 8), (384, 4), (256, 2))), {}),
    "8x": ((((16, 4), (48, 2)), ((64, 8), (384, 4), (256, 2))), {}),
    "four bits": ((((64, 4),), ((256, 4),)), {"page": 32}),
    "eight bits": ((((48, 8),), ((128, 8),)), {"rotary": 64, "scaling": 1.2}),
    "eight queries": ((((64, 4),), ((256, 4),)), {"queries": 8}),
    "seven queries": ((((64, 4),), ((256, 4),)), {"queries": 7, "heads": 4}),
    "three queries": ((((32, 4), (64, 2)), ((128, 8), (384, 4))), {"queries": 3, "heads": 8}),
    "smaller heads": ((((16, 8), (32, 4)), ((128, 8),)), {"d": 64}),
    "quick": ((((64, 4),), ((256, 4),)), {"base": 1e4}),
}


def rebuilt(name: str) -> rebuild.Case:
    runs, options = REBUILT[name]
    options = {"d": 128, "queries": 4, "page": 64, "base": 5e5} | options
    base, heads = options.pop("base"), options.pop("heads", 32 // options["queries"])
    ranks = [sum(width for width, _ in own) for own in runs]
    lengths = [2000, 1, 0, 64, 65, 777, 63]
    case = rebuild.Case("lean", [ranks[0]] * heads, ranks[1], lengths, runs=runs, **options)
    angles = rebuild._angles(base, case.maps.rotary)
    rope = rope_table(angles, 2048, case.maps.up.shape[1])
    case.maps = replace(case.maps, inv_freq=angles, rope=rope)
    return case


@pytest.mark.parametrize("name", REBUILT)
def test_keys_that_are_rebuilt(name: str) -> None:
    case = rebuilt(name)
    queries = case.q.shape[1] // len(case.maps.up)
    assert one_pass.unsupported_reason(case.groups, queries, case.q.shape[2]) is None


@pytest.mark.skipif(not HOPPER, reason="for Hopper")
@pytest.mark.parametrize("name", REBUILT)
def test_one_pass_rebuilds_keys(name: str) -> None:
    case = rebuilt(name)
    lengths, queries = case.lengths.to("cuda")[case.slots], case.q.shape[1] // len(case.maps.up)
    plan = one_pass.plan_layers([case.groups], lengths, queries)[0]
    out, lse = case.run(triton_pieces.latent_decode, plan=plan)
    want, own = case.run(reference.latent_decode, dtype=torch.float64)
    assert (out.float() - want.float()).norm() / want.float().norm() < 1.5e-3
    torch.testing.assert_close(lse, own.float(), rtol=0, atol=5e-3)


@pytest.mark.skipif(not HOPPER, reason="for Hopper")
@pytest.mark.parametrize("level", hard_heads.ALL)
@pytest.mark.parametrize("name", ["4x", "six queries", "eight bits"])
def test_one_pass_on_hard_heads(name: str, level: str) -> None:
    layout, queries = SERVED[name]
    rows = [[n] * len(layout.groups) for n in (2000, 1, 0, 64, 65, 777, 63)]
    hard = {"level": hard_heads.ALL[level], "first": hard_heads.FIRST}
    case = Case.of(layout, rows, queries, torch.bfloat16, **hard)
    q, pages, slots, scale = case.args
    plan = one_pass.plan_layers([pages.groups], pages.lengths[slots], queries)[0]
    # Queries are whole numbers of 16 bits, by the largest, and a first key is FIRST * sqrt(128)
    # long: three standard deviations of what that makes of its score.
    step = abs(hard_heads.ALL[level][1]) / 32512
    slack = 3 * step / 12**0.5 * hard_heads.FIRST * 128**0.5 * scale * LOG2_E
    check(case, *triton_split.decode(q, pages, slots, scale, plan), slack)


def of(layout: CacheLayout, queries: int, dtype: torch.dtype, rows: Sequence[list[int]]) -> Case:
    each = [x * len(layout.groups) for x in rows]
    return Case.of(layout, each, queries, dtype, seed=queries, peak=30.0)
