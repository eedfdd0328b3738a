"""kvfold bench: one benchmark a file, each with its own flags."""

from collections.abc import Callable

from kvfold.cli.bench_attention import attention
from kvfold.cli.bench_compress import compress
from kvfold.cli.bench_decode import decode
from kvfold.cli.bench_prefill import prefill
from kvfold.cli.bench_replay import replay
from kvfold.cli.bench_serve import serve
from kvfold.cli.bench_throughput import throughput
from kvfold.cli.settings import NOTE, Command

BENCHMARKS: dict[str, Callable[..., None]] = {
    "attention": attention,
    "decode": decode,
    "prefill": prefill,
    "compress": compress,
    "replay": replay,
    "serve": serve,
    "throughput": throughput,
}

bench = Command(
    name="bench",
    help="Measure kernels beside the fastest known baselines, and servers under load.",
)
for place, (name, command) in enumerate(BENCHMARKS.items()):
    bench.command(command, name=name, sort_key=place, help_epilogue=NOTE)
