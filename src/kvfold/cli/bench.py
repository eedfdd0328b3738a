"""kvfold bench: benchmarks that users run on their machine, one per file."""

from collections.abc import Callable

from kvfold.cli.bench_agents import agents
from kvfold.cli.bench_attention import attention
from kvfold.cli.bench_decode import decode
from kvfold.cli.bench_serve import serve
from kvfold.cli.settings import NOTE, Command

BENCHMARKS: dict[str, Callable[..., None]] = {
    "attention": attention,
    "decode": decode,
    "serve": serve,
    "agents": agents,
}

bench = Command(
    name="bench",
    help="Time attention kernels, decode steps, or a server under load, on this machine.",
)
for place, (name, command) in enumerate(BENCHMARKS.items()):
    bench.command(command, name=name, sort_key=place, help_epilogue=NOTE)
