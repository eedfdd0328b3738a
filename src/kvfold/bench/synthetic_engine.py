"""Engines on random weights, with a cache filled as if prompts had been prefilled: timing needs no
trained model.

Shapes: B sequences of T tokens each; G groups of all layers, n pages of the longest, P rows a page.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvfold.bench.variants import DTYPE, ROPE_BASES, SHAPES, Variant, variant_layout
from kvfold.config import CacheConfig
from kvfold.engine.core.compression import Schedule
from kvfold.engine.core.engine import Engine, StepOutput, default_chunk
from kvfold.engine.requests.request import CacheParams, SamplingParams
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.hub.checkpoint import mark
from kvfold.layout import CacheSpec
from kvfold.layout.pages import CacheLayout
from kvfold.models.families import family_of

WIDTHS = {  # hidden size, MLP, vocabulary
    "llama-3.1-8b": (4096, 14336, 128256),
    "llama-3.1-70b": (8192, 28672, 128256),
    "llama-2-7b": (4096, 11008, 32000),
    "qwen2.5-1.5b": (1536, 8960, 151936),
    "tiny": (64, 128, 256),
}
NEVER = Schedule(after_prefill=False, before_preempt=False)


def config_of(shape: str) -> LlamaConfig:
    """The config of a Llama of that shape."""
    width, mlp, vocabulary = WIDTHS[shape]
    geometry = SHAPES[shape]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_query_heads,
        num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=1 << 18,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASES[shape]},
    )


def random_model(shape: str, variant: Variant | None, device: torch.device) -> Any:
    """A Llama of that shape with random weights in DTYPE: plain, or folded to store what a variant
    keeps."""
    spec = variant_layout(SHAPES[shape], variant).spec if variant else None
    return random_folded(shape, spec, device)


def random_folded(shape: str, spec: CacheSpec | None, device: torch.device) -> Any:
    """The same, folded to store what a spec says; None: plain."""
    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        if spec is not None:
            family = family_of(config)
            for index in range(spec.geometry.num_layers):
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


def pool_bytes(layout: CacheLayout, batch: int, tokens: int) -> int:
    """Bytes of a page pool for B sequences of T tokens, with some for pages lost at slab ends."""
    size = layout.page_bytes * -(-tokens // layout.page) * batch
    return size + size // 20 + 2**24


def build_engine(
    model: Any,
    shape: str,
    variant: Variant,
    *,
    batch: int,
    longest: int,
    **cache: Any,
) -> Engine:
    """An engine for `batch` sequences of up to `longest` tokens, which never evicts by itself.
    cache: more fields of its `CacheConfig`."""
    layout = variant_layout(SHAPES[shape], variant)
    config = CacheConfig(
        bits=variant.bits if variant.bits < 16 else None,
        rotate=False,
        page=variant.page,
        kv_bytes=pool_bytes(layout, batch, longest),
        **cache,
    )
    runner = build_runner(model, config, num_slots=batch, max_tokens=longest)
    assert runner.pool.layout.page_bytes == layout.page_bytes, "page sizes are not as predicted"
    most = max(4 * default_chunk(runner.device.type), batch)  # as an LLM has it
    return Engine(runner, runner.pool, max_batch_tokens=most, schedule=NEVER)


def fill(engine: Engine, batch: int, tokens: int, new: int, cache: CacheParams) -> None:
    """Add B requests whose prompts are in the cache, except for their last token. new: most output
    tokens of a request."""
    pool = engine.scheduler.pool
    # Any bytes that are small numbers in fp16, whether read as codes, scales, numbers or scores.
    pool.arena.random_(0, 64)
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    for number in range(batch):
        engine.start_computed(engine.add([number % 97 + 3] * tokens, sampling, cache), tokens - 1)


def step(engine: Engine) -> list[StepOutput]:
    """Run one step. Raises RuntimeError if a request failed, which the engine only reports."""
    outputs = engine.step()
    for output in outputs:
        if output.finish_reason == "error":
            raise RuntimeError(output.error)
    return outputs


def runner_of(engine: Engine) -> ModelRunner:
    """The engine's runner, with its type."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    return runner
