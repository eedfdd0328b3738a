"""Time between tokens of the whole engine on random weights, with a cache filled as if prompts had
been read: latency needs no trained model.

Shapes: B sequences of T tokens each.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvfold.artifact import mark
from kvfold.benchmark.workload import DTYPE, SHAPES, VARIANTS, Variant, variant_layout
from kvfold.config import CacheConfig
from kvfold.engine.build import build_runner
from kvfold.engine.engine import Engine
from kvfold.engine.sequence import SamplingParams, Status
from kvfold.models.families import family_of
from kvfold.spec import CacheSpec

WIDTHS = {  # hidden size, MLP, vocabulary, RoPE base
    "llama-3.1-8b": (4096, 14336, 128256, 500000.0),
    "llama-2-7b": (4096, 11008, 32000, 10000.0),
    "tiny": (64, 128, 256, 10000.0),
}
ORIGINAL = "transformers"  # DynamicCache and SDPA
WARM = 3


@dataclass(frozen=True)
class Row:
    """Milliseconds a step of `batch` sequences; bytes that pages hold, that the device allocated at
    most, and that weights and pages were to take."""

    shape: str
    variant: str
    batch: int
    tokens: int
    ms: float
    ms_p10: float
    ms_p90: float
    tokens_per_s: float
    cache_bytes: int
    peak_bytes: int
    predicted_bytes: int
    graph: bool


def random_model(shape: str, spec: CacheSpec | None, device: torch.device) -> Any:
    """A Llama of that shape with random weights in DTYPE, folded as `spec` says."""
    width, mlp, vocabulary, base = WIDTHS[shape]
    geometry = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_query_heads,
        num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        if spec is not None:
            family = family_of(config)
            for index in range(geometry.num_layers):
                family.swap(model, spec, index)
    model.to_empty(device=device)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1)
    if spec is not None:
        family.connect(model)
        mark(model.to(DTYPE), spec, {})
    return model.eval()


def engine_steps(
    shape: str, variant: Variant, batch: int, tokens: int, steps: int, device: torch.device
) -> tuple[Callable[[], None], Any]:
    """A step of an engine whose sequences have read `tokens` tokens each, and its runner."""
    layout = variant_layout(SHAPES[shape], variant, SHAPES[shape].num_layers)
    model = random_model(shape, layout.spec, device)
    longest = tokens + steps + 1
    kv_bytes = layout.page_bytes * -(-longest // variant.page) * batch
    kv_bytes += kv_bytes // 20 + 2**24  # ends of slabs
    bits = variant.bits if variant.bits < 16 else None
    config = CacheConfig(bits=bits, rotate=False, page=variant.page, kv_bytes=kv_bytes)
    runner = build_runner(model, config, num_slots=batch, max_tokens=longest)
    # Any bytes whose halves are small numbers, as codes, scales or numbers.
    runner.pool.arena.random_(0, 64)
    engine = Engine(runner, runner.pool, max_batch_tokens=max(2048, batch))
    greedy = SamplingParams(max_new_tokens=steps + 1, ignore_eos=True)
    for number in range(batch):
        _place(engine, number, tokens, greedy)
    return lambda: _check(engine.step()), runner


def _place(engine: Engine, seed: int, tokens: int, sampling: SamplingParams) -> None:
    """A request whose prompt, but for its last token, is in the cache."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    engine.add([seed % 97 + 3] * tokens, sampling)
    sequence = scheduler.waiting.pop()
    sequence.slot, sequence.status = pool.open(), Status.RUNNING
    pool.extend([sequence.slot], [tokens - 1])
    sequence.num_computed = tokens - 1
    scheduler.running.append(sequence)


def _check(outputs: list[Any]) -> None:
    assert all(x.finish_reason in (None, "length") for x in outputs), "a request failed"


def transformers_steps(
    shape: str, batch: int, tokens: int, device: torch.device
) -> Callable[[], None]:
    """A greedy step of transformers with SDPA over its own cache."""
    model = random_model(shape, None, device)
    geometry = SHAPES[shape]
    cache = DynamicCache(config=model.config)
    for layer in range(geometry.num_layers):
        size = (batch, geometry.num_kv_heads, tokens, geometry.head_dim)
        keys = torch.randn(size, dtype=DTYPE, device=device)
        cache.update(keys, torch.randn_like(keys), layer)
    last = torch.full((batch, 1), 5, device=device)

    @torch.inference_mode()
    def step() -> None:
        logits = model(last, past_key_values=cache, use_cache=True).logits[:, -1]
        last.copy_(logits.argmax(-1, keepdim=True))
        last.tolist()  # a server reads its tokens

    return step


def measure(
    shape: str, name: str, batch: int, tokens: int, steps: int, device: torch.device
) -> Row:
    """Median over `steps` steps, after a warm-up that captures graphs."""
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if name == ORIGINAL:
        step = transformers_steps(shape, batch, tokens, device)
        held = 2 * SHAPES[shape].full_numbers * batch * tokens
        graph, predicted = False, held
    else:
        step, runner = engine_steps(shape, VARIANTS[name], batch, tokens, steps + WARM, device)
        held, graph = runner.pool.stats().used_bytes, runner.graphs is not None
        predicted = runner.pool.arena.numel()
        predicted += sum(x.numel() * x.element_size() for x in runner.model.parameters())
    for _ in range(WARM):
        step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()  # ends by reading tokens, so the device is done
        times.append(1e3 * (time.perf_counter() - begin))
    tenths = quantiles(times, n=10)
    ms = median(times)
    return Row(
        shape=shape,
        variant=name,
        batch=batch,
        tokens=tokens,
        ms=ms,
        ms_p10=tenths[0],
        ms_p90=tenths[-1],
        tokens_per_s=1e3 * batch / ms,
        cache_bytes=held,
        peak_bytes=torch.cuda.max_memory_allocated(device) if cuda else 0,
        predicted_bytes=predicted,
        graph=graph,
    )
