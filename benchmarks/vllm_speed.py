"""Milliseconds of vLLM's steps, the first token and what its cache holds, for a model of random
weights: as it is, or with kvfold's plugin.

    python benchmarks/vllm_speed.py swift-5x --batch 1,8,64 --json speed.json

KIND is bf16-full or fp8 (vLLM by itself), bits-8 or bits-4 (the plugin on an unchanged model), a
compressed variant of `kvfold bench decode` as a folded checkpoint, or maps- and such a variant:
maps beside the weights. A step is timed where the engine returns one new token of every request,
from the ninth on, with the engine's asynchronous scheduling; a first token from the request on,
prefix caching off, the median of three after two to warm up.

    python benchmarks/vllm_speed.py swift-5x --batch 8 --users 8,16,40 --pool 5.5

--users: requests a second and their latency, where so many users each ask again as soon as they are
answered: prompts of a quarter to three of --tokens, answers of 128 to 384. --rates: the same of
requests that come as a Poisson process, with the lengths of --trace, up to the first rate that
takes more than --bound. --together: answered tokens a second of so many requests at once, prompts
of --tokens and answers of 1024, and how often one is pre-empted, to be computed again. --pool:
gigabytes of cache that they share, as on a smaller card (24 GB less a tenth and the weights leave
5.5): blocks beyond it are held back.
--filled: steps over caches that are taken for read, their bytes random: no prompt is read, as in
`kvfold bench decode`. --profile: microseconds of every kernel, of a step and of a first token.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
import vllm
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from kvfold.bench.serve_load import TimedRequest, Traffic
from kvfold.bench.synthetic_engine import WIDTHS
from kvfold.bench.variants import ROPE_BASES, SHAPES, variant_layout
from kvfold.hub.checkpoint import KVFoldConfig
from kvfold.layout import Latent
from kvfold.maps.compress import layer_maps
from kvfold.maps.rotation import Rotation
from kvfold.maps.sidecar import PROBES, Sidecar
from kvfold.models.families import family_of
from kvfold.models.fold import LatentMaps
from lab.variants import VARIANTS

Say = Callable[[str, dict], None]  # of a row of a table, by the table's name
MAPS = "maps-"
WARM = 8  # steps
ANSWERS = 128, 384  # tokens, drawn evenly
LONG = 1024  # tokens of an answer of --together
NAMED = 24  # kernels of a profile, by time


def write_config(folder: Path, shape: str, kind: str, layers: int | None) -> LlamaConfig:
    width, mlp, vocabulary = WIDTHS[shape]
    geometry = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        num_hidden_layers=layers or geometry.num_layers,
        num_attention_heads=geometry.num_query_heads,
        num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASES[shape]},
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    if kind in VARIANTS and not VARIANTS[kind].whole:
        spec = variant_layout(geometry, VARIANTS[kind], layers).spec
        spec = replace(spec, geometry=family_of(config).geometry(config))
        config.quantization_config = KVFoldConfig(cache=spec.to_dict())
    config.save_pretrained(folder)
    return config


def write_maps(folder: Path, kind: str, config: LlamaConfig) -> None:
    """Of random numbers, with a fingerprint that fits nothing."""
    geometry = family_of(config).geometry(config)
    layout = variant_layout(geometry, VARIANTS[kind.removeprefix(MAPS)], config.num_hidden_layers)
    make, maps = torch.Generator().manual_seed(0), {}
    rope: Any = config.rope_parameters
    angles = rope["rope_theta"] ** -torch.arange(0, 1, 2 / geometry.head_dim)
    rotation = Rotation(angles, torch.arange(geometry.head_dim))
    for index, layer in enumerate(layout.spec.layers):
        own = [_random_maps(x, geometry.head_dim, make) for x in layer.latents]
        maps[f"model.layers.{index}.self_attn"] = layer_maps(layer, own, rotation)
    base = {name: [0.0] * 2 * PROBES for name in maps}
    made = Sidecar(maps=maps, spec=layout.spec, base=base, provenance={"recipe": {"name": kind}})
    made.save(folder)
    patch.object(Sidecar, "check_base", lambda *_: None).start()


def _random_maps(latent: Latent, head_dim: int, make: torch.Generator) -> LatentMaps:
    wide = len(latent.heads) * len(latent.side) * head_dim
    down = torch.randn(wide, latent.rank, generator=make) * wide**-0.5
    return LatentMaps(down, down.clone(), torch.zeros(wide))


def cache_options(kind: str, maps: Path, window: int = 0) -> dict[str, Any]:
    """Arguments of vLLM's engine for a cache of this KIND. window: exact tokens."""
    options: dict[str, Any] = {}
    if kind.startswith("bits-"):
        options["additional_config"] = {"kvfold": {"bits": int(kind.removeprefix("bits-"))}}
    elif kind == "fp8":
        options["kv_cache_dtype"] = "fp8"
    elif kind != "bf16-full":
        options["block_size"] = VARIANTS[kind.removeprefix(MAPS)].page
    if kind.startswith(MAPS):
        options["additional_config"] = {"kvfold": {"maps": str(maps)}}
    if window:
        options["additional_config"]["kvfold"]["window"] = window
    return options


