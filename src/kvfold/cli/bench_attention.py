"""kvfold bench attention: times attention of one decode step, as a table and JSON."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvfold.cli import bench_common as shared
from kvfold.cli import common
from kvfold.cli.options import parse_list

if TYPE_CHECKING:
    from kvfold.bench.attention import AttentionResult, Registry, SkippedCase


def attention(
    *,
    shape: shared.Shape = "llama-3.1-8b",
    batch: shared.Batches = "1,16,64",
    tokens: shared.Lengths = "1024,8192,32768",
    variants: str | None = None,
    baselines: str | None = None,
    layers: int = 32,
    rounds: shared.Rounds = 30,
    json: shared.Output = None,
) -> None:
    """Time the attention of one decode step on random caches, beside PyTorch's on an uncompressed
    cache.

    The output of every kernel is checked before it is timed. Kernels take turns; times are medians
    in microseconds a layer.

    Parameters
    ----------
    variants
        Caches to time, separated by commas: bf16-full (uncompressed), bf16-half (half of the
        dimensions), int8-full, int8-half, int4-full, int4-half, and recipes at a factor: swift-4x,
        swift-5x, lean-6x, lean-8x, small-6x, small-14x. By default the first eight, whose keys need
        no reconstruction.
    baselines
        sdpa-flash or sdpa-cudnn, separated by commas; by default both.
    layers
        Layers a call, each with its own cache if memory allows.
    """

    time_attention(
        Benchmark(),
        shape=shape,
        batch=batch,
        tokens=tokens,
        variants=variants,
        baselines=baselines,
        layers=layers,
        rounds=rounds,
        json=json,
    )


class Benchmark:
    """What `time_attention` times, and how it reports. A benchmark with more to choose from is a
    subclass."""

    def registry(self) -> "Registry":
        """What can be named."""
        from kvfold.bench.attention import REGISTRY

        return REGISTRY

    def default(self, registry: "Registry") -> Sequence[str]:
        """The variants to time if none are named: those that reconstruct no keys."""
        return [name for name, x in registry.variants.items() if not x.rebuilt]

    def begin(self, device: Any, rounds: int) -> dict[str, Any]:
        """Called after the checks of the options. Returns more entries of the JSON file."""
        return {"versions": shared.versions(device)}

    def result(self, result: "AttentionResult") -> "AttentionResult":
        """A result as it is written and shown."""
        return result

    def show(self, results: "Sequence[AttentionResult]", skipped: "Sequence[SkippedCase]") -> None:
        """Print a table for every case, and what was not timed."""
        for batch, tokens in dict.fromkeys((x.batch, x.tokens) for x in results):
            case = [x for x in results if (x.batch, x.tokens) == (batch, tokens)]
            print(f"\n{case[0].shape}, {batch} x {tokens} tokens (* fastest baseline):")
            common.print_table(self.table(case))
        self.show_skipped(skipped)

    def show_skipped(self, skipped: "Sequence[SkippedCase]") -> None:
        cases: dict[tuple[str, str], list[str]] = {}
        for x in skipped:
            cases.setdefault((x.name, x.reason), []).append(f"{x.batch} x {x.tokens}")
        for (name, reason), where in cases.items():
            print(f"{name} at {', '.join(where)} not timed: {reason}")

    def table(self, results: "Sequence[AttentionResult]") -> Table:
        """The results of one case; times in microseconds a layer, speed relative to the fastest
        baseline."""
        table = shared.empty_table("cache", "us", "p10-p90", "again", "MB", "TB/s", "speed")
        for x in results:
            speedup = x.speedup_vs_fastest
            table.add_row(
                x.variant + " *" * (x.variant == x.fastest_baseline),
                shared.digits(x.us),
                f"{shared.digits(x.us_p10)}-{shared.digits(x.us_p90)}",
                shared.digits(x.repeat_us),
                shared.digits(x.bytes / 1e6),
                f"{x.tb_per_s:.2f}",
                "–" if speedup is None else f"{speedup:.2f}x",
            )
        return table


def time_attention(
    benchmark: Benchmark,
    *,
    shape: str,
    batch: str,
    tokens: str,
    variants: str | None,
    baselines: str | None,
    layers: int,
    rounds: int,
    json: Path | None,
) -> None:
    """Run a benchmark with the command's options. Raises ValueError for options that are not
    legal."""
    cases = product(parse_list(batch, "--batch", int), parse_list(tokens, "--tokens", int))
    common.check_outputs(json=json)
    import torch

    from kvfold.bench import attention as bench
    from kvfold.hub.loading import default_device

    registry = benchmark.registry()
    job = bench.KernelJob(
        shape=shape,
        variants=shared.names(variants, "--variants", benchmark.default(registry)),
        baselines=shared.names(baselines, "--baselines", registry.baselines),
        layers=layers,
        rounds=rounds,
        cases=tuple(cases),
    )
    registry.check(job)
    from kvfold.ops.decode import decode

    device = torch.device(default_device())

    def measure(case: tuple[int, int]) -> tuple[list[Any], list[Any]]:
        results, skipped = bench.measure_case(job, *case, decode, device, registry)
        return [benchmark.result(x) for x in results], skipped

    shared.measure_cases(
        "attention",
        job,
        measure,
        benchmark.show,
        json=json,
        label=f"{shape}, B x T",
        **benchmark.begin(device, rounds),
    )
