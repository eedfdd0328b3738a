"""Find how the decode kernel is best cut on this GPU: src/kvfold/ops/decode_tuning.json anew.

    python tools/tune_decode.py

Every cut is checked against attention written out before it is timed; those of a shape take turns.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvfold.benchmark.reference import check, decode_one
from kvfold.benchmark.timing import Step, time_steps
from kvfold.benchmark.workload import SHAPES, Variant, Workload, build_workload
from kvfold.commands.common import versions
from kvfold.files import check_writable, write_json
from kvfold.ops import decode_triton
from kvfold.ops.decode_triton import plan_layers
from kvfold.ops.plan import padded_queries
from kvfold.ops.tuning import FILE, Shape, Tuning
from kvfold.spec import Geometry

SEED, LAYERS = 0, 2
PAGES, KEPT, BITS = (32, 64), (1.0, 0.5), (16, 8, 4)
# Rows a tile, tiles in flight, warps, slices a multiprocessor, most registers a thread.
WIDE = ((32, 3, 1, 5), (32, 3, 1, 6), (32, 3, 2, 6), (64, 3, 1, 8), (64, 3, 2, 4), (128, 5, 4, 2))
NARROW = (
    (32, 3, 1, 8),
    (32, 3, 1, 12),
    (32, 3, 1, 16, 128),
    (64, 3, 1, 8),
    (64, 3, 2, 6),
    (64, 4, 1, 12, 160),
)
NAMES = ("block", "stages", "warps", "slices", "registers")
SHARED = 227 * 1024  # bytes of a block on sm_90


def shape_of(geometry: Geometry, variant: Variant) -> Shape:
    keys, values = (int(kept[0] * geometry.head_dim) for kept in (variant.keys, variant.values))
    queries = padded_queries(geometry.queries_per_kv)
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
    layers = [work.layer(number) for number in range(LAYERS)]
    plans = [
        plan_layers([groups], lengths[work.slots], geometry.queries_per_kv, tuning)[0]
        for _, lengths, groups in layers
    ]

    def run(number: int) -> torch.Tensor:
        place = work.arena, *layers[number % LAYERS], work.slots
        plan = plans[number % LAYERS]
        return decode_triton.decode(work.q, *place, geometry.scaling, plan=plan)[0]

    return run


def verify(work: Workload, step: Step) -> None:
    tables, lengths, groups = work.layer(0)
    place = work.arena, tables, lengths, groups, 0, work.layout.spec.geometry.scaling
    out = step(0)
    assert isinstance(out, torch.Tensor)
    check("decode", out[0], decode_one(work.q[0], *place, work.dv))


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
    Console().print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=FILE, metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to tune for")
    check_writable(arguments.json)
    geometry, device = SHAPES[arguments.shape], torch.device("cuda")
    size = {"batch": arguments.batch, "tokens": arguments.tokens, "rounds": arguments.rounds}
    entries = []
    for bits in BITS:
        for kept in KEPT:
            for page in PAGES:
                variant = Variant(keys=(kept,), values=(kept,), bits=bits, page=page)
                shape = shape_of(geometry, variant)
                found = sweep(geometry, variant, candidates(shape), **size, device=device)
                print_sweep(shape, found)
                entries.append(entry(shape, found))
    made_with = versions(device) | {"triton": decode_triton.triton.__version__}
    report = {"versions": made_with, "shape": arguments.shape, **size, "entries": entries}
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