def engine(folder: Path, given: argparse.Namespace, maps: Path) -> LLM:
    most = max(given.batch + given.users + given.together + [given.slots])
    sizes = {*given.batch, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)}
    options = cache_options(given.kind, maps, given.window)
    options["compilation_config"] = {"cudagraph_capture_sizes": sorted(sizes)}
    if given.apart:
        from kvfold.vllm_plugin.layer import FoldedLayer

        patch.object(FoldedLayer, "merge", lambda layer: None).start()
    if given.kv is not None:
        options["kv_cache_memory_bytes"] = int(given.kv * 1e9)
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=given.tokens + 1024,
        max_num_seqs=most,
        max_num_batched_tokens=given.chunk,
        gpu_memory_utilization=given.memory,
        enable_prefix_caching=False,
        tensor_parallel_size=given.tensor_parallel,
        **options,
    )


def greedy(new: int) -> SamplingParams:
    """So many tokens, each reported in its step."""
    return SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip


class Clock:
    """An engine's steps, one at a time."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine, self.rng, self.asked = llm, llm.llm_engine, random.Random(0), 0
        self.vocabulary = llm.model_config.get_vocab_size()

    def prompt(self, tokens: int) -> list[int]:
        return self.rng.choices(range(3, self.vocabulary - 3), k=tokens)

    def ask(self, tokens: int, new: int) -> str:
        return self.send(self.prompt(tokens), new)

    def send(self, prompt: list[int], new: int) -> str:
        self.asked += 1
        self.engine.add_request(str(self.asked), {"prompt_token_ids": prompt}, greedy(new))
        return str(self.asked)

    def step(self) -> dict[str, int]:
        """New tokens by request."""
        return {x.request_id: len(x.outputs[0].token_ids) for x in self.engine.step() if x.outputs}

    def first_token(self, tokens: int) -> float:
        """Milliseconds."""
        start = time.perf_counter()
        name = self.ask(tokens, 1)
        while not self.step().get(name):
            pass
        found = (time.perf_counter() - start) * 1e3
        self._drain([])
        return found

    @contextmanager
    def running(self, batch: int, tokens: int, filled: bool) -> Iterator[None]:
        """Requests that all decode."""
        with as_read(self.llm) if filled else nullcontext():
            names = [self.ask(tokens, 1000) for _ in range(batch)]
            started: set[str] = set()
            while len(started) < batch:
                started |= {name for name, new in self.step().items() if new}
        yield
        self._drain(names)

    def steps(self, batch: int, tokens: int, count: int, filled: bool = False) -> list[float]:
        """Milliseconds of each."""
        found: list[float] = []
        last, alike = None, 0
        with self.running(batch, tokens, filled):
            while len(found) < count:
                new, now = self.step(), time.perf_counter()
                if not new:
                    continue  # the engine only put a step into its queue
                alike = alike + 1 if len(new) == batch and set(new.values()) == {1} else 0
                if last is not None and alike > WARM:
                    found.append((now - last) * 1e3)
                last = now
        return found

    def kernels(self, batch: int, tokens: int, count: int, filled: bool) -> dict:
        """Microseconds a step of the longest kernels, and of all; batch 0: of a first token."""
        activity, key = ProfilerActivity.CUDA, "self_device_time_total"
        if not torch.cuda.is_available():
            activity, key = ProfilerActivity.CPU, "self_cpu_time_total"
        with self.running(batch, tokens, filled) if batch else nullcontext():
            if batch:
                for _ in range(WARM):
                    self.step()
            with profile(activities=[activity]) as seen:
                for _ in range(count):
                    if batch:
                        self.step()
                    else:
                        self.first_token(tokens)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        each = sorted(seen.key_averages(), key=lambda x: -getattr(x, key))
        lines = [(x.key[:70], getattr(x, key) / count, x.count / count) for x in each[:NAMED]]
        return {"us": sum(getattr(x, key) for x in each) / count, "kernels": lines}

    def load(self, users: int, tokens: int, seconds: float) -> dict:
        """What users see who ask again when they are answered, over so many seconds after half as
        many to warm up: a row. tokens: of which prompts have a quarter to three."""
        self.rng.seed(users)
        asked: dict[str, float] = {}
        first: dict[str, float] = {}
        left: dict[str, int] = {}
        made, firsts, wholes = 0, [], []
        start = time.perf_counter() + seconds / 2
        while (now := time.perf_counter()) < start + seconds:
            while len(asked) < users:
                prompt = self.rng.randint(tokens // 4, tokens * 3 // 4)
                answer = self.rng.randint(*ANSWERS)
                name = self.ask(prompt, answer)
                asked[name], left[name] = now, answer
            for name, new in self.step().items():
                now = time.perf_counter()
                first.setdefault(name, now)
                left[name] -= new
                made += new * (now > start)
                if not left[name]:
                    begun = asked.pop(name)
                    if now > start:
                        firsts.append(first[name] - begun)
                        wholes.append(now - begun)
        self._drain([*asked])
        rate = made / (now - start)
        return {
            "users": users,
            "answered": len(wholes),
            "tokens_per_s": rate,
            "requests_per_s": rate / statistics.fmean(ANSWERS),  # few end in so short a time
            "first_s": statistics.median(firsts) if firsts else None,
            "whole_s": statistics.median(wholes) if wholes else None,
        }

    def crowd(self, jobs: list[TimedRequest], limit: float) -> dict:
        """What requests see that come at their times, however many wait, within `limit` seconds: a
        row."""
        due = deque((job, self.prompt(job.prompt)) for job in jobs)
        asked: dict[str, TimedRequest] = {}
        left: dict[str, int] = {}
        first, whole, most = [], [], 0
        begun = time.perf_counter()
        while (due or left) and (now := time.perf_counter() - begun) < limit:
            while due and due[0][0].at <= now:
                job, prompt = due.popleft()
                name = self.send(prompt, job.output)
                asked[name], left[name] = job, job.output
            if not left:
                time.sleep(due[0][0].at - now)
                continue
            for name, new in self.step().items():
                now, job = time.perf_counter() - begun, asked[name]
                if left[name] == job.output:
                    first.append(now - job.at)
                left[name] -= new
                if not left[name]:
                    del left[name]
                    whole.append((now - job.at) / job.output)
            most = max(most, len(scheduler(self.llm).running))
        seconds = time.perf_counter() - begun
        self._drain([*left])
        return {
            "requests": len(jobs),
            "answered": len(whole),
            "seconds": seconds,
            "requests_per_s": len(whole) / seconds,
            "ms_per_token": statistics.fmean(whole) * 1e3 if whole else None,
            "first_s": statistics.median(first) if first else None,
            "most_together": most,
        }

    def _drain(self, names: list[str]) -> None:
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


class AsRead:
    """Stands where a scheduler asks for caches elsewhere: all of a prompt is there already, but for
    its last token."""

    def get_num_new_matched_tokens(self, request: Any, known: int) -> tuple[int, bool]:
        return request.num_tokens - 1 - known, False

    def request_finished(self, request: Any, blocks: Any) -> tuple[bool, None]:
        return False, None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def as_read(llm: LLM) -> Iterator[None]:
    """Prompts need not be read: what the cache has is taken for theirs."""
    scheduler(llm).connector = AsRead()
    yield
    scheduler(llm).connector = None


@torch.inference_mode()
def scribble(worker: Any) -> None:
    """Any bytes whose halves are small numbers, as codes, scales or numbers."""
    storages = {x.data_ptr(): x.untyped_storage() for x in worker.model_runner.kv_caches}
    for storage in {x.data_ptr(): x for x in storages.values()}.values():
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        flat.random_(0, 64)


@contextmanager
def pool_of(llm: LLM, size: float) -> Iterator[None]:
    """The cache has `size` bytes, or all of it where that is less."""
    pool, (tokens, each) = scheduler(llm).kv_cache_manager.block_pool, capacity(llm)
    kept = int(size / each / (tokens / pool.num_gpu_blocks))
    held = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - kept))
    yield
    pool.free_blocks(held)


def capacity(llm: LLM) -> tuple[int, float]:
    """Tokens that fit, and bytes of one."""
    found = scheduler(llm).kv_cache_config
    tokens = found.num_blocks * found.kv_cache_groups[0].kv_cache_spec.block_size
    return tokens, sum(x.size for x in found.kv_cache_tensors) / tokens


@contextmanager
def model_folder(kind: str, shape: str, layers: int | None) -> Iterator[Path]:
    """Context manager: a folder with `model`, and `maps` if the KIND has some; the same for every
    run, as vLLM keeps what it compiles by the model's folder."""
    folder = Path(tempfile.gettempdir()) / f"kvfold-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        config = write_config(folder / "model", shape, kind, layers)
        if kind.startswith(MAPS):
            write_maps(folder / "maps", kind, config)
        yield folder
    finally:
        shutil.rmtree(folder)


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def measure(given: argparse.Namespace, say: Say) -> None:
    begun = time.perf_counter()
    with model_folder(given.kind, given.shape, given.layers) as folder:
        maps = folder / "maps"
        sidecar = sum(x.stat().st_size for x in maps.glob("*"))
        llm = engine(folder / "model", given, maps)
    fit, each = capacity(llm)
    start = time.perf_counter() - begun
    about = {"tokens": fit, "token_bytes": each, "start_s": start, "maps_bytes": sidecar}
    say("capacity", {"variant": given.kind} | about)
    clock = Clock(llm)
    clock.first_token(given.tokens)  # compiles
    if given.rates:
        clock.crowd(traffic(given, given.rates[0]).timed(given.rates[0]), 60)
    if given.ready:
        given.ready.touch()
        while given.ready.exists():
            time.sleep(0.05)
    if given.filled:
        llm.collective_rpc(scribble)
    time_steps(clock, given, say)
    time_firsts(clock, given, say)
    time_loads(llm, clock, given, say)
    time_rates(llm, clock, given, say)
    time_together(llm, clock, given, say)
    for batch in given.profile:
        found = clock.kernels(batch, given.tokens, 8 if batch else 2, given.filled)
        say("profiles", {"variant": given.kind, "batch": batch, "tokens": given.tokens} | found)


