"""Job completion time, time to the first token and time between tokens of ZACK, ZDC and what they
are combined with, through `kvfold serve`, beside the uncompressed model and the methods alone.

    python benchmarks/serving_composites.py --json serving-composites-8b.json

Weights are random. What a token stores is what the method stores at the share of the quality tables
(rows of these names in papers-gqa.json and papers-smollm2.json), by the settings of `kvfold compare
--methods`. All methods have a pool of as many bytes, half of what --requests take uncompressed. A
server is a process of its own (lab/composites.py); some get ready side by side, and are measured
one after another by the client of `kvfold bench serve`:

    together  --requests prompts at once; times count from then, so waiting for memory counts
    alone     three requests, one after another

Rows are written as they come, and those already in the file are kept: a run that --seconds ended is
continued by the same command.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from kvfold.bench.serve_load import Goals, Traffic
from kvfold.bench.server_process import ServerProcess, free_ports
from kvfold.cli.bench_common import RANDOM, Results, say
from kvfold.cli.bench_engine import EngineFlags, Target
from kvfold.cli.bench_serve import ClientFlags, LoadTest
from kvfold.cli.methods import written
from kvfold.cli.options import Place
from kvfold.cli.serve import EngineSize
from lab import composites
from lab.composites import METHODS, method_of, word

LOADS = "together", "alone"
COMPARED = "shape", "requests", "input", "output", "kv_bytes"  # settings that decide figures
# Methods that are decoded in plain PyTorch are warmed up by so few requests; the others by as many
# as are measured, as kernels are compiled for what comes together.
IN_PYTORCH = "Keyformer", "GEAR", "KVQuant"
WARM = 2
MOST = 45.0  # seconds of a load
SAMPLED = 0.1  # seconds between samples of a server's state
SERVER = 38e9  # bytes of a GPU for each server: weights, pool, and attention in plain PyTorch
SAID = ("pool", "fits", "bits", "in pages", "tokens kept", "layers with kernels")  # by the server
STATES = "kvfold:pool_bytes", "vllm:num_requests_running", "vllm:num_preemptions_total"


class Script:
    """Measures methods, and writes what it has measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        from kvfold.bench.synthetic_engine import WIDTHS
        from kvfold.cli.bench_common import versions

        self.options, self.end = options, time.monotonic() + options.seconds
        settings = {**vars(options), "json": options.json.name}
        about = settings, versions(options.device)
        self.results = Results(options.json, "serving composites", *about, ("rows", "failed"))
        self.rows: list[dict[str, Any]] = self.results.by_kind["rows"]
        if options.json.exists():
            self.go_on(json.loads(options.json.read_text(encoding="utf-8")))
        rng, size = random.Random(0), WIDTHS[options.shape][-1]
        self.text = " ".join(word(rng.randrange(size)) for _ in range(20_000))

    def go_on(self, known: dict[str, Any]) -> None:
        """Keep the rows of an earlier run. Raises SystemExit if they are of other settings."""
        for kind, names in (("settings", COMPARED), ("versions", ("device", "torch"))):
            for name in names:
                old, new = known[kind][name], self.results.metadata[kind][name]
                if old != new:
                    raise SystemExit(
                        f"{self.options.json} has rows of {name} {old}, and this is {new}: give"
                        " another --json"
                    )
        self.rows += known["rows"]

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def missing(self, name: str) -> list[str]:
        """The loads that a method was not measured with yet."""
        done = {x["load"] for x in self.rows if x["method"] == name}
        return [load for load in LOADS if load not in done]

    def run(self) -> None:
        names = [x for x in self.options.methods or METHODS if self.missing(x)]
        for first in range(0, len(names), self.options.together):
            beside = names[first : first + self.options.together]
            if self.left > 0:
                self.measure_all(beside)
            else:
                self.fail(", ".join(beside), "no time was left")

    def measure_all(self, names: Sequence[str]) -> None:
        """Start servers side by side, measure one after the other, and stop them."""
        servers: dict[str, ServerProcess] = {}
        try:
            for name, port in zip(names, free_ports(len(names)), strict=True):
                servers[name] = self.start(name, port)
            for name in [name for name in names if self.is_ready(name, servers[name])]:
                for load in self.missing(name):
                    self.measure(name, load, servers[name])
                servers[name].stop()
        finally:
            for server in servers.values():
                server.stop()
                server.log.unlink(missing_ok=True)

    def start(self, name: str, port: int) -> ServerProcess:
        options = self.options
        flags = EngineFlags(
            engine="kvfold",
            size=EngineSize(
                max_sequences=options.requests,
                max_tokens=options.input + options.output,
                no_prefix_caching=True,
            ),
            storage=replace(method_of(name)[1], kv_bytes=options.kv_bytes),
            place=Place(device=options.device),
        )
        words = flags.words(f"{RANDOM}{options.shape}", port)[3:]
        server = [sys.executable, composites.__file__, name, options.shape, options.device]
        return ServerProcess([*server, *words], f"http://127.0.0.1:{port}", {})

    def is_ready(self, name: str, server: ServerProcess) -> bool:
        try:
            server.wait_until_ready(max(0.0, self.left))
        except ValueError as error:
            self.fail(name, str(error))
            return False
        say(f"{name} is ready, {self.left:.0f} s are left")
        return True

    def measure(self, name: str, load: str, server: ServerProcess) -> None:
        options, alone, seconds = self.options, load == "alone", min(MOST, self.left)
        if seconds <= 1:
            self.fail(name, f"{load}: no time was left")
            return
        traffic = Traffic(
            requests=1 if alone else options.requests,
            questions=3 if alone else 1,
            input_tokens=options.input,
            output_tokens=options.output,
        )
        warm = 0 if alone else WARM if name.startswith(IN_PYTORCH) else options.requests
        client = ClientFlags(warmup=warm, seconds=seconds)
        target = Target(server.url, server)
        test = LoadTest(target, None, client, traffic, Goals(), [inf], self.text)
        report = Results(None, "serve", {"label": None}, {}, ("rows", "answers"))
        peaks: dict[str, float] = {}
        try:
            asyncio.run(target.during(watched(server.url, peaks, test.measure(report))))
        except (ValueError, OSError) as error:
            self.fail(name, f"{load}: {error}")
            return
        (row,) = report.by_kind["rows"]
        if row["completed"] < row["requests"] and seconds < MOST:
            self.fail(name, f"{load}: not done in the {seconds:.0f} s that were left")
            return
        about = {"method": name, "settings": written(name), "load": load}
        row = about | row | {"peaks": peaks, "server": said(server)}
        self.results.add("rows", row)
        times = [f"{x} {row[x]['mean']:.1f}" for x in ("ttft_ms", "tbt_ms", "jct_ms") if row[x]]
        print(name, load, *times, f"{row['completed']}/{row['requests']}", flush=True)

    def fail(self, name: str, why: str) -> None:
        print(f"{name}: {why}", flush=True)
        self.results.add("failed", {"method": name, "why": why})


