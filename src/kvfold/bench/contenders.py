"""Who decodes: our engine with a variant's cache, and transformers with its own.

A contender is a model, built once for all batches and contexts. Shapes: B sequences of T tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from kvfold.bench import synthetic_engine as served
from kvfold.bench.ablations import tiles_of
from kvfold.bench.timing import record
from kvfold.bench.variants import DTYPE, SHAPES, VARIANTS, variant_layout
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import CacheParams, SamplingParams
from kvfold.utils.versions import cache_argument

SPARE = 2 << 30  # bytes beside weights and cache: activations, logits, work space of kernels
Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """step: everything between two tokens; it returns when the tokens are on the host. cache_bytes:
    held by B sequences of T tokens; graph: whether a step is a CUDA graph."""

    step: Run
    cache_bytes: int
    graph: bool


class Contender(ABC):
    """chunk: tokens of a prompt in a forward pass, None: all."""

    model: Any
    chunk: int | None = None

    @abstractmethod
    def cache_bytes(self, batch: int, tokens: int) -> int:
        """Bytes that are taken for B sequences of T tokens."""

    @abstractmethod
    def decoding(self, batch: int, tokens: int, steps: int) -> Decoding:
        """B sequences that have read T tokens each, and have room for `steps` more."""

    @abstractmethod
    def first_token(self, tokens: int) -> Run:
        """A reader of T tokens that returns once its first output is on the host."""


class Ours(Contender):
    """The engine, on a model that stores what a variant keeps."""

    def __init__(self, shape: str, name: str, device: torch.device) -> None:
        self.shape, self.variant = shape, VARIANTS[name]
        self.model = served.random_model(shape, self.variant, device)

    def cache_bytes(self, batch: int, tokens: int) -> int:
        return served.pool_bytes(variant_layout(SHAPES[self.shape], self.variant), batch, tokens)

    def _engine(self, batch: int, longest: int) -> Engine:
        place = self.model, self.shape, self.variant
        return served.build_engine(*place, batch=batch, longest=longest)

    def decoding(self, batch: int, tokens: int, steps: int) -> Decoding:
        engine = self._engine(batch, tokens + steps + 1)
        served.fill(engine, batch, tokens, steps + 1, CacheParams())
        runner = served.runner_of(engine)
        return Decoding(
            step=lambda: served.step(engine),
            cache_bytes=runner.pool.stats().used_bytes,
            graph=runner.graphs is not None,
        )

    def first_token(self, tokens: int) -> Run:
        engine = self._engine(1, tokens + 1)
        self.chunk = engine.scheduler.max_chunk
        one = SamplingParams(max_new_tokens=1, ignore_eos=True)
        place = self.variant, SHAPES[self.shape], self.model.device.type

        def run() -> None:
            with tiles_of(*place):
                engine.add(_prompt(tokens).tolist(), one)
                while engine.has_work:
                    served.step(engine)

        return run


class Theirs(Contender):
    """transformers with SDPA, greedy: its dynamic cache, or its static one and a CUDA graph."""

    def __init__(self, shape: str, static: bool, device: torch.device) -> None:
        self.shape, self.static, self.device = shape, static, device
        self.model = served.random_model(shape, None, device)

    def cache_bytes(self, batch: int, tokens: int) -> int:
        each = DTYPE.itemsize * SHAPES[self.shape].full_numbers * batch
        # The dynamic cache is copied layer by layer whenever it grows.
        copied = 0 if self.static else 3 * each * tokens // SHAPES[self.shape].num_layers
        return each * tokens + copied

    def decoding(self, batch: int, tokens: int, steps: int) -> Decoding:
        cache = self._cache(tokens + steps + 2)
        geometry = SHAPES[self.shape]
        size = (batch, geometry.num_kv_heads, tokens, geometry.head_dim)
        for layer in range(geometry.num_layers):
            keys = torch.randn(size, dtype=DTYPE, device=self.device)
            cache.update(keys, torch.randn_like(keys), layer)
        held = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        last = torch.full((batch, 1), 5, device=self.device)

        @torch.inference_mode()
        def forward(_: int = 0) -> None:
            last.copy_(self._next(last, cache))

        run: Run = forward
        graph = self.static and self.device.type == "cuda"
        if graph:
            run = record(forward, 1, self.device)

        def step() -> None:
            run()
            last.tolist()  # a server reads its tokens

        return Decoding(step=step, cache_bytes=held, graph=graph)

    def first_token(self, tokens: int) -> Run:
        prompt = _prompt(tokens).to(self.device)[None]

        @torch.inference_mode()
        def run() -> None:
            self._next(prompt, self._cache(tokens + 1)).tolist()

        return run

    def _cache(self, longest: int) -> Any:
        if self.static:
            return StaticCache(config=self.model.config, max_cache_len=longest)
        return DynamicCache(config=self.model.config)

    def _next(self, ids: Tensor, cache: Any) -> Tensor:
        """ids [B, n] -> [B, 1]: the likeliest token after each."""
        out = self.model(ids, **cache_argument(cache), use_cache=True, logits_to_keep=1)
        found: Tensor = out.logits[:, -1:].argmax(-1)
        return found


def _prompt(tokens: int) -> Tensor:
    return torch.arange(tokens) % 97 + 3


THEIRS = {"transformers": False, "transformers-static": True}
NAMES = (*THEIRS, *(name for name, variant in VARIANTS.items() if variant.served))


def contender(shape: str, name: str, device: torch.device) -> Contender:
    """As in a process of its own: code that torch.compile made for the last one's widths would make
    this one's take any width, and be slower."""
    torch._dynamo.reset()
    if name in THEIRS:
        return Theirs(shape, THEIRS[name], device)
    return Ours(shape, name, device)
