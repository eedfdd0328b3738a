"""Milliseconds of vLLM's steps, the first token and what its cache holds, for a model of random
weights: as it is, or with kvfold's plugin.

    python benchmarks/vllm_speed.py swift-5x --batch 1,8,64 --json speed.json

KIND is bf16-full (vLLM by itself), bits-8 or bits-4 (the plugin on an unchanged model), or a
compressed variant of `kvfold bench decode`. A step is timed where the engine returns one new token
of every request, from the ninth on, with the engine's asynchronous scheduling; a first token from
the request on, prefix caching off, the median of three after two to warm up.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
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

WARM = 8  # steps


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
    options = {"compilation_config": {"cudagraph_capture_sizes": sorted({1, *given.batch})}}
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
        max_num_seqs=max(given.batch),
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

    def _drain(self, names: list[str]) -> None:
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def capacity(llm: LLM) -> tuple[int, float]:
    """Tokens that fit, and bytes of one."""
    found = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    tokens = found.num_blocks * found.kv_cache_groups[0].kv_cache_spec.block_size
    return tokens, sum(x.size for x in found.kv_cache_tensors) / tokens


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def measure(given: argparse.Namespace, say: Callable[[str, dict], None]) -> None:
    """What is said is a row of a table, by the table's name."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), given.shape, given.kind, given.layers)
        llm = engine(Path(folder), given)
    fit, each = capacity(llm)
    say("capacity", {"variant": given.kind, "tokens": fit, "token_bytes": each})
    clock = Clock(llm)
    firsts = [clock.first_token(given.tokens) for _ in range(5)][2:]
    clock.steps(1, given.tokens, 1)
    first = statistics.median(firsts)
    times = {"ms": first, "tokens_per_s": given.tokens / first * 1e3}
    say("first_tokens", {"variant": given.kind, "tokens": given.tokens} | times)
    for batch in given.batch:
        steps = clock.steps(batch, given.tokens, given.steps)
        cases = {"variant": given.kind, "batch": batch, "tokens": given.tokens}
        times = {"ms": statistics.median(steps), "ms_mean": statistics.fmean(steps)}
        say("rows", cases | times | {"cache_bytes": each * batch * given.tokens})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=WIDTHS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=lambda x: [*map(int, x.split(","))], default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--memory", type=float, default=0.88, help="share of the GPU's")
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