def time_steps(clock: Clock, given: argparse.Namespace, say: Say) -> None:
    _, each = capacity(clock.llm)
    for batch in given.batch:
        steps = clock.steps(batch, given.tokens, given.steps, given.filled)
        cases = {"variant": given.kind, "batch": batch, "tokens": given.tokens}
        times = {"ms": statistics.median(steps), "ms_mean": statistics.fmean(steps)}
        say("rows", cases | times | {"cache_bytes": each * batch * given.tokens})


def time_firsts(clock: Clock, given: argparse.Namespace, say: Say) -> None:
    first = statistics.median([clock.first_token(given.tokens) for _ in range(5)][2:])
    times = {"ms": first, "tokens_per_s": given.tokens / first * 1e3}
    say("first_tokens", {"variant": given.kind, "tokens": given.tokens} | times)


def traffic(given: argparse.Namespace, rate: float) -> Traffic:
    """Requests of --trace, as many as come in --seconds."""
    number, longest = max(4, round(rate * given.seconds)), min(1000, given.tokens)
    return Traffic(requests=number, trace=given.trace, max_input=given.tokens, max_output=longest)


def pool_bytes(llm: LLM, given: argparse.Namespace) -> float:
    """Of --pool, or of the whole cache where that is less."""
    tokens, each = capacity(llm)
    size: float = min(given.pool * 1e9, tokens * each)
    return size