async def watched(url: str, peaks: dict[str, float], work: Any) -> None:
    """Do `work`, and sample the largest values of the server's state meanwhile."""
    import aiohttp

    async def watch() -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/metrics") as answer:
                    for key, value in states(await answer.text()):
                        peaks[key] = max(peaks.get(key, 0.0), value)
                await asyncio.sleep(SAMPLED)

    watching = asyncio.ensure_future(watch())
    try:
        await work
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def states(text: str) -> Iterator[tuple[str, float]]:
    """Bytes of used pages, running requests and pre-emptions so far, of /metrics."""
    for line in text.splitlines():
        key, _, value = line.rpartition(" ")
        name = key.partition("{")[0]
        if name in STATES and ("state=" not in key or 'state="used"' in key):
            yield name.partition(":")[2], float(value)


def said(server: ServerProcess) -> dict[str, str]:
    """What the server says about its cache at its start."""
    lines = server.log.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = (line.partition(": ") for line in lines)
    return {name: value for name, _, value in pairs if name in SAID}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = partial(parser.add_argument, help="default: %(default)s")
    add("--json", type=Path, default=Path("serving-composites-8b.json"))
    add("--methods", nargs="+", choices=METHODS, help="by default all", metavar="METHOD")
    add("--shape", default="llama-3.1-8b")
    add("--device", default="cuda")
    add("--requests", type=int, default=12)
    add("--input", type=int, default=2048)
    add("--output", type=int, default=64)
    add("--kv-bytes", type=int, default=1_700_000_000)
    add("--seconds", type=float, default=460.0, help="most of the whole run")
    add("--together", type=int, help="servers that get ready side by side; by default as fit")
    options = parser.parse_args(arguments)
    if options.together is None:
        import torch

        cuda = options.device.startswith("cuda")
        size = torch.cuda.get_device_properties(options.device).total_memory if cuda else 0
        options.together = max(1, int(size / SERVER))
    Script(options).run()


if __name__ == "__main__":
    main()
