"""Where vLLM's models get maps: behind each of its loaders, whatever its attention backend is.

Nothing heavy is imported before a server asks for maps: Numba would keep vLLM 0.32 from starting.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

WATCHED = "watched_by_kvfold"


def watch_loading() -> None:
    """Look at every model that vLLM loads from now on. May be called again."""
    for loader in (BaseModelLoader, *_LOAD_FORMAT_TO_MODEL_LOADER.values()):
        load = loader.__dict__.get("load_model")
        if load is not None and not hasattr(load, WATCHED):
            loader.load_model = _attaching(load)
            setattr(loader.load_model, WATCHED, True)


def _attaching(load: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A loader's method whose models get the maps that a server's settings name."""

    @wraps(load)
    def load_model(
        self: Any, vllm_config: VllmConfig, model_config: ModelConfig, *args: Any, **kwargs: Any
    ) -> nn.Module:
        model = load(self, vllm_config, model_config, *args, **kwargs)
        given = dict(vllm_config.additional_config or {}).get("kvfold")
        draft = model_config is not vllm_config.model_config
        if given and not draft and not hasattr(model, "folded"):  # which has its own maps
            from kvfold.vllm_plugin.attach import attach  # only where it is wanted

            attach(model, vllm_config, given)
        return model

    return load_model
