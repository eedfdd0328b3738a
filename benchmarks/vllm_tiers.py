"""The time to a first token of a long prompt under vLLM: computed, and restored from CPU memory,
from files, or from another GPU; and the bytes that move.

    python benchmarks/vllm_tiers.py bits-4 --json tiers-bits-4.json
    python benchmarks/vllm_tiers.py bits-4 --tiers pair --json pair-bits-4.json   # two GPUs

KIND is as in vllm_speed.py: bf16-full, fp8, bits-4, or a compressed variant such as swift-5.1x-odd.
Weights are random. Each tier has an engine of its own, with prefix caching:

gpu: a prompt that is new, and the same prompt again, whose blocks are still on the GPU.
cpu: the same, then again after the GPU's blocks were dropped: vLLM's OffloadingConnector restores
    them from CPU memory.
disk: the same with KVFoldDiskConnector and files in --folder. First from the disk: the files were
    written through and dropped from the system's page cache. Then from the page cache.
pair: GPU 0 computes the prompt and stores its blocks in --shared, a folder in memory; GPU 1
    restores them. `alone_ms`: a first token that GPU 1 computes alone; `computed_ms`: of GPU 0;
    `stored_ms`: until all blocks are in files; `restored_ms`: GPU 1's first token from then on;
    `total_ms`: the sum of the last two. A row for each prompt, the first with cold engines.
nixl: the same without files: GPU 1 copies the blocks from GPU 0's memory, by vLLM's NixlConnector
    (a compressed cache: by KVFoldNixlConnector). It needs the package nixl. `restored_ms` has the
    copy in it. With --gpus 0,0 both engines share a GPU, which shows that it works, not how fast.

Each time is the median of --prompts prompts, after one to warm up. The first tokens must be those
that the GPU's own prefix cache gives (`equal`): both compute the last tokens alone. A prompt that
is computed whole rounds otherwise (`equal_computed`). `bytes` is what moved for a prompt.

With --shape tiny, all but cpu run on a CPU, to try the script.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
import vllm
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvfold.bench.synthetic_engine import WIDTHS
from kvfold.maps.sidecar import Sidecar
from kvfold.vllm_plugin.connectors import DISK_CONNECTOR, NIXL_CONNECTOR
from vllm_speed import (
    MAPS,
    cache_options,
    capacity,
    device,
    greedy,
    model_folder,
)

TIERS = ("gpu", "cpu", "disk", "pair", "nixl")
PLAIN = ("bf16-full", "fp8")  # kinds of vLLM's own
# Parameters of a request to the node that prefills, with NIXL: another node will fetch its blocks.
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
NEW = 16  # tokens that are compared
DRY = "tiny"  # the shape that a CPU serves
Report = dict[str, Any]
Parameters = dict[str, Any]


@dataclass
class Answer:
    """Milliseconds to the first token, tokens, and tokens of the prompt that were not computed.
    parameters: with which another node fetches the blocks of the prompt by NIXL."""

    first_ms: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    parameters: Parameters | None = None


class Node:
    """One engine with one connector."""

    def __init__(self, folder: Path, options: argparse.Namespace, transfer: dict | None) -> None:
        if options.kind.startswith(MAPS):
            patch.object(Sidecar, "check_base", lambda *_: None).start()
        longest = options.tokens + 1024
        size: dict[str, Any] = {}
        if options.shape == DRY:
            size = {"num_gpu_blocks_override": 256, "enforce_eager": True}
        elif options.kv:
            size = {"kv_cache_memory_bytes": int(options.kv * 1e9)}
        self.llm = LLM(
            str(folder / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32" if options.shape == DRY else "bfloat16",
            max_model_len=longest,
            max_num_seqs=options.slots,
            max_num_batched_tokens=min(options.chunk, longest),
            gpu_memory_utilization=options.memory,
            enable_prefix_caching=True,
            seed=0,
            **cache_options(options.kind, folder / "maps"),
            **size,
            **({"kv_transfer_config": transfer} if transfer else {}),
        )
        self.engine, self.count = self.llm.llm_engine, 0

    def ask(
        self, prompt: list[int], new: int = NEW, parameters: Parameters | None = None
    ) -> Answer:
        """Answer a prompt, greedily. parameters: of a NIXL connector."""
        self.count += 1
        answer, begin = Answer(), time.perf_counter()
        wanted = transferring(greedy(new), parameters)
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, wanted)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens = [x for part in output.outputs for x in part.token_ids]
                if tokens and not answer.tokens:
                    answer.first_ms = (time.perf_counter() - begin) * 1e3
                    answer.cached = output.num_cached_tokens or 0
                answer.tokens += tokens
                if output.finished:
                    answer.parameters = remote_parameters(output)
        return answer

    def wait_until_stored(self, tier: str) -> None:
        """Let the connector finish what it stores."""
        if tier == "cpu":  # vLLM's connector stores in later steps
            for _ in range(4):
                self.ask([5, 6, 7], 2)
                time.sleep(0.25)
        elif tier != "gpu":
            worker = get_kv_transfer_group().worker
            while worker.queued_bytes:
                time.sleep(0.001)

    def drop_prefixes(self) -> None:
        """Forget the blocks on the GPU."""
        deadline = time.perf_counter() + 30
        while not self.llm.reset_prefix_cache():
            if time.perf_counter() > deadline:
                raise RuntimeError("blocks stay in use: the connector has not finished")
            self.ask([5, 6, 7], 2)

    def token_bytes(self) -> float:
        return capacity(self.llm)[1]


def transfer_of(
    tier: str, path: Path, options: argparse.Namespace, role: str = "kv_both"
) -> dict | None:
    """vLLM's setting of a tier's connector."""
    if tier == "gpu":
        return None
    name, extra = DISK_CONNECTOR, {"path": str(path), "queue_gib": options.queue}
    if tier == "cpu":
        name, extra = "OffloadingConnector", {"cpu_bytes_to_use": int(options.host * 2**30)}
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


def nixl_of(options: argparse.Namespace, role: str) -> Parameters:
    """vLLM's setting of a NIXL connector. Each node answers handshakes at a port of its own, below
    those that Linux gives to anybody."""
    port = 10000 + os.getppid() % 10000 * 2 + (role == "kv_consumer")
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    name = "NixlConnector" if options.kind in PLAIN else NIXL_CONNECTOR
    buffer = "cuda" if torch.cuda.is_available() else "cpu"
    return {"kv_connector": name, "kv_role": role, "kv_buffer_device": buffer}


def transferring(wanted: SamplingParams, parameters: Parameters | None) -> SamplingParams:
    """Ask for an answer with the parameters of a NIXL connector."""
    if parameters:
        wanted.extra_args = {"kv_transfer_params": parameters}
    return wanted


def remote_parameters(output: RequestOutput) -> Parameters | None:
    """What a node that prefilled a prompt tells the node that fetches its blocks by NIXL."""
    if parameters := output.kv_transfer_params:
        # vLLM 0.32 would report these tokens in place of those that the other node fetches.
        parameters.pop("remote_prefill_cached_tokens", None)
    return parameters or None


def nixl_versions() -> dict[str, str]:
    return {x.name: x.version for x in distributions() if "nixl" in (x.name or "")}


def prompts_of(options: argparse.Namespace, seed: int = 0) -> list[list[int]]:
    """--prompts prompts and one to warm up, which share nothing."""
    make = torch.Generator().manual_seed(seed)
    vocabulary = WIDTHS[options.shape][2]
    shape = options.prompts + 1, options.tokens
    return torch.randint(10, vocabulary - 10, shape, generator=make).tolist()


def drop_page_cache(path: Path) -> None:
    """Write files through, and drop them from the system's page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def row(name: str, answers: list[Answer], hits: list[Answer], computed: list[Answer]) -> Report:
    """A row of the report. hits: of the same prompts from the GPU's own prefix cache; computed: of
    prompts that were new."""
    return {
        "from": name,
        "first_ms": statistics.median(x.first_ms for x in answers),
        "first_ms_each": [x.first_ms for x in answers],
        "cached_tokens": [x.cached for x in answers],
        "equal": [x.tokens == y.tokens for x, y in zip(answers, hits, strict=True)],
        "equal_computed": [x.tokens == y.tokens for x, y in zip(answers, computed, strict=True)],
    }


