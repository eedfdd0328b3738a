"""The prefill kernel compiled for sm_90a: tensor cores by warp group, loads ahead, nothing spills.

As in `test_decode_compile`, what is compiled is what a launch would be.
"""

import json
import sys
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from decode_compile_cases import SHARED, Recorder, operations  # noqa: E402
from hopper import need_compiler, registers, run_alone  # noqa: E402
from kvfold.ops.prefill import KVView, Seen  # noqa: E402
from kvfold.ops.prefill import triton as prefill_triton  # noqa: E402
from kvfold.ops.prefill.plan import Cut, Widths, cut_for, rescaled_cut, widths_of  # noqa: E402
from prefill_compile_cases import SPILLS, Launch, hot_loop  # noqa: E402

# Key and value rank of the benchmark's variants, and the widest that there are.
RANKS = ((128, 128), (64, 64), (32, 96), (96, 32), (96, 96), (32, 32), (128, 256), (256, 256))
UNEVEN = (32, 32), (64, 64), (96, 96)  # heads of one layer, of which ZACK cuts tiles of equal work


def cut_of(how: str, widths: Widths) -> Cut:
    """`ours`, for many queries or `few`; `zack`, of UNEVEN heads, or with half of the rows (§6.1);
    `fixed`, FlashAttention-2's."""
    if how == "fixed":
        return Cut(pairs=64, warps=4)
    if how.startswith("zack"):
        found = rescaled_cut(widths, sum(max(UNEVEN)))
        return replace(found, rows=32) if how == "zack-half" else found
    return cut_for(widths, how == "few")


def recorded(ranks: tuple[int, int], how: str, positions: bool, window: int | None) -> Recorder:
    """The launch for eight KV heads of four query heads."""
    heads, size = 8, 64
    data = torch.zeros(1, size, heads * sum(ranks), dtype=torch.bfloat16)
    keys, values = (
        KVView(data, tuple(first + h * rank for h in range(heads)), (rank,) * heads)
        for rank, first in zip(ranks, (0, heads * ranks[0]), strict=True)
    )
    where = torch.zeros(1, heads, size, dtype=torch.int32) if positions else None
    recorder = Launch(prefill_triton.prefill_kernel)
    with mock.patch.object(prefill_triton, "prefill_kernel", recorder):
        prefill_triton.prefill(
            torch.zeros(1, size, 4 * heads, ranks[0], dtype=torch.bfloat16).transpose(1, 2),
            keys, values,
            Seen(
                counts=torch.full((1, heads), size), owner=tuple(range(heads)), positions=where,
                queries=torch.arange(size)[None], window=window,
            ),
            0.1, cut=lambda widths: cut_of(how, widths),
        )  # fmt: skip
    return recorder


def print_report(
    ranks: tuple[int, int], how: str = "ours", positions: bool = False, window: int | None = None
) -> None:
    listing, shared = recorded(ranks, how, positions, window).compiled()
    names, labels = operations(listing)
    body = hot_loop(names, labels)
    report: dict[str, Any] = {"ranks": ranks, "how": how, "positions": positions, "window": window}
    report |= {"cut": asdict(cut_of(how, widths_of(*ranks)))}
    report |= {"registers": registers(listing)}
    report |= {"spills": sum(name.startswith(("STL", "LDL")) for name in names)}
    report |= {"in_loop": sum(name in ("STL", "LDL") for name in body), "shared": shared}
    report |= {x: body.count(x) for x in ("HGMMA", "HMMA", "LDGSTS", "WARPGROUP")}
    print(json.dumps(report | {"instructions": len(body)}), flush=True)


def compile_all() -> None:
    for ranks in RANKS:
        print_report(ranks)
    print_report((64, 64), "few")
    print_report((64, 64), positions=True)
    print_report((64, 64), window=4096)
    for how in ("zack", "zack-half", "fixed"):
        for ranks in UNEVEN:
            print_report(ranks, how)


def test_one_cut_compiles_well_for_hopper() -> None:
    need_compiler()
    (line,) = run_alone(__file__, "one")
    check(json.loads(line))


@pytest.mark.slow
def test_the_kernel_compiles_well_for_hopper() -> None:
    need_compiler()
    reports = [json.loads(line) for line in run_alone(__file__)]
    assert len(reports) == len(RANKS) + 3 + 3 * len(UNEVEN)
    for report in reports:
        check(report)


def check(report: dict[str, Any]) -> None:
    widths = widths_of(*report["ranks"])
    how = cut_of(report["how"], widths)
    assert report["in_loop"] == 0 and report["spills"] <= SPILLS, report
    assert report["WARPGROUP"] <= 6, report  # else ptxas waits after each product
    tiles = how.pairs // (16 * how.warps)  # of 64 rows, of a warp group
    assert report["HGMMA"] == tiles * (sum(widths[:2]) + how.rows) // 16, report
    assert not report["HMMA"], report
    copies = sum(-(-how.rows * x // 256 // how.warps) for x in widths)  # of 16 bytes
    assert report["LDGSTS"] == copies + report["positions"], report
    # Two programs share a multiprocessor where ranks are small.
    narrow = max(report["ranks"]) <= 96 and report["how"] in ("ours", "few")
    assert report["shared"] <= SHARED // (2 if narrow else 1), report


if __name__ == "__main__":
    print_report((64, 64), positions=True) if "one" in sys.argv else compile_all()
