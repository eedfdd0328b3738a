"""Models whose decode steps are timed: kvfold's engine with a variant's cache, and transformers.

A decoder is a model that is built once and timed at all batches and contexts. Shapes: B sequences
of T tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from kvfold.bench import synthetic_engine as synthetic
from kvfold.bench.variants import DTYPE, SHAPES, VARIANTS, Variant, variant_layout
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import CacheParams, SamplingParams
from kvfold.utils.versions import cache_argument

SPARE = 2 << 30  # bytes beside weights and cache: activations, logits, work space of kernels
Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A batch that is being decoded. step: all work between two tokens; it returns when the tokens
    are on the host. cache_bytes: held by B sequences of T tokens. graph: whether a step is a CUDA
    graph."""

    step: Run
    cache_bytes: int
    graph: bool


class Decoder(ABC):
    """A model and the engine that runs it. chunk: tokens of a prompt per forward pass, None: all
    of them."""

    model: Any
    chunk: int | None = None

    @abstractmethod
    def cache_bytes(self, batch: int, tokens: int) -> int:
        """Bytes that are allocated for B sequences of T tokens."""

    @abstractmethod
    def decoding(self, batch: int, tokens: int, steps: int) -> Decoding:
        """B sequences with T tokens in the cache each, and space for `steps` more."""

    @abstractmethod
    def first_token(self, tokens: int) -> Run:
        """A function that prefills T tokens and returns once their first output is on the host."""


class EngineDecoder(Decoder):
    """kvfold's engine, on a model that stores what a variant keeps."""

    def __init__(self, shape: str, variant: Variant, device: torch.device) -> None:
        self.shape, self.variant = shape, variant
        self.model = synthetic.random_model(shape, self.variant, device)

    def cache_bytes(self, batch: int, tokens: int) -> int:
        return synthetic.pool_bytes(variant_layout(SHAPES[self.shape], self.variant), batch, tokens)

    def prefilling(self) -> AbstractContextManager[None]:
        """The context that prompts are prefilled in."""
        return nullcontext()

    def decoding(self, batch: int, tokens: int, steps: int) -> Decoding:
        engine = self._engine(batch, tokens + steps + 1)
        synthetic.fill(engine, batch, tokens, steps + 1, CacheParams())
        runner = synthetic.runner_of(engine)
        return Decoding(
            step=lambda: synthetic.step(engine),
            cache_bytes=runner.pool.stats().used_bytes,
            graph=runner.graphs is not None,
        )

    def first_token(self, tokens: int) -> Run:
        engine = self._engine(1, tokens + 1)
        self.chunk = engine.scheduler.max_chunk
        one_token = SamplingParams(max_new_tokens=1, ignore_eos=True)

        def run() -> None:
            with self.prefilling():
                engine.add(_prompt(tokens).tolist(), one_token)
                while engine.has_work:
                    synthetic.step(engine)

        return run

    def _engine(self, batch: int, longest: int) -> Engine:
        return synthetic.build_engine(
            self.model, self.shape, self.variant, batch=batch, longest=longest
        )


class TransformersDecoder(Decoder):
    """transformers with SDPA and its dynamic cache, greedy."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.model = synthetic.random_model(shape, None, device)

    def cache_bytes(self, batch: int, tokens: int) -> int:
        held = self.full_bytes(batch, tokens)
        # The dynamic cache is copied layer by layer whenever it grows.
        return held + 3 * held // SHAPES[self.shape].num_layers

    def full_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of uncompressed keys and values."""
        return DTYPE.itemsize * SHAPES[self.shape].full_numbers * batch * tokens

    def new_cache(self, longest: int) -> Cache:
        """An empty cache for sequences of up to `longest` tokens."""
        return DynamicCache(config=self.model.config)

    def decoding(self, batch: int, tokens: int, steps: int) -> Decoding:
        cache: Any = self.new_cache(tokens + steps + 2)
        self._fill(cache, batch, tokens)
        held = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        last = torch.full((batch, 1), 5, device=self.device)

        @torch.inference_mode()
        def forward(_: int = 0) -> None:
            last.copy_(self._next(last, cache))

        run, graph = self.captured(forward)

        def step() -> None:
            run()
            last.tolist()  # a server reads its tokens

        return Decoding(step=step, cache_bytes=held, graph=graph)

    def captured(self, forward: Callable[[int], None]) -> tuple[Run, bool]:
        """How a step runs its forward pass, and whether that is a CUDA graph."""
        return lambda: forward(0), False

    def first_token(self, tokens: int) -> Run:
        prompt = _prompt(tokens).to(self.device)[None]

        @torch.inference_mode()
        def run() -> None:
            self._next(prompt, self.new_cache(tokens + 1)).tolist()

        return run

    def _fill(self, cache: Any, batch: int, tokens: int) -> None:
        geometry = SHAPES[self.shape]
        size = (batch, geometry.num_kv_heads, tokens, geometry.head_dim)
        for layer in range(geometry.num_layers):
            keys = torch.randn(size, dtype=DTYPE, device=self.device)
            cache.update(keys, torch.randn_like(keys), layer)

    def _next(self, ids: Tensor, cache: Any) -> Tensor:
        """The likeliest next tokens [B, 1] after ids [B, n]."""
        out = self.model(ids, **cache_argument(cache), use_cache=True, logits_to_keep=1)
        tokens: Tensor = out.logits[:, -1:].argmax(-1)
        return tokens


def _prompt(tokens: int) -> Tensor:
    return torch.arange(tokens) % 97 + 3


NAMES = ("transformers", *VARIANTS)


def build_decoder(shape: str, name: str, device: torch.device) -> Decoder:
    """The decoder of one of NAMES. Forgets compiled code: torch.compile would generalise the last
    decoder's code to this one's sizes, and make it slower than in a process of its own."""
    torch._dynamo.reset()
    if name == "transformers":
        return TransformersDecoder(shape, device)
    return EngineDecoder(shape, VARIANTS[name], device)
