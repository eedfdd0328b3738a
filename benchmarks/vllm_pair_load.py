"""Requests a second that two GPUs answer in time under vLLM: one that prefills and one that
decodes, or two that do both.

    python benchmarks/vllm_pair_load.py bits-4 --rates 3,4 --json pair-load-bits-4.json

Requests come as a Poisson process, with prompts of --tokens tokens that share nothing and answers
of --output. pair: GPU 0 computes a prompt and its first token and stores the blocks in --shared;
once they are in files, GPU 1 restores them and decodes. apart: requests alternate between two GPUs.
With --connector nixl no file is written: GPU 1 copies the blocks from GPU 0's memory, by vLLM's
NixlConnector (a compressed cache: by KVFoldNixlConnector). It needs the package nixl.
A request is in time if its first token comes within --first seconds and the others within --token
milliseconds each, on average. `goodput`: those in time, by the seconds in which requests came.
Rates are run upwards, until some requests are not answered 40 seconds after those.

Engines of both arrangements start side by side, and share the GPUs' memory; one arrangement runs
at a time, while the other's engines wait.

KIND is as in vllm_speed.py. Weights are random. With --shape tiny it runs on a CPU.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_speed import WIDTHS, device, greedy, model_folder
from vllm_tiers import (
    DRY,
    REMOTE_DECODE,
    Node,
    Parameters,
    Report,
    nixl_of,
    nixl_versions,
    prompts_of,
    remote_parameters,
    started,
    transfer_of,
    transferring,
)

ROLES = {"pair": ("kv_producer", "kv_consumer"), "apart": (None, None)}
PATIENCE = 40.0  # seconds after the last request came, until a run is cut off
WARM_UP = 1.9, 4.0  # a rate and seconds, in which kernels are compiled; of other prompts
CONNECTORS = ("disk", "nixl")


def serve(
    pipe: Any, folder: Path, path: Path, options: argparse.Namespace, role: str | None
) -> None:
    """A node: answers (name, prompt, number of tokens, transfer parameters) that come through a
    pipe by lists of (name, tokens that are new, tokens of the prompt that were not computed,
    transfer parameters). A kv_producer says (name, 0, 0, parameters) when the other node can get
    the blocks of the prompt: all are in files, or NIXL has named them."""
    transfer, nixl = None, options.connector == "nixl"
    if role is not None:
        transfer = nixl_of(options, role) if nixl else transfer_of("pair", path, options, role)
    engine = Node(folder, options, transfer).engine
    worker: Any = get_kv_transfer_group().worker if transfer and not nixl else None
    unwritten = deque[tuple[str, int]]()  # names, and the bytes that are stored by then
    pipe.send(device())
    while True:
        busy = engine.has_unfinished_requests() or unwritten
        while pipe.poll(0 if busy else None):
            name, prompt, new, parameters = pipe.recv()
            wanted = transferring(greedy(new), parameters)
            engine.add_request(name, {"prompt_token_ids": prompt}, wanted)
            busy = True
        found = list[tuple[str, int, int, Parameters | None]]()
        for output in engine.step() if engine.has_unfinished_requests() else ():
            new, cached = len(output.outputs[0].token_ids), output.num_cached_tokens or 0
            found.append((output.request_id, new, cached, None))
            if role != "kv_producer" or not output.finished:
                continue
            if nixl:
                found.append((output.request_id, 0, 0, remote_parameters(output)))
            else:
                stored = worker.moved["stored_bytes"] + worker.queued_bytes
                unwritten.append((output.request_id, stored))
        while unwritten and (
            not worker.queued_bytes or worker.moved["stored_bytes"] >= unwritten[0][1]
        ):
            found.append((unwritten.popleft()[0], 0, 0, None))
        if found:
            pipe.send(found)
        elif unwritten:
            time.sleep(0.001)


@dataclass
class Asked:
    """A request: when it was due, its first and its last token, how many it has, and tokens of its
    prompt that the node did not compute that answers."""

    at: float
    prompt: list[int]
    first: float = inf
    last: float = inf
    tokens: int = 0
    cached: int = 0

    @property
    def ms_per_token(self) -> float:
        return (self.last - self.first) / (self.tokens - 1) * 1e3


class Load:
    """Requests that come at a rate, to two nodes."""

    def __init__(self, nodes: list[Any], paired: bool, options: argparse.Namespace) -> None:
        self.nodes, self.paired, self.options = nodes, paired, options
        nixl = paired and options.connector == "nixl"
        self.first_parameters = REMOTE_DECODE if nixl else None

    def run(self, rate: float, seconds: float) -> Report:
        options, rng = self.options, random.Random(rate)
        times, now = list[float](), rng.expovariate(rate)
        while now < seconds:
            times.append(now)
            now += rng.expovariate(rate)
        options.prompts = len(times)
        prompts = prompts_of(options, seed=int(rate * 1000))[1:]
        every = {f"{rate} {i}": Asked(*x) for i, x in enumerate(zip(times, prompts, strict=True))}
        due, open_names = deque(every), set(every)
        begin = time.perf_counter()
        while open_names and (now := time.perf_counter() - begin) < seconds + PATIENCE:
            while due and every[due[0]].at <= now:
                name = due.popleft()
                node = self.nodes[0 if self.paired else len(due) % 2]
                new = 1 if self.paired else options.output
                node.send((name, every[name].prompt, new, self.first_parameters))
            left = max(0.0, every[due[0]].at - now) if due else 1.0
            ready = wait(self.nodes, min(left, 1.0))
            now = time.perf_counter() - begin
            for number, node in enumerate(self.nodes):
                for event in node.recv() if node in ready else ():
                    self.heard(event, number == 0, every, now)
            open_names = {x for x in open_names if every[x].tokens < options.output}
        return self.row(rate, seconds, [*every.values()])

    def heard(
        self,
        event: tuple[str, int, int, Parameters | None],
        first_node: bool,
        every: dict[str, Asked],
        now: float,
    ) -> None:
        name, tokens, cached, parameters = event
        if name not in every:
            return  # of a run that was cut off
        request = every[name]
        request.first = min(request.first, now)
        if self.paired and first_node:
            if not tokens:
                self.nodes[1].send((name, request.prompt, self.options.output, parameters))
            return  # the second node gives the first token again
        request.tokens += tokens
        request.last, request.cached = now, cached

    def row(self, rate: float, seconds: float, requests: list[Asked]) -> Report:
        options = self.options
        done = [x for x in requests if x.tokens >= options.output]
        firsts = [x.first - x.at for x in requests if x.first < inf]
        each = [x.ms_per_token for x in done]
        in_time = sum(
            x.first - x.at <= options.first and x.ms_per_token <= options.token for x in done
        )
        return {
            "rate": rate,
            "requests": len(requests),
            "answered": len(done),
            "in_time": in_time,
            "goodput": in_time / seconds,
            "first_s": statistics.median(firsts) if firsts else None,
            "ms_per_token": statistics.median(each) if each else None,
            "cached_tokens": statistics.median(x.cached for x in done) if done else None,
        }


@contextmanager
def ready_nodes(
    folder: Path, options: argparse.Namespace
) -> Iterator[dict[str, tuple[Path, list[Any]]]]:
    """Context manager: for each arrangement, the folder of its blocks and the pipes of its two
    nodes, all of them ready."""
    with ExitStack() as stack:
        found = dict[str, tuple[Path, list[Any]]]()
        for arrangement in options.arrangements:
            files = tempfile.TemporaryDirectory(prefix="kvfold-pair-", dir=options.shared)
            path = Path(stack.enter_context(files))
            nodes = [
                stack.enter_context(started(gpu, folder, path, options, role, serve=serve))
                for gpu, role in enumerate(ROLES[arrangement])
            ]
            found[arrangement] = path, nodes
        try:
            for _, nodes in found.values():
                for node in nodes:
                    node.recv()
        except EOFError:
            raise SystemExit("vllm_pair_load: an engine's process died, see above") from None
        yield found


def drop_blocks(path: Path) -> None:
    """Free the memory of blocks that nobody will ask for again."""
    for file in path.rglob("*"):
        if file.is_file():
            file.unlink(missing_ok=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind")
    parser.add_argument("--arrangements", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--rates", type=lambda x: [*map(float, x.split(","))], default=[3.0, 4.0])
    parser.add_argument("--seconds", type=float, default=15, help="in which requests come")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--first", type=float, default=1.0, help="seconds to a first token")
    parser.add_argument("--token", type=float, default=25.0, help="milliseconds of further ones")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=WIDTHS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--slots", type=int, default=64, help="requests at once")
    parser.add_argument("--memory", type=float, default=0.42, help="share of a GPU's, an engine")
    parser.add_argument("--kv", type=float, default=40, help="gigabytes of each engine's cache")
    parser.add_argument("--queue", type=float, default=32, help="GiB that wait to be written")
    parser.add_argument("--shared", type=Path, default=Path("/dev/shm"), help="of files")
    parser.add_argument("--connector", choices=CONNECTORS, default=CONNECTORS[0])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if torch.cuda.device_count() < 2 and options.shape != DRY:
        raise SystemExit(f"vllm_pair_load needs two GPUs; without, try it with --shape {DRY}")
    settings = {name: str(x) if isinstance(x, Path) else x for name, x in vars(options).items()}
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "device": device()}
    if options.connector == "nixl":
        versions |= nixl_versions()
    report: Report = {"benchmark": "pair load", "settings": settings, "versions": versions}
    report["rows"] = []
    with (
        model_folder(options.kind, options.shape, options.layers) as folder,
        ready_nodes(folder, options) as ready,
    ):
        for arrangement, (path, nodes) in ready.items():
            load = Load(nodes, arrangement == "pair", options)
            load.run(*WARM_UP)
            for rate in options.rates:
                drop_blocks(path)
                row = {"arrangement": arrangement} | load.run(rate, options.seconds)
                report["rows"].append(row)
                print(json.dumps(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
                if row["answered"] < row["requests"]:
                    break  # the others would wait for what is left of it


if __name__ == "__main__":
    main()
