"""Attach maps to vLLM's models after they are loaded, whatever the loader and the attention
backend, and note their weights for kvfold's connectors.

Heavy modules are imported only if a server uses maps: importing Numba keeps vLLM 0.32 from
starting.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from kvfold.vllm_plugin.connectors import check_own_connectors
from kvfold.vllm_plugin.fingerprint import note_weights

WRAPPED = "watched_by_kvfold"
NOTES_WEIGHTS = "notes_weights_for_kvfold"  # attribute of loaders whose model's blocks move


def wrap_loaders() -> None:
    """Wrap all of vLLM's loaders so that models get their maps. May be called more than once."""
    for loader in (BaseModelLoader, *_LOAD_FORMAT_TO_MODEL_LOADER.values()):
        for name, wrap in (("load_model", _attaching), ("load_weights", _noting)):
            method = loader.__dict__.get(name)
            if method is not None and not hasattr(method, WRAPPED):
                setattr(loader, name, wrap(method))
                setattr(getattr(loader, name), WRAPPED, True)


def _noting(load: Callable[..., None]) -> Callable[..., None]:
    """A loader's `load_weights` that also notes their digest, if a connector needs it.
    Afterwards vLLM may move weights to where nobody finds them, as it does on CPUs."""

    @wraps(load)
    def load_weights(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        load(self, model, *args, **kwargs)
        if getattr(self, NOTES_WEIGHTS, False):
            note_weights(model)

    return load_weights


def _attaching(load: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A loader's `load_model` that also attaches the maps of the server's settings."""

    @wraps(load)
    def load_model(
        self: Any, vllm_config: VllmConfig, model_config: ModelConfig, *args: Any, **kwargs: Any
    ) -> nn.Module:
        if check_own_connectors(vllm_config):
            setattr(self, NOTES_WEIGHTS, True)
        model = load(self, vllm_config, model_config, *args, **kwargs)
        settings = dict(vllm_config.additional_config or {}).get("kvfold")
        draft = model_config is not vllm_config.model_config
        # A folded checkpoint has its maps in its weights.
        if settings and not draft and not hasattr(model, "folded"):
            from kvfold.vllm_plugin.attach import attach  # see the module's docstring

            attach(model, vllm_config, settings)
        return model

    return load_model
