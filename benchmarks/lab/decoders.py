"""More decoders than `kvfold bench decode` has: the lab's variants, ablations of prefill, and
transformers with a static cache."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import Cache, StaticCache

from kvfold.bench import decoders as shipped
from kvfold.bench.decoders import Decoder, EngineDecoder, Run, TransformersDecoder
from kvfold.bench.timing import record
from kvfold.bench.variants import SHAPES
from lab.ablations import tiles_of
from lab.variants import SERVED, VARIANTS


class LabDecoder(EngineDecoder):
    """kvfold's engine, which prefills with a variant's tiles."""

    def prefilling(self) -> AbstractContextManager[None]:
        return tiles_of(self.variant, SHAPES[self.shape], self.model.device.type)


class StaticDecoder(TransformersDecoder):
    """transformers with its static cache, whose step is a CUDA graph on a GPU."""

    def cache_bytes(self, batch: int, tokens: int) -> int:
        return self.full_bytes(batch, tokens)

    def new_cache(self, longest: int) -> Cache:
        return StaticCache(config=self.model.config, max_cache_len=longest)

    def captured(self, forward: Callable[[int], None]) -> tuple[Run, bool]:
        if self.device.type != "cuda":
            return super().captured(forward)
        return record(forward, 1, self.device), True


NAMES = ("transformers", "transformers-static", *SERVED)


def build_decoder(shape: str, name: str, device: torch.device) -> Decoder:
    """As `kvfold.bench.decoders.build_decoder`, of these NAMES."""
    if name == "transformers":
        return shipped.build_decoder(shape, name, device)
    torch._dynamo.reset()
    if name == "transformers-static":
        return StaticDecoder(shape, device)
    return LabDecoder(shape, VARIANTS[name], device)
