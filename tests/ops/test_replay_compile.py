"""The kernels of a second reading compiled for sm_90a: tensor cores by warp group, nothing spills.

As in `test_prefill_compile`, what is compiled is what a launch would be.
"""

import json
import sys
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from decode_compile_cases import SHARED, operations  # noqa: E402
from hopper import need_compiler, run_alone  # noqa: E402
from kvfold.ops.prefill import KVView, Seen, triton_peaks  # noqa: E402
from kvfold.ops.prefill import triton as prefill_triton  # noqa: E402
from kvfold.ops.prefill.plan import cut_for, parts  # noqa: E402
from prefill_compile_cases import SPILLS, Launch, hot_loop  # noqa: E402

RANKS = ((128, 128), (64, 64), (96, 96), (128, 256), (256, 256))
HEADS, GROUP, SIZE = 8, 4, 64


def work(ranks: tuple[int, int]) -> tuple[Any, ...]:
    """Queries, keys and values, bf16."""
    data = torch.zeros(1, SIZE, HEADS * sum(ranks), dtype=torch.bfloat16)
    views = [
        KVView(data, tuple(first + h * rank for h in range(HEADS)), (rank,) * HEADS)
        for rank, first in zip(ranks, (0, HEADS * ranks[0]), strict=True)
    ]
    q = torch.zeros(1, SIZE, GROUP * HEADS, ranks[0], dtype=torch.bfloat16).transpose(1, 2)
    return q, *views


def reading(ranks: tuple[int, int]) -> Launch:
    recorder, owner = Launch(prefill_triton.prefill_kernel), tuple(range(HEADS))
    seen = Seen(
        counts=torch.full((1, HEADS), SIZE),
        owner=owner,
        positions=torch.zeros(1, HEADS, SIZE, dtype=torch.int32),
        queries=torch.arange(SIZE)[None],
    )
    some = torch.ones(1, HEADS, SIZE, dtype=torch.bool)
    with mock.patch.object(prefill_triton, "prefill_kernel", recorder):
        how = {"cut": lambda widths: cut_for(widths, False)}
        prefill_triton.prefill_among(*work(ranks), seen, 0.1, some, **how)
    return recorder


def scoring(ranks: tuple[int, int], weighed: bool) -> Launch:
    recorder, (q, keys, _) = Launch(triton_peaks.peaks_kernel), work(ranks)
    some = torch.ones(1, HEADS, SIZE, dtype=torch.bool)
    of_rows = torch.ones(*q.shape[:2], SIZE) if weighed else None
    with mock.patch.object(triton_peaks, "peaks_kernel", recorder):
        place = torch.zeros(q.shape[:3]), some, tuple(range(HEADS)), 0.1, of_rows
        triton_peaks.peaks(q, keys, *place)
    return recorder


def print_report(kind: str, ranks: tuple[int, int], recorder: Launch) -> None:
    listing, shared = recorder.compiled()
    names, labels = operations(listing)
    body = hot_loop(names, labels)
    report = {"kind": kind, "ranks": ranks, "shared": shared, "instructions": len(body)}
    report |= {"spills": sum(name.startswith(("STL", "LDL")) for name in names)}
    report |= {"in_loop": sum(name in ("STL", "LDL") for name in body)}
    report |= {x: body.count(x) for x in ("HGMMA", "HMMA", "LDGSTS", "WARPGROUP", "MUFU")}
    print(json.dumps(report), flush=True)


def compile_all(num_ranks: int) -> None:
    for ranks in RANKS[:num_ranks]:
        print_report("reading", ranks, reading(ranks))
        print_report("scoring", ranks, scoring(ranks, False))
    print_report("scoring", RANKS[0], scoring(RANKS[0], True))


def test_a_case_of_each_compiles_well_for_hopper() -> None:
    check(1)


@pytest.mark.slow
def test_the_kernels_compile_well_for_hopper() -> None:
    check(len(RANKS))


def check(num_ranks: int) -> None:
    need_compiler()
    reports = [json.loads(line) for line in run_alone(__file__, str(num_ranks))]
    assert len(reports) == 2 * num_ranks + 1
    for report in reports:
        assert report["HGMMA"] and not report["HMMA"] and report["LDGSTS"], report
        assert report["in_loop"] == 0 and report["spills"] <= SPILLS, report
        assert report["shared"] <= SHARED, report
        if report["kind"] == "scoring":  # powers are raised once, behind the loop
            assert report["HGMMA"] == sum(parts(report["ranks"][0])) // 16, report
            assert report["MUFU"] <= 1 and report["instructions"] < 300, report


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
