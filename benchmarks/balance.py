"""How evenly attention's work falls on multiprocessors, counted from the plans; nothing is timed.

    python tests/ops/test_prefill_compile.py > cuts.jsonl    # needs Triton; compiles for sm_90a
    python benchmarks/balance.py --cuts cuts.jsonl --checkpoints zack-gqa --json FILE

Decode: work of a program by the plan's own cost (bits of a row and more, by tiles, and what an item
costs to begin), programs dealt to the first free of the places for them on a device of 132
multiprocessors. How many times as long all of it takes as if it were spread evenly: `busiest`, by
the fullest multiprocessor, as if one place alone had all of its speed; `longest`, by the place that
ends last, as if it had no more than its share. Sums over layers, which follow one another.

Prefill: (query, head) pairs times rows times dk + dv + 1 (ZACK §5.3), tile by tile, of what the
cuts compile to: as many programs share a multiprocessor as registers and shared memory allow.
`read_gb`: keys and values that tiles read, from the second cache at best.
"""

import argparse
import heapq
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvfold.bench.variants import DTYPE, SHAPES, variant_layout
from kvfold.layout import CacheSpec
from kvfold.layout.pages import CacheLayout, cache_layout
from kvfold.ops.common.plan import Slices, longest_first, stream_k, whole_items
from kvfold.ops.decode.triton import OVERHEAD, SMALLEST, costs_of
from kvfold.ops.decode.tuning import tuning_for
from kvfold.ops.prefill.plan import widths_of
from kvfold.utils.files import write_json
from lab.chunk import KEPT
from lab.variants import VARIANTS
from lab.workload import draw_lengths