def time_rates(llm: LLM, clock: Clock, given: argparse.Namespace, say: Say) -> None:
    pool = pool_bytes(llm, given)
    for rate in given.rates:
        with pool_of(llm, pool):
            row = clock.crowd(traffic(given, rate).timed(rate), 2 * given.seconds)
        say("rates", {"variant": given.kind, "pool_bytes": pool, "rate": rate} | row)
        if row["answered"] < row["requests"] or row["ms_per_token"] > given.bound:
            break


def time_together(llm: LLM, clock: Clock, given: argparse.Namespace, say: Say) -> None:
    pool = pool_bytes(llm, given)
    for count in given.together:
        jobs = [TimedRequest(at=0.0, prompt=given.tokens, output=LONG) for _ in range(count)]
        preempt = scheduler(llm)._preempt_request
        counted = patch.object(scheduler(llm), "_preempt_request", wraps=preempt)
        with pool_of(llm, pool), counted as preempted:
            row = clock.crowd(jobs, 600)
        row["answered_tokens_per_s"] = row["answered"] * LONG / row["seconds"]
        row["preemptions"] = preempted.call_count
        say("together", {"variant": given.kind, "pool_bytes": pool} | row)


def time_loads(llm: LLM, clock: Clock, given: argparse.Namespace, say: Say) -> None:
    pool = pool_bytes(llm, given)
    for users in given.users:
        with pool_of(llm, pool):
            row = clock.load(users, given.tokens, given.seconds)
        say("loads", {"variant": given.kind, "pool_bytes": pool} | row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole: dict[str, Any] = {"type": lambda x: [*map(int, x.split(","))]}
    parser.add_argument("kind")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=WIDTHS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--window", type=int, default=0, help="exact tokens, of bits- and maps-")
    parser.add_argument("--batch", **whole, default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--memory", type=float, default=0.88, help="share of the GPU's")
    parser.add_argument("--users", **whole, default=[])
    parser.add_argument("--together", **whole, default=[], help="requests at once")
    parser.add_argument("--seconds", type=float, default=10, help="that count, of each --users")
    parser.add_argument("--pool", type=float, default=float("inf"), help="gigabytes, of --users")
    floats: dict[str, Any] = {"type": lambda x: [*map(float, x.split(","))]}
    parser.add_argument("--rates", **floats, default=[], help="requests a second")
    parser.add_argument("--trace", type=Path, help="of --rates (see kvfold bench serve)")
    parser.add_argument("--bound", type=float, default=25, help="ms a token from arrival to end")
    parser.add_argument("--slots", type=int, default=1, help="requests at once, at least")
    parser.add_argument("--filled", action="store_true", help="time steps without reading prompts")
    parser.add_argument("--profile", **whole, default=[], help="sequences; 0: a first token")
    parser.add_argument("--kv", type=float, help="gigabytes of cache, in place of --memory")
    parser.add_argument("--chunk", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs")
    parser.add_argument("--apart", action="store_true", help="products of a layer not merged")
    parser.add_argument("--ready", type=Path, help="made when ready; goes on when it is gone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.window and (given.filled or not given.kind.startswith(("bits-", MAPS))):
        parser.error("--window is for bits- and maps-, and not with --filled")
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "device": device()}
    aside = ("json", "ready", "trace")
    settings = {name: x for name, x in vars(given).items() if name not in aside}
    settings |= {"trace": given.trace and given.trace.name}
    found: dict = {"benchmark": "vllm", "settings": settings, "versions": versions}

    def say(table: str, row: dict) -> None:
        found.setdefault(table, []).append(row)
        print(json.dumps({table: row}), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    measure(given, say)


if __name__ == "__main__":
    main()
