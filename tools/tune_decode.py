"""Find how the decode kernel is best cut on this GPU: src/kvfold/ops/decode/tuning.json anew.

    python tools/tune_decode.py

Every cut is checked against attention written out before it is timed; those of a shape take turns.
All are compiled first, on all cores, since compiling takes longer than everything else.
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from rich.table import Table

from kvfold.bench.common import check_outputs
from kvfold.bench.timing import Step, time_steps
from kvfold.bench.variants import SHAPES, Variant
from kvfold.bench.workload import Workload, build_workload
from kvfold.cli.common import print_table, versions
from kvfold.layout import Geometry
from kvfold.ops.common.plan import power_of_two
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode import triton as decode_triton
from kvfold.ops.decode.triton import plan_layers
from kvfold.ops.decode.tuning import FILE, Shape
from kvfold.utils.files import check_writable, write_json

SEED, LAYERS = 0, 2
GQA, MHA = "llama-3.1-8b", "llama-2-7b-norope"  # 4 query heads a KV head, and 1
# Model, bits of a number, kept dims, rows a page. Short pages are for what is evicted.
MEASURED: tuple[tuple[str, int, float, int], ...] = (
    *product((GQA,), (16, 8, 4), (1.0, 0.5), (32, 64)),
    *product((GQA,), (4,), (1.0, 0.5), (16,)),
    *product((MHA,), (16,), (0.5,), (32,)),
    *product((MHA,), (4,), (1.0, 0.5), (32,)),
)
# Rows a tile, tiles in flight, warps, slices a multiprocessor, most registers a thread.
WIDE = ((32, 3, 1, 5), (32, 3, 1, 6), (32, 3, 2, 6), (64, 3, 1, 8), (64, 3, 2, 4), (128, 5, 4, 2))
NARROW = (
    (32, 3, 1, 8),
    (32, 4, 1, 16, 128),
    (32, 3, 1, 16, 128),
    (64, 3, 1, 8),
    (64, 3, 2, 6),
    (64, 4, 1, 12, 160),
)
NAMES = ("block", "stages", "warps", "slices", "registers")
SHARED = 227 * 1024  # bytes of a block on sm_90


def variant_of(bits: int, kept: float, page: int) -> Variant:
    return Variant(keys=(kept,), values=(kept,), bits=bits, page=page)


def shape_of(geometry: Geometry, variant: Variant) -> Shape:
    assert variant.values is not None, "values have latents of their own"
    keys, values = (int(kept[0] * geometry.head_dim) for kept in (variant.keys, variant.values))
    queries = power_of_two(geometry.queries_per_kv)
    bits = (variant.bits, variant.bits)
    return Shape(bits=bits, widths=(keys, values), page=variant.page, queries=queries)


def candidates(shape: Shape) -> list[Tuning]:
    """At most six, those left out whose tiles in flight would not fit a block's memory."""
    cuts = [
        Tuning(**dict(zip(NAMES, cut, strict=False)))
        for cut in (WIDE if 16 in shape.bits else NARROW)
    ]
    return [x for x in cuts if (x.stages - 1) * x.block * shape.row_bits // 8 < SHARED]


def step_of(work: Workload, tuning: Tuning) -> Step:
    """The kernel and its merge, layer after layer; plans are made once."""
    geometry = work.layout.spec.geometry
    layers = [work.pages(number) for number in range(LAYERS)]
    plans = [
        plan_layers([x.groups], x.lengths[work.slots], geometry.queries_per_kv, tuning=tuning)[0]
        for x in layers
    ]

    def run(number: int) -> torch.Tensor:
        pages, plan = layers[number % LAYERS], plans[number % LAYERS]
        return decode_triton.decode(work.q, pages, work.slots, geometry.scaling, plan)[0]

    return run


def verify(work: Workload, step: Step) -> None:
    check_outputs("decode", step(0)[0], work.expected())


def sweep(
    geometry: Geometry,
    variant: Variant,
    tunings: Iterable[Tuning],
    *,
    batch: int,
    tokens: int,
    rounds: int,
    device: torch.device,
) -> dict[Tuning, float]:
    """Microseconds a layer of every candidate, the fastest first."""
    work = build_workload(
        geometry,
        variant,
        batch=batch,
        tokens=tokens,
        num_layers=LAYERS,
        device=device,
        seed=SEED,
    )
    cuts = {str(tuning): tuning for tuning in tunings}
    steps = {name: step_of(work, tuning) for name, tuning in cuts.items()}
    for step in steps.values():
        verify(work, step)
    times = time_steps(steps, layers=LAYERS, rounds=rounds, device=device)
    return {cuts[name]: times[name].us for name in sorted(cuts, key=lambda name: times[name].us)}


def entry(shape: Shape, found: dict[Tuning, float]) -> dict[str, Any]:
    best = min(found, key=found.__getitem__)
    tuning = {name: getattr(best, name) for name in NAMES}
    return {**vars(shape), "us": round(found[best], 1), "tuning": tuning}


def print_sweep(shape: Shape, found: dict[Tuning, float]) -> None:
    title = f"bits {shape.bits}, widths {shape.widths}, page {shape.page}"
    shown = Table(*NAMES, "us", title=title)
    for tuning, us in found.items():
        shown.add_row(*(str(getattr(tuning, name)) for name in NAMES), f"{us:.1f}")
    print_table(shown)


def compile_one(name: str, variant: Variant, tuning: Tuning, batch: int) -> None:
    """Leave a cut's kernels in Triton's cache: the same launches over a few rows."""
    work = build_workload(
        SHAPES[name], variant, batch=batch, tokens=16 * variant.page, num_layers=LAYERS, seed=SEED,
        device=torch.device("cuda"),
    )  # fmt: skip
    step_of(work, tuning)(0)
    torch.cuda.synchronize()


def compile_all(jobs: list[tuple[str, Variant, Tuning, int]], processes: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        for each in [pool.submit(compile_one, *job) for job in jobs]:
            each.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=512, help="KV heads of all sequences")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument("--json", type=Path, default=FILE, metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to tune for")
    check_writable(arguments.json)
    device = torch.device("cuda")
    cases = []
    for name, bits, kept, page in MEASURED:
        variant, geometry = variant_of(bits, kept, page), SHAPES[name]
        cuts = candidates(shape_of(geometry, variant))
        cases.append((name, variant, cuts, max(1, arguments.heads // geometry.num_kv_heads)))
    jobs = [(name, variant, cut, batch) for name, variant, cuts, batch in cases for cut in cuts]
    compile_all(jobs, arguments.processes)
    size = {"tokens": arguments.tokens, "rounds": arguments.rounds}
    entries = []
    for name, variant, cuts, batch in cases:
        shape = shape_of(SHAPES[name], variant)
        found = sweep(SHAPES[name], variant, cuts, batch=batch, **size, device=device)
        print_sweep(shape, found)
        entries.append(entry(shape, found))
    made_with = versions(device) | {"triton": triton.__version__}
    report = {"versions": made_with, "heads": arguments.heads, **size, "entries": entries}
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