SMS, REGISTERS, SHARED, WARPS = 132, 1 << 16, 228 << 10, 64  # of a Hopper device, of one of them
HEADS = "bf16-half", "bf16-half-ragged", "bf16-half-uneven"
DECODED = [(1, 8192), (16, 8192), (64, 8192)]
CHUNKS = [(1024, 1024), (8192, 2048), (8192, 8192)]  # tokens, of which the last are queries
WAYS = "whole", "longest-first", "stream-k"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=Path, help="lines of tests/ops/test_prefill_compile.py")
    parser.add_argument(
        "--checkpoints", type=Path, nargs="*", default=(), help="whose ranks are counted too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    geometry = SHAPES["llama-3.1-8b"]
    kinds = {name: variant_layout(geometry, VARIANTS[name], 1) for name in HEADS}
    for path in arguments.checkpoints:
        config = json.loads((path / "config.json").read_text("utf-8"))
        spec = CacheSpec.from_dict(config["quantization_config"]["cache"])
        kinds[path.name] = cache_layout(spec, page=32, itemsize=DTYPE.itemsize)
    decode = [
        row
        for name, layout in kinds.items()
        for lengths in ("bf16-half", "bf16-half-pareto")
        for batch, tokens in DECODED
        for row in decode_rows(name, layout, lengths, batch, tokens)
    ]
    prefill, lines = [], []
    if arguments.cuts:
        lines = [json.loads(line) for line in arguments.cuts.read_text("utf-8").splitlines()]
        prefill = [row for case in CHUNKS for row in prefill_rows(lines, *case)]
    for row in decode + prefill:
        print(json.dumps(row))
    if arguments.json:
        found = {"benchmark": "balance", "decode": decode, "prefill": prefill, "compiled": lines}
        write_json(arguments.json, found)


# -- decode -------------------------------------------------------------------------------------


def decode_rows(
    name: str, layout: CacheLayout, lengths: str, batch: int, tokens: int
) -> Iterator[dict[str, Any]]:
    queries = layout.spec.geometry.queries_per_kv
    rows = draw_lengths(VARIANTS[lengths], batch, tokens, layout, seed=0)
    totals: dict[str, list[float]] = {how: [0.0, 0.0] for how in WAYS}
    even = 0.0
    for where in layout.layer_groups:
        groups = layout.groups[where]
        found, cost, _ = costs_of((tuple(groups),), queries, torch.device("cpu"))
        tuning = tuning_for(found, queries)
        tiles, costs = -(-rows[:, where] // tuning.block), cost.repeat(batch, 1)
        work = tiles.flatten().tolist(), costs.flatten().tolist()
        even += (sum(n * c for n, c in zip(*work, strict=True)) + OVERHEAD * len(work[0])) / SMS
        for how in WAYS:
            loads = loads_of(slices_of(how, *work, tuning.slices * SMS), *work)
            busiest, longest = dealt(loads, tuning.slices)
            totals[how][0] += busiest
            totals[how][1] += longest
    for how, (busiest, longest) in totals.items():
        about = {
            "heads": name,
            "lengths": getattr(VARIANTS[lengths], "lengths", "uniform"),
            "batch": batch,
        }
        yield {**about, "tokens": tokens, "how": how,
               "busiest": busiest / even, "longest": longest / even}  # fmt: skip


def slices_of(how: str, tiles: list[int], cost: list[int], number: int) -> Slices:
    if how == "whole":
        return whole_items(tiles)
    if how == "longest-first":
        return longest_first(tiles, cost, number)
    return stream_k(torch.tensor(tiles), torch.tensor(cost), OVERHEAD, number, SMALLEST)


def loads_of(slices: Slices, tiles: list[int], cost: list[int]) -> list[int]:
    """Work of every slice, beginnings of items included."""
    order = range(len(tiles)) if slices.order is None else slices.order.tolist()
    found = []
    for (item, tile), (end_item, end_tile) in pairwise(slices.starts.tolist()):
        load = 0
        while item <= end_item and item < len(tiles):
            own = order[item]
            number = (end_tile if item == end_item else tiles[own]) - tile
            load += number * cost[own] + OVERHEAD if number > 0 else 0
            item, tile = item + 1, 0
        found.append(load)
    return found


def dealt(loads: Sequence[float], places: int) -> tuple[float, float]:
    """Work of the fullest multiprocessor, and of the fullest place times their number, of programs
    that begin in order wherever a place is free."""
    free = [(0.0, place) for place in range(places * SMS)]
    found = [0.0] * SMS
    for load in loads:
        time, place = heapq.heappop(free)
        heapq.heappush(free, (time + load, place))
        found[place % SMS] += load
    return max(found), places * max(free)[0]


# -- prefill ------------------------------------------------------------------------------------


def prefill_rows(lines: list[dict[str, Any]], tokens: int, chunk: int) -> Iterator[dict[str, Any]]:
    """The heads of `half-uneven`, a launch for every class as the kernel's, or one for all."""
    geometry = SHAPES["llama-3.1-8b"]
    cuts = {(x["how"], *x["ranks"]): x for x in lines if not (x["positions"] or x["window"])}
    ranks = [int(x * geometry.head_dim) for x in KEPT["half-uneven"][0]]
    each = {rank: ranks.count(rank) * geometry.num_kv_heads // len(ranks) for rank in set(ranks)}
    exact = chunk * (tokens - chunk) + chunk * (chunk + 1) // 2
    needed = sum(n * (2 * r + 1) for r, n in each.items()) * exact * geometry.queries_per_kv
    for how in ("fixed", "zack", "ours"):
        tasks, spans, read = [], 0.0, 0.0
        for rank, heads in sorted(each.items(), reverse=True):
            x = cuts[how, rank, rank]
            own, numbers = programs(x, heads, tokens, chunk, geometry.queries_per_kv)
            places = residents(x)
            spans += dealt(own, places)[0]
            tasks.append((own, places))
            read += 2 * numbers
        work = sum(sum(own) for own, _ in tasks)
        every = [load for own, _ in tasks for load in own]
        at_once, _ = dealt(every, min(places for _, places in tasks))
        yield {
            "how": how,
            "tokens": tokens,
            "chunk": chunk,
            "programs": sum(len(own) for own, _ in tasks),
            "residents": {str(r): residents(cuts[how, r, r]) for r in each},
            "pairs": {str(r): cuts[how, r, r]["cut"]["pairs"] for r in each},
            "busiest": spans / (work / SMS),
            "busiest_in_one_launch": at_once / (work / SMS),
            "work": work / needed,
            "read_gb": read / 1e9,
        }


def programs(
    x: dict[str, Any], heads: int, tokens: int, chunk: int, group: int
) -> tuple[list[float], float]:
    """Work of every program of a class, last queries first, and numbers of keys and values read."""
    pairs, rows, (key, value) = x["cut"]["pairs"], x["cut"]["rows"], x["ranks"]
    width, loads, numbers = sum(widths_of(key, value)), [], 0.0
    for block in reversed(range(-(-chunk * group // pairs))):
        last = min((block * pairs + pairs - 1) // group, chunk - 1)
        seen = -(-(tokens - chunk + last + 1) // rows) * rows
        loads += heads * [float(pairs * seen * (width + 1))]
        numbers += heads * seen * (key + value)
    return loads, numbers


def residents(x: dict[str, Any]) -> int:
    """Programs that a multiprocessor holds."""
    warps = x["cut"]["warps"]
    registers = -(-x["registers"] // 8) * 8 * 32 * warps
    return min(REGISTERS // registers, SHARED // (x["shared"] + 1024), WARPS // warps)


if __name__ == "__main__":
    main()
