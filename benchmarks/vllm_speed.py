"""Milliseconds of vLLM's steps, the first token and what its cache holds, for a model of random
weights: as it is, or with kvfold's plugin.

    python benchmarks/vllm_speed.py swift-5x --batch 1,8,64 --json speed.json

KIND is bf16-full (vLLM by itself), bits-8 or bits-4 (the plugin on an unchanged model), or a
compressed variant of `kvfold bench decode`. A step is timed where the engine returns one new token
of every request, from the ninth on, with the engine's asynchronous scheduling; a first token from
the request on, prefix caching off, the median of three after two to warm up.

    python benchmarks/vllm_speed.py swift-5x --batch 8 --users 8,16,40 --pool 5.5

--users: requests a second and their latency, where so many users each ask again as soon as they are
answered: prompts of a quarter to three of --tokens, answers of 128 to 384. --pool: gigabytes of
cache that they share, as on a smaller card (24 GB less a tenth and the weights leave 5.5): blocks
beyond it are held back.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
import vllm
from transformers import LlamaConfig
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from kvfold.artifact import KVFoldConfig
from kvfold.bench.synthetic_engine import WIDTHS
from kvfold.bench.variants import ROPE_BASES, SHAPES, VARIANTS, variant_layout
from kvfold.models.families import family_of

Say = Callable[[str, dict], None]  # of a row of a table, by the table's name
WARM = 8  # steps
ANSWERS = 128, 384  # tokens, drawn evenly


def write_config(folder: Path, shape: str, kind: str, layers: int | None) -> None:
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


def engine(folder: Path, given: argparse.Namespace) -> LLM:
    sizes = {1, *given.batch, *range(8, max([0, *given.users]) + 8, 8)}
    options = {"compilation_config": {"cudagraph_capture_sizes": sorted(sizes)}}
    if given.kind.startswith("bits-"):
        bits = int(given.kind.removeprefix("bits-"))
        options |= {"quantization": "kvfold", "additional_config": {"kvfold": {"bits": bits}}}
    elif given.kind != "bf16-full":
        options["block_size"] = VARIANTS[given.kind].page
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=given.tokens + 1024,
        max_num_seqs=max(given.batch + given.users),
        max_num_batched_tokens=16384,
        gpu_memory_utilization=given.memory,
        enable_prefix_caching=False,
        **options,
    )


class Clock:
    """An engine's steps, one at a time."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.rng, self.asked = llm.llm_engine, random.Random(0), 0
        self.vocabulary = llm.model_config.get_vocab_size()

    def ask(self, tokens: int, new: int) -> str:
        prompt = [self.rng.randrange(3, self.vocabulary - 3) for _ in range(tokens)]
        wanted = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.asked += 1
        self.engine.add_request(str(self.asked), {"prompt_token_ids": prompt}, wanted)
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

    def steps(self, batch: int, tokens: int, count: int) -> list[float]:
        """Milliseconds of each."""
        names, started = [self.ask(tokens, 1000) for _ in range(batch)], set()
        while len(started) < batch:
            started |= {name for name, new in self.step().items() if new}
        found, last, alike = [], None, 0
        while len(found) < count:
            new, now = self.step(), time.perf_counter()
            if not new:
                continue  # the engine only put a step into its queue
            alike = alike + 1 if len(new) == batch and set(new.values()) == {1} else 0
            if last is not None and alike > WARM:
                found.append((now - last) * 1e3)
            last = now
        self._drain(names)
        return found

    def load(self, users: int, tokens: int, seconds: float) -> dict:
        """What users see who ask again when they are answered, over so many seconds after half as
        many to warm up: a row. tokens: of which prompts have a quarter to three."""
        self.rng.seed(users)
        asked, first, left = {}, {}, {}
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

    def _drain(self, names: list[str]) -> None:
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def scheduler(llm: LLM):
    return llm.llm_engine.engine_core.engine_core.scheduler


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


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def measure(given: argparse.Namespace, say: Say) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), given.shape, given.kind, given.layers)
        llm = engine(Path(folder), given)
    fit, each = capacity(llm)
    say("capacity", {"variant": given.kind, "tokens": fit, "token_bytes": each})
    clock = Clock(llm)
    time_steps(llm, clock, given, say)
    time_loads(llm, clock, given, say)


def time_steps(llm: LLM, clock: Clock, given: argparse.Namespace, say: Say) -> None:
    firsts = [clock.first_token(given.tokens) for _ in range(5)][2:]
    clock.steps(1, given.tokens, 1)
    first = statistics.median(firsts)
    times = {"ms": first, "tokens_per_s": given.tokens / first * 1e3}
    say("first_tokens", {"variant": given.kind, "tokens": given.tokens} | times)
    _, each = capacity(llm)
    for batch in given.batch:
        steps = clock.steps(batch, given.tokens, given.steps)
        cases = {"variant": given.kind, "batch": batch, "tokens": given.tokens}
        times = {"ms": statistics.median(steps), "ms_mean": statistics.fmean(steps)}
        say("rows", cases | times | {"cache_bytes": each * batch * given.tokens})


def time_loads(llm: LLM, clock: Clock, given: argparse.Namespace, say: Say) -> None:
    tokens, each = capacity(llm)
    pool = min(given.pool * 1e9, tokens * each)
    for users in given.users:
        with pool_of(llm, pool):
            row = clock.load(users, given.tokens, given.seconds)
        say("loads", {"variant": given.kind, "pool_bytes": pool} | row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = {"type": lambda x: [*map(int, x.split(","))]}
    parser.add_argument("kind")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=WIDTHS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", **whole, default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--memory", type=float, default=0.88, help="share of the GPU's")
    parser.add_argument("--users", **whole, default=[])
    parser.add_argument("--seconds", type=float, default=10, help="that count, of each --users")
    parser.add_argument("--pool", type=float, default=float("inf"), help="gigabytes, of --users")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "device": device()}
    settings = {name: x for name, x in vars(given).items() if name != "json"}
    found: dict = {"benchmark": "vllm", "settings": settings, "versions": versions}

    def say(table: str, row: dict) -> None:
        found.setdefault(table, []).append(row)
        print(json.dumps({table: row}), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    measure(given, say)


if __name__ == "__main__":
    main()
