"""Decode attention over one step of a batch: ours in several sizes, theirs on the whole cache.

A *case* is a batch of B sequences of T tokens each, on average; all that is timed in it takes
turns. Baselines always have sequences of equal length, which is their best case.
"""

import gc
from dataclasses import dataclass
from itertools import chain

import torch

from kvfold.bench import common
from kvfold.bench.baselines import BASELINES, Unavailable, build_contiguous, full_bytes
from kvfold.bench.ceiling import Ceiling
from kvfold.bench.common import Candidate, Found, check_names, measure, reason
from kvfold.bench.reference import attend, check
from kvfold.bench.timing import cold_bytes, record
from kvfold.bench.variants import ROPE_BASES, SHAPES, VARIANTS
from kvfold.bench.workload import Decode, build_workload, layer_bytes

SHARE = 0.7  # of the free memory; the rest is for checks and work space
HOST_BYTES = 1 << 30  # where free memory is not asked for
DEFAULT = tuple(name for name, x in VARIANTS.items() if not (x.rebuilt or x.ablation))


@dataclass(frozen=True, kw_only=True)
class Job(common.Job):
    """(B, T) of every case. Raises ValueError for names that do not exist and numbers below 1."""

    def __post_init__(self) -> None:
        check_names("variants", self.variants, VARIANTS)
        self.check(("batch", "tokens"), BASELINES)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant or baseline (`kind`) in one case; times in microseconds a layer.

    bytes: of a layer, that must be read: stored numbers and scales; distinct_layers: how many the
    call went round; ceiling_fraction: of the pure read in the same run; fastest_baseline: of the
    same case, None where none could run. Of rebuilt keys: rank, numbers that a key is made from;
    tflops, what making them takes (2 d r a row and KV head) over the time.
    """

    variant: str
    kind: str
    shape: str
    batch: int
    tokens: int
    distinct_layers: int
    us: float
    us_p10: float
    us_p90: float
    repeat_us: float
    bytes: float
    tb_per_s: float
    ceiling_fraction: float
    fastest_baseline: str | None
    fastest_baseline_us: float | None
    speedup_vs_fastest: float | None
    rank: int | None = None
    tflops: float | None = None


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """What was asked for and not timed."""

    name: str
    shape: str
    batch: int
    tokens: int
    reason: str


def measure_case(
    job: Job, batch: int, tokens: int, decode: Decode, ceiling: Ceiling, device: torch.device
) -> tuple[list[Row], list[Skipped]]:
    """Rows of one case. `decode` is called as `ops.decode.decode`. What does not run, does
    not fit or is wrong is not timed, but named."""
    budget = _budget(device) // (len(job.variants) + 1)
    found = chain(
        _baselines(job, batch, tokens, budget, device),
        _variants(job, batch, tokens, budget, decode, device),
    )
    place = {"batch": batch, "tokens": tokens}
    timed, skipped = measure(job, place, found, device)
    rows = []
    for x, row in timed:
        rate = x.bytes / row["us"] / 1e6
        rows.append(
            Row(
                **row,
                distinct_layers=x.distinct_layers,
                bytes=x.bytes,
                tb_per_s=rate,
                ceiling_fraction=rate / ceiling.read_tb_per_s,
                rank=x.rank,
                tflops=x.flops / row["us"] / 1e6 if x.flops else None,
            )
        )
    return rows, [Skipped(name=x, shape=job.shape, **place, reason=why) for x, why in skipped]


def _baselines(job: Job, batch: int, tokens: int, budget: int, device: torch.device) -> Found:
    """Every baseline that runs and is right, or why it does not."""
    geometry = SHAPES[job.shape]
    size = full_bytes(geometry, batch, tokens)
    num_layers = _distinct(size, job.layers, budget, device)
    if not num_layers:
        yield from ((name, _too_large(size, budget)) for name in job.baselines)
        return
    try:
        at = build_contiguous(
            geometry, batch=batch, tokens=tokens, num_layers=num_layers, device=device
        )
    except RuntimeError as error:  # out of memory
        yield from ((name, reason(error)) for name in job.baselines)
        return
    for name in job.baselines:
        try:
            built = BASELINES[name](at)
            q = at.q[0].unflatten(0, (-1, at.per_kv))
            heads = zip(q, built.k, built.v, strict=True)
            expected = torch.cat([attend(*head, at.scale) for head in heads])
            check(name, built.step(0)[0].reshape(expected.shape), expected)
            record(built.step, 1, device)  # not all that runs can be captured
            yield (
                name,
                Candidate(kind="baseline", step=built.step, bytes=size, distinct_layers=num_layers),
            )
        except Exception as error:  # whatever it is, the others run on
            yield name, reason(error)


def _variants(
    job: Job, batch: int, tokens: int, budget: int, decode: Decode, device: torch.device
) -> Found:
    """Every variant that fits, runs and is right, or why it does not."""
    geometry = SHAPES[job.shape]
    for name in job.variants:
        variant = VARIANTS[name]
        size = layer_bytes(geometry, variant, batch, tokens)
        num_layers = _distinct(size, job.layers, budget, device)
        if not num_layers:
            yield name, _too_large(size, budget)
            continue
        try:
            work = build_workload(
                geometry,
                variant,
                batch=batch,
                tokens=tokens,
                num_layers=num_layers,
                device=device,
                rope_base=ROPE_BASES[job.shape],
            )
            if device.type == "cuda" and not work.has_kernel:
                raise Unavailable("there is no kernel for these rows")
            step = work.step(decode)
            check(name, step(0)[0], work.expected())
            record(step, 1, device)  # not all that runs can be captured
            yield (
                name,
                Candidate(
                    kind="variant",
                    step=step,
                    bytes=work.row_bytes,
                    distinct_layers=num_layers,
                    rank=work.rank,
                    flops=work.flops,
                ),
            )
        except Exception as error:  # as above
            yield name, reason(error)


def _budget(device: torch.device) -> int:
    """Bytes for all caches of a case."""
    if device.type != "cuda":
        return HOST_BYTES
    gc.collect()
    torch.cuda.empty_cache()
    return int(SHARE * torch.cuda.mem_get_info(device)[0])


def _distinct(size: int, layers: int, budget: int, device: torch.device) -> int:
    """Layers of `size` bytes to go round: all, or as many as fit; 0 where those do not even fill
    the device's cache so often that no layer is found in it again."""
    fit = min(layers, budget // max(size, 1))
    return fit if fit == layers or fit * size >= cold_bytes(device) else 0


def _too_large(size: int, budget: int) -> str:
    return f"a layer takes {size} bytes, its share of the memory is {budget}: name fewer variants"
