"""kvfold: compress the KV cache of language models, and measure what it costs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvfold.hub.registration import register
from kvfold.utils.versions import probe_transformers

if TYPE_CHECKING:
    from kvfold import published as published
    from kvfold import recipes as recipes
    from kvfold.api import compress as compress
    from kvfold.cache.eviction.policy import Policy as Policy
    from kvfold.config import Ratios as Ratios
    from kvfold.engine.api.async_llm import AsyncLLM as AsyncLLM
    from kvfold.engine.api.llm import LLM as LLM
    from kvfold.engine.requests.packed import PackedContext as PackedContext
    from kvfold.engine.requests.request import CacheParams as CacheParams
    from kvfold.engine.requests.request import SamplingParams as SamplingParams
    from kvfold.evaluation.auto import best_policy as best_policy
    from kvfold.hub.loading import reference as reference
    from kvfold.maps.attach import attach as attach
    from kvfold.maps.attach import detach as detach
    from kvfold.maps.named import load as load
    from kvfold.recovery import recover as recover

__version__ = "0.1.0"
# Module of each public name. They load lazily, so that `import kvfold` does not import torch.
_MODULES = {
    "LLM": "engine.api.llm",
    "AsyncLLM": "engine.api.async_llm",
    "CacheParams": "engine.requests.request",
    "Ratios": "config",
    "Policy": "cache.eviction.policy",
    "PackedContext": "engine.requests.packed",
    "SamplingParams": "engine.requests.request",
    "attach": "maps.attach",
    "best_policy": "evaluation.auto",
    "compress": "api",
    "detach": "maps.attach",
    "load": "maps.named",
    "recover": "recovery",
    "reference": "hub.loading",
}
__all__ = ["__version__", "published", "recipes", *_MODULES]

register()


def __getattr__(name: str) -> Any:
    if name in ("published", "recipes"):
        return import_module(f"kvfold.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}")
    probe_transformers()
    value = getattr(import_module(f"kvfold.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
