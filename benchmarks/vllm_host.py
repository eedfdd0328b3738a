"""Milliseconds that the host takes to prepare attention of a step that no CUDA graph holds: some
requests decode beside chunks of prompts.

    python benchmarks/vllm_host.py swift-5x --decodes 40 --chunks 1
    python benchmarks/vllm_host.py swift-5x --decodes 40 --chunks 1 --chunk 600 --stored 8192 --gpu
    python benchmarks/vllm_host.py bits-4 --window 128

On a CPU alone: Triton's kernels are compiled for an H200 (minutes, once), and what is launched does
nothing; neither do matrix products. What is left is Python's, Triton's and PyTorch's time, with
the copies of a few hundred rows. With --gpu everything runs: the time until the host is through,
until the GPU is, and what each kernel takes. KIND is bits-8 or bits-4 (maps for a model of vLLM's
own), or a variant as a folded checkpoint. The median of steps of Llama-3.1-8B's shape. Every
request holds --stored tokens, those of its chunk included.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

import kvfold.ops.backend
from kvfold.attention.base import LayerAttention
from kvfold.attention.fallback import Fallback
from kvfold.attention.window import ExactTokens
from kvfold.bench.synthetic_engine import WIDTHS
from kvfold.bench.variants import SHAPES, variant_layout
from kvfold.layout.pages import CacheLayout, cache_layout, with_window
from kvfold.maps.engine_model import LayerProjections, served_layer
from kvfold.maps.plain import Means, full_spec, plain_maps
from kvfold.models.families import family_of
from kvfold.ops import one_pass
from kvfold.ops.common.plan import cdiv
from kvfold.ops.one_pass import launch
from kvfold.vllm_plugin.blocks import BlockAttention, BlockStep, BlockView
from kvfold.vllm_plugin.model_cache import EXACT_BLOCK
from kvfold.vllm_plugin.weights import empty_layer, rotary_table
from lab.variants import VARIANTS

SHAPE, LAYERS = "llama-3.1-8b", 32
BITS, BLOCK = "bits-", 32  # tokens of a block
LONGEST, BLOCKS = 9216, 500


class Device:
    """An H200 as Triton asks for it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def loaded(kernel: CompiledKernel) -> None:
    kernel.module = kernel.function = 1
    kernel._run = lambda *_: None


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """What a product would be written to."""
    return a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out


@contextmanager
def nothing_runs() -> Iterator[None]:
    triton.runtime.driver.set_active(Device())
    kernel, library = mock.Mock(func=0), SimpleNamespace(cuLaunchKernel=lambda *_: 0)
    program = SimpleNamespace(kernel=lambda: kernel, threads=32, shared=0)
    with ExitStack() as stack:
        for patch in (
            mock.patch.dict(os.environ, {"KVFOLD_BACKEND": "triton"}),
            mock.patch.object(CompiledKernel, "_init_handles", loaded),
            mock.patch.object(torch, "bmm", product),
            mock.patch.object(torch, "matmul", product),
            mock.patch.object(torch.Tensor, "copy_", lambda *_: None),
            mock.patch.object(kvfold.ops.backend, "use_triton", lambda *_: True),
            mock.patch.object(one_pass, "serves", lambda *_, **__: True),
            mock.patch.object(launch, "compiled", lambda *_: program),
            mock.patch.object(torch.cuda._utils, "_get_gpu_runtime_library", lambda: library),
        ):
            stack.enter_context(patch)
        yield


def folded_layers(kind: str) -> tuple[CacheLayout, list[LayerAttention]]:
    """Layers of a folded checkpoint, of a variant."""
    width, mlp, vocabulary = WIDTHS[SHAPE]
    geometry = SHAPES[SHAPE]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=mlp, vocab_size=vocabulary, num_hidden_layers=LAYERS,
        num_attention_heads=geometry.num_query_heads, num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim, max_position_embeddings=1 << 17,
    )  # fmt: skip
    layout = variant_layout(geometry, VARIANTS[kind], LAYERS)
    own = family_of(config).geometry(config)
    layout = replace(layout, spec=replace(layout.spec, geometry=own))
    table = rotary_table(config, torch.get_default_device())
    modules = [empty_layer(config, layout.spec, i) for i in range(LAYERS)]
    for module in modules:
        module.rotary = table
    return layout, [module.description for module in modules]


def mapped_layers(bits: int) -> tuple[CacheLayout, list[LayerProjections]]:
    """Layers with full-rank maps, as vLLM's own models have them with fewer bits."""
    geometry = SHAPES[SHAPE]
    spec = full_spec(geometry, LAYERS)
    layout = cache_layout(spec, page=BLOCK, itemsize=2, bits=bits)
    zeros = torch.zeros(geometry.num_kv_heads, geometry.head_dim)
    maps = plain_maps(Means(zeros, zeros)).to(zeros.device, torch.bfloat16)
    return layout, [served_layer(i, spec, maps, None, None, {}) for i in range(LAYERS)]


def drawn_blocks(layout: CacheLayout, blocks: int) -> list[Tensor]:
    """Random bytes of each layer's blocks."""
    groups = [layout.groups_of_layer(i) for i in range(LAYERS)]
    sizes = [sum(group.layout.page_bytes for group in x) for x in groups]
    return [torch.randint(0, 64, (blocks, x), dtype=torch.int8) for x in sizes]


