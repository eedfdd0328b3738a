"""`kvfold bench attention` with the lab's variants and baselines, as a share of memory's speed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kvfold.bench.attention import AttentionResult, Registry, SkippedCase
from kvfold.cli.bench_attention import Benchmark
from kvfold.utils.versions import version_of
from lab.baselines import BASELINES
from lab.ceiling import Ceiling, measure_ceiling
from lab.variants import VARIANTS, is_ablation
from lab.workload import build_workload

REGISTRY = Registry(variants=VARIANTS, baselines=BASELINES, build=build_workload)


@dataclass(frozen=True, kw_only=True)
class LabResult(AttentionResult):
    """ceiling_fraction: of the fastest pure read in the same process."""

    ceiling_fraction: float


class LabBenchmark(Benchmark):
    """Reports every rate as a share of the fastest pure read of memory."""

    ceiling: Ceiling

    def registry(self) -> Registry:
        return REGISTRY

    def default(self, registry: Registry) -> Sequence[str]:
        return [x for x in super().default(registry) if not is_ablation(registry.variants[x])]

    def begin(self, device: Any, rounds: int) -> dict[str, Any]:
        entries = super().begin(device, rounds)
        entries["versions"] |= {"flashinfer": version_of("flashinfer-python")}
        self.ceiling = measure_ceiling(device, rounds)
        return entries | {"ceiling": asdict(self.ceiling)}

    def result(self, result: AttentionResult) -> LabResult:
        fraction = result.tb_per_s / self.ceiling.read_tb_per_s
        return LabResult(**asdict(result), ceiling_fraction=fraction)

    def show(self, results: Sequence[Any], skipped: Sequence[SkippedCase]) -> None:
        super().show(results, [])
        if results:
            read, copy = self.ceiling.read_tb_per_s, self.ceiling.copy_tb_per_s
            print(
                f"\nceiling: {read:.3g} TB/s read ({self.ceiling.read_by}), {copy:.3g} TB/s copied"
            )
        self.show_skipped(skipped)

    def table(self, results: Sequence[Any]) -> Table:
        table = super().table(results)
        table.add_column("ceiling", justify="right", no_wrap=True)
        cells = table.columns[-1]._cells
        cells += [f"{100 * x.ceiling_fraction:.0f} %" for x in results]
        return table