def measure_tier(tier: str, folder: Path, path: Path, options: argparse.Namespace) -> Report:
    """Rows of one tier on one GPU."""
    node = Node(folder, options, transfer_of(tier, path, options))
    prompts = prompts_of(options)
    computed, hits = [], []
    for prompt in prompts:
        computed.append(node.ask(prompt))
        hits.append(node.ask(prompt))
        node.wait_until_stored(tier)
    answers = {"computed": computed, "gpu": hits}

    def restored() -> list[Answer]:
        gathered = []
        for prompt in prompts:
            node.drop_prefixes()
            gathered.append(node.ask(prompt))
        return gathered

    if tier == "disk":
        drop_page_cache(path)
        answers |= {"disk": restored(), "page cache": restored()}
    elif tier == "cpu":
        answers |= {"cpu": restored()}
    rows = [row(name, x[1:], hits[1:], computed[1:]) for name, x in answers.items()]
    report: Report = {"rows": rows, "token_bytes": node.token_bytes(), "device": device()}
    if tier == "disk":
        moved = dict(get_kv_transfer_group().worker.moved)
        report |= {"moved": moved, "bytes": moved["loaded_bytes"] / 2 / len(prompts)}
    elif tier == "cpu":
        report |= {
            "bytes": statistics.median(x.cached for x in answers["cpu"]) * report["token_bytes"]
        }
    return report


