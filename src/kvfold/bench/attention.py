"""Decode attention over one step of a batch: ours in several sizes, theirs on the whole cache.

A *case* is a batch of B sequences of T tokens each, on average; all that is timed in it takes
turns. Baselines always have sequences of equal length, which is their best case.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvfold.bench.baselines import BASELINES, build_contiguous, full_bytes
from kvfold.bench.ceiling import Ceiling
from kvfold.bench.common import check_names, fastest, reason
from kvfold.bench.reference import attend, check
from kvfold.bench.timing import Step, Timing, cold_bytes, record, time_steps
from kvfold.bench.variants import ROPE_BASES, SHAPES, VARIANTS
from kvfold.bench.workload import Decode, build_workload, layer_bytes

SHARE = 0.7  # of the free memory; the rest is for checks and work space
HOST_BYTES = 1 << 30  # where free memory is not asked for
DEFAULT = tuple(name for name, x in VARIANTS.items() if not (x.rebuilt or x.ablation))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is timed: names of a shape, of variants and of baselines, (B, T) of every case; `layers`
    a call; rounds. Raises ValueError for names that do not exist and numbers below 1."""

    shape: str
    cases: tuple[tuple[int, int], ...]
    variants: tuple[str, ...]
    baselines: tuple[str, ...]
    layers: int
    rounds: int

    def __post_init__(self) -> None:
        check_names("shape", [self.shape], SHAPES)
        check_names("variants", self.variants, VARIANTS)
        check_names("baselines", self.baselines, BASELINES)
        _check_least("batch", *(batch for batch, _ in self.cases))
        _check_least("tokens", *(tokens for _, tokens in self.cases))
        _check_least("layers", self.layers)
        _check_least("rounds", self.rounds)


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


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    kind: str
    step: Step
    bytes: float
    distinct_layers: int
    rank: int | None = None
    flops: float | None = None


def measure_case(
    job: Job, batch: int, tokens: int, decode: Decode, ceiling: Ceiling, device: torch.device
) -> tuple[list[Row], list[Skipped]]:
    """Rows of one case. `decode` is called as `ops.decode.decode`. What does not run, does
    not fit or is wrong is not timed, but named."""
    candidates: dict[str, _Candidate] = {}
    skipped: list[Skipped] = []

    def skip(name: str, why: str) -> Skipped:
        return Skipped(name=name, shape=job.shape, batch=batch, tokens=tokens, reason=why)

    budget = _budget(device) // (len(job.variants) + 1)
    found = [
        *_baselines(job, batch, tokens, budget, device),
        *_variants(job, batch, tokens, budget, decode, device),
    ]
    for name, made in found:
        if isinstance(made, str):
            skipped.append(skip(name, made))
        else:
            candidates[name] = made
    steps = {name: x.step for name, x in candidates.items()}
    times: dict[str, Timing] = {}
    try:
        if steps:
            times = time_steps(steps, layers=job.layers, rounds=job.rounds, device=device)
    except Exception as error:  # of the whole case: the next one runs on
        skipped += [skip(name, f"with all others: {reason(error)}") for name in candidates]
        candidates = {}
    return _rows(job, batch, tokens, candidates, times, ceiling), skipped


def _baselines(
    job: Job, batch: int, tokens: int, budget: int, device: torch.device
) -> Iterator[tuple[str, _Candidate | str]]:
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
            out = built.step(0)
            assert isinstance(out, torch.Tensor), f"{name} returned {type(out)}"
            q = at.q[0].unflatten(0, (-1, at.per_kv))
            heads = zip(q, built.k, built.v, strict=True)
            expected = torch.cat([attend(*head, at.scale) for head in heads])
            check(name, out[0].reshape(expected.shape), expected)
            record(built.step, 1, device)  # not all that runs can be captured
        except Exception as error:  # whatever it is, the others run on
            yield name, reason(error)
            continue
        yield (
            name,
            _Candidate(kind="baseline", step=built.step, bytes=size, distinct_layers=num_layers),
        )


def _variants(
    job: Job, batch: int, tokens: int, budget: int, decode: Decode, device: torch.device
) -> Iterator[tuple[str, _Candidate | str]]:
    """Every variant that fits, runs and is right, or why it does not."""
    geometry = SHAPES[job.shape]
    for name in job.variants:
        size = layer_bytes(geometry, VARIANTS[name], batch, tokens)
        num_layers = _distinct(size, job.layers, budget, device)
        if not num_layers:
            yield name, _too_large(size, budget)
            continue
        try:
            found = _variant(job, name, batch, tokens, num_layers, decode, device)
        except Exception as error:  # as above
            yield name, reason(error)
            continue
        yield name, found


def _variant(
    job: Job,
    name: str,
    batch: int,
    tokens: int,
    num_layers: int,
    decode: Decode,
    device: torch.device,
) -> _Candidate | str:
    """A variant that is right and has been captured. Raises what goes wrong."""
    work = build_workload(
        SHAPES[job.shape],
        VARIANTS[name],
        batch=batch,
        tokens=tokens,
        num_layers=num_layers,
        device=device,
        rope_base=ROPE_BASES[job.shape],
    )
    if device.type == "cuda" and not work.has_kernel:
        return "there is no kernel for these rows"
    step = work.step(decode)
    out = step(0)
    assert isinstance(out, torch.Tensor), f"decode returned {type(out)}"
    check(name, out[0], work.expected())
    record(step, 1, device)  # not all that runs can be captured
    return _Candidate(
        kind="variant",
        step=step,
        bytes=work.row_bytes,
        distinct_layers=num_layers,
        rank=work.rank,
        flops=work.flops,
    )


def _rows(
    job: Job,
    batch: int,
    tokens: int,
    candidates: dict[str, _Candidate],
    times: dict[str, Timing],
    ceiling: Ceiling,
) -> list[Row]:
    """What was timed, with the fastest baseline beside each."""
    best, bar = fastest({name: x.kind for name, x in candidates.items()}, times)
    rows = []
    for name, x in candidates.items():
        time = times[name]
        rate = x.bytes / time.us / 1e6
        rows.append(
            Row(
                variant=name,
                kind=x.kind,
                shape=job.shape,
                batch=batch,
                tokens=tokens,
                distinct_layers=x.distinct_layers,
                us=time.us,
                us_p10=time.us_p10,
                us_p90=time.us_p90,
                repeat_us=time.repeat_us,
                bytes=x.bytes,
                tb_per_s=rate,
                ceiling_fraction=rate / ceiling.read_tb_per_s,
                fastest_baseline=best,
                fastest_baseline_us=bar or None,
                speedup_vs_fastest=bar / time.us if bar else None,
                rank=x.rank,
                tflops=x.flops / time.us / 1e6 if x.flops else None,
            )
        )
    return rows


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


def _check_least(field: str, *values: int) -> None:
    if min(values) < 1:
        raise ValueError(f"{field} must be at least 1, got {min(values)}")