class ModelAttention:
    """The attention of all layers of a kind, over `blocks` blocks for each layer, for requests of
    up to `longest` tokens, on PyTorch's default device. window: exact tokens, with maps alone."""

    def __init__(
        self, kind: str, blocks: int = BLOCKS, longest: int = LONGEST, window: int = 0
    ) -> None:
        torch.set_default_dtype(torch.bfloat16)
        self.longest = longest
        self.projections: list[LayerProjections] = []
        if kind.startswith(BITS):
            self.layout, self.projections = mapped_layers(int(kind.removeprefix(BITS)))
            self.layers = [x.layer for x in self.projections]
        else:
            self.layout, self.layers = folded_layers(kind)
        if window:
            self.layout = with_window(self.layout, window, 2, EXACT_BLOCK)
        view = BlockView(self.layout, torch.bfloat16, torch.get_default_device(), longest)
        self.attention = BlockAttention(self.layers, view)
        for backends in (self.attention.decode, self.attention.prefill):
            assert Fallback not in backends.kinds.values()
        self.caches = drawn_blocks(self.layout, blocks)
        exact = self.layout.exact
        self.exact_caches = [] if exact is None else drawn_blocks(exact, blocks)

    def step(self, lengths: list[int], chunks: Sequence[int]) -> BlockStep:
        """A step of requests of `lengths`, of which the last ones read `chunks` tokens."""
        decodes = len(lengths) - len(chunks)
        step = BlockStep(
            tables=self._tables(len(lengths), self.layout),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            slots=torch.arange(decodes + sum(chunks)),
            num_decodes=decodes,
            starts=[*range(decodes), *accumulate(chunks, initial=decodes)],
            max_lengths=lengths,
        )
        if self.layout.exact is None:
            return step
        return replace(
            step, exact=replace(step, tables=self._tables(len(lengths), self.layout.exact))
        )

    def _tables(self, requests: int, layout: CacheLayout) -> Tensor:
        size = requests, cdiv(self.longest, layout.page)
        return torch.randint(1, len(self.caches[0]), size).int()

    def inputs(self, tokens: int) -> Callable[[BlockAttention, BlockStep], None]:
        """What runs all layers in a step of as many tokens."""
        geometry, layer = self.layout.spec.geometry, self.layers[0]
        heads, kv_heads = geometry.num_query_heads, geometry.num_kv_heads
        q = torch.randn(heads, tokens, layer.key_width)
        entries = torch.randn(tokens, layer.spec.row_width)
        inputs = torch.randn(tokens, heads + 2 * kv_heads, geometry.head_dim).split(
            (heads, kv_heads, kv_heads), 1
        )
        out = torch.zeros(tokens, layer.output_width)

        def run(attention: BlockAttention, step: BlockStep) -> None:
            context = attention.begin(step)
            for i, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
                if self.exact_caches:
                    exact = ExactTokens(*(x.transpose(0, 1) for x in inputs))
                    caches = cache, self.exact_caches[i]
                    queries, stored = self.projections[i].score_space(*inputs)
                    assert stored is not None
                    context.attend_in_window(layer, caches, queries, stored, exact, out)
                elif self.projections:
                    of_layer = self.projections[i]
                    project = partial(of_layer.score_space, *inputs)
                    context.project_and_attend(
                        layer, cache, project, [*inputs], of_layer.weights, out
                    )
                else:
                    context.attend(layer, cache, q, entries, out)

        return run


def step_of(options: argparse.Namespace) -> Callable[[], None]:
    """What takes one step."""
    chunks, stored = [options.chunk] * options.chunks, max(options.stored, options.chunk)
    lengths = [options.stored] * options.decodes + [stored] * options.chunks
    longest = max(LONGEST, stored)
    blocks = options.decodes * options.stored // BLOCK if options.gpu else BLOCKS
    model = ModelAttention(options.kind, max(BLOCKS, blocks), longest, options.window)
    step = model.step(lengths, chunks)
    return partial(model.inputs(options.decodes + sum(chunks)), model.attention, step)


def median_ms(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begun = time.thread_time()
        run()
        times.append((time.thread_time() - begun) * 1e3)
    return statistics.median(times[rounds // 4 :])


def gpu_times(run: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Milliseconds of a step: of the host, until the GPU is through, and of each kernel."""
    host, whole = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        host.append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - begun) * 1e3)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    events = [x for x in profiled.key_averages() if x.self_device_time_total]
    events.sort(key=lambda x: -x.self_device_time_total)
    return {
        "host_ms": statistics.median(host[rounds // 4 :]),
        "whole_ms": statistics.median(whole[rounds // 4 :]),
        "kernels_ms": sum(x.self_device_time_total for x in events) / 1e3,
        "launches_a_layer": sum(x.count for x in events) / LAYERS,
        "kernels": {
            x.key[:60]: [x.count, round(x.self_device_time_total / 1e3, 3)] for x in events
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[f"{BITS}8", f"{BITS}4", *VARIANTS])
    parser.add_argument("--decodes", type=int, default=40, help="requests of one token")
    parser.add_argument("--chunks", type=int, default=1, help="of prompts")
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a chunk")
    parser.add_argument("--stored", type=int, default=300, help="tokens of a request")
    parser.add_argument("--window", type=int, default=0, help="exact tokens, with bits")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--gpu", action="store_true", help="run it, on a GPU")
    options = parser.parse_args()
    if options.window and not options.kind.startswith(BITS):
        parser.error("--window needs bits-8 or bits-4")
    torch.set_num_threads(1)
    if options.gpu:
        with torch.inference_mode(), torch.device("cuda:0"):
            result = gpu_times(step_of(options), options.rounds)
    else:
        with torch.inference_mode(), nothing_runs():
            taken = median_ms(step_of(options), options.rounds)
        result = {"ms_a_step": taken, "us_a_layer": taken / LAYERS * 1e3}
    print(json.dumps({**vars(options), **result}))


if __name__ == "__main__":
    main()