def serve_node(pipe: Any, folder: Path, path: Path, options: argparse.Namespace, role: str) -> None:
    """A node of a pair: answers (prompt, number of tokens) that come through a pipe."""
    node = Node(folder, options, transfer_of("pair", path, options, role))
    pipe.send({"device": device(), "token_bytes": node.token_bytes()})
    while True:
        answer = node.ask(*pipe.recv())
        node.wait_until_stored("pair")
        pipe.send((answer, dict(get_kv_transfer_group().worker.moved)))


def serve_nixl(pipe: Any, folder: Path, path: Path, options: argparse.Namespace, role: str) -> None:
    """A node of a pair without files: answers (prompt, number of tokens, parameters)."""
    node = Node(folder, options, nixl_of(options, role))
    pipe.send({"device": device(), "token_bytes": node.token_bytes()})
    while True:
        pipe.send(node.ask(*pipe.recv()))


@contextmanager
def started(gpu: int, *args: Any, serve: Callable[..., None] = serve_node) -> Iterator[Any]:
    """Context manager: the pipe to a node in a process of its own, which sees one GPU."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *args))
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": str(gpu)}):
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def measure_pair(folder: Path, path: Path, options: argparse.Namespace) -> Report:
    """Prefill on GPU 0, decode on GPU 1."""

    def call(node: Any, prompt: list[int], new: int = NEW) -> tuple[Answer, Counter[str], float]:
        begin = time.perf_counter()
        node.send((prompt, new))
        answer, moved = node.recv()
        return answer, Counter(moved), (time.perf_counter() - begin) * 1e3

    with (
        started(0, folder, path, options, "kv_producer") as prefill,
        started(1, folder, path, options, "kv_consumer") as decode,
    ):
        about = [node.recv() for node in (prefill, decode)]
        rows, before = [], Counter[str]()
        others = prompts_of(options, seed=1)
        for number, (prompt, other) in enumerate(zip(prompts_of(options), others, strict=True)):
            alone, _, _ = call(decode, other)
            computed, stored, stored_ms = call(prefill, prompt, 1)
            restored, loaded, _ = call(decode, prompt)
            hit, _, _ = call(prefill, prompt)
            moved = Counter(stored=stored["stored_bytes"], loaded=loaded["loaded_bytes"])
            rows.append(
                {
                    "warm_up": number == 0,
                    "alone_ms": alone.first_ms,
                    "computed_ms": computed.first_ms,
                    "stored_ms": stored_ms,
                    "restored_ms": restored.first_ms,
                    "total_ms": stored_ms + restored.first_ms,
                    "cached_tokens": restored.cached,
                    "stored_bytes": moved["stored"] - before["stored"],
                    "loaded_bytes": moved["loaded"] - before["loaded"],
                    "equal": restored.tokens == hit.tokens,
                }
            )
            before = moved
    return {"rows": rows, "devices": [x["device"] for x in about]} | about[0]


def measure_nixl(folder: Path, path: Path, options: argparse.Namespace) -> Report:
    """Prefill on one GPU, decode on the other, which copies blocks from the first one's memory."""

    def call(
        node: Any, prompt: list[int], new: int = NEW, parameters: Parameters | None = None
    ) -> Answer:
        node.send((prompt, new, parameters))
        answer: Answer = node.recv()
        return answer

    first_gpu, second_gpu = options.gpus
    with started(first_gpu, folder, path, options, "kv_producer", serve=serve_nixl) as prefill:
        if first_gpu == second_gpu:
            prefill.poll(None)  # one engine after the other measures its memory
        with started(second_gpu, folder, path, options, "kv_consumer", serve=serve_nixl) as decode:
            about = prefill.recv()
            devices, rows = [about["device"], decode.recv()["device"]], []
            others = prompts_of(options, seed=1)
            for number, (prompt, other) in enumerate(zip(prompts_of(options), others, strict=True)):
                alone = call(decode, other)
                computed = call(prefill, prompt, 1, REMOTE_DECODE)
                restored = call(decode, prompt, NEW, computed.parameters)
                hit = call(prefill, prompt)
                rows.append(
                    {
                        "warm_up": number == 0,
                        "alone_ms": alone.first_ms,
                        "computed_ms": computed.first_ms,
                        "restored_ms": restored.first_ms,
                        "total_ms": computed.first_ms + restored.first_ms,
                        "cached_tokens": restored.cached,
                        "bytes": restored.cached * about["token_bytes"],
                        "equal": restored.tokens == hit.tokens,
                    }
                )
    return about | {"rows": rows, "devices": devices, "nixl": nixl_versions()}


PAIRS = {"pair": measure_pair, "nixl": measure_nixl}


def in_process(call: Callable[..., Report], *args: Any) -> Report:
    """What a call returns, made in a process of its own, whose GPU memory goes with it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, call, *args))
    process.start()
    theirs.close()
    try:
        report: Report = ours.recv()
    except EOFError:
        raise SystemExit("vllm_tiers: the engine's process died, see above") from None
    process.join()
    return report


def _send(pipe: Any, call: Callable[..., Report], *args: Any) -> None:
    pipe.send(call(*args))
    os._exit(0)  # vLLM's engine takes its time to end


def check(options: argparse.Namespace) -> None:
    """End the program with a message if the tiers cannot be measured on this machine."""
    gpus = torch.cuda.device_count()
    if not gpus and options.shape != DRY:
        raise SystemExit(f"vllm_tiers needs a GPU; without one, try it with --shape {DRY}")
    if not gpus and "cpu" in options.tiers:
        raise SystemExit("vllm_tiers: vLLM restores blocks from CPU memory to a GPU only; there is"
                         " none here: leave cpu out of --tiers")  # fmt: skip
    if gpus == 1 and "pair" in options.tiers:
        raise SystemExit("vllm_tiers: tier pair needs two GPUs; there is one: leave it out")
    if gpus and "nixl" in options.tiers and max(options.gpus) >= gpus:
        raise SystemExit(f"vllm_tiers: --gpus {options.gpus}: there are {gpus}, from 0 on")


def tiers(text: str) -> list[str]:
    """gpu,disk as a list. Raises argparse.ArgumentTypeError."""
    names = text.split(",")
    if unknown := [x for x in names if x not in TIERS]:
        raise argparse.ArgumentTypeError(f"no tier {unknown[0]!r}; take of {','.join(TIERS)}")
    return names


def two_numbers(text: str) -> list[int]:
    """0,1 as a list. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch(r"\d+,\d+", text):
        raise argparse.ArgumentTypeError(f"two GPUs are two numbers, such as 0,1; got {text!r}")
    return [int(x) for x in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind")
    parser.add_argument("--tiers", type=tiers, default=["gpu", "cpu", "disk"], help="gpu,cpu,..")
    parser.add_argument("--limit", type=float, default=540, help="seconds of the whole run")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=WIDTHS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=32768, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--slots", type=int, default=4, help="requests at once")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's")
    parser.add_argument("--kv", type=float, help="gigabytes of cache; by default the rest of it")
    parser.add_argument("--host", type=float, default=24, help="GiB of CPU memory for blocks")
    parser.add_argument("--queue", type=float, default=16, help="GiB that wait to be written")
    parser.add_argument("--folder", type=Path, help="of files (default: a temporary folder)")
    parser.add_argument("--shared", type=Path, default=Path("/dev/shm"), help="of a pair's files")
    parser.add_argument("--gpus", type=two_numbers, default=[0, 1], help="of tier nixl: 0,1")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    check(options)
    begin = time.perf_counter()
    settings = {name: str(x) if isinstance(x, Path) else x for name, x in vars(options).items()}
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    report: Report = {"benchmark": "tiers", "settings": settings, "versions": versions, "tiers": {}}
    with model_folder(options.kind, options.shape, options.layers) as folder:
        for tier in options.tiers:
            if time.perf_counter() - begin > options.limit:
                report.setdefault("left_out", []).append(tier)
                continue
            parent = options.shared if tier in PAIRS else options.folder
            with tempfile.TemporaryDirectory(prefix="kvfold-tiers-", dir=parent) as path:
                if tier in PAIRS:
                    measured = PAIRS[tier](folder, Path(path), options)
                else:
                    measured = in_process(measure_tier, tier, folder, Path(path), options)
            report["tiers"][tier] = measured
            print(json.dumps({tier: measured}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
