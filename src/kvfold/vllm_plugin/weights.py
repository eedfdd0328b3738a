"""Load a folded checkpoint's attention weights, layer by layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvfold.layout import CacheSpec
from kvfold.models.adapter import HFAttention
from kvfold.models.families import family_of
from kvfold.models.rotary import RotaryTable, rope_type
from kvfold.models.rotate import rotate_layer
from kvfold.vllm_plugin.model_cache import ModelCache


def empty_layer(config: Any, spec: CacheSpec, index: int) -> HFAttention:
    """A folded attention with uninitialised weights, on torch's current default device."""
    folded = family_of(config).folded[config.model_type]
    return folded(config, spec.geometry, spec.layers[index], index).requires_grad_(False)


def fold_layer(model_cache: ModelCache, index: int, tensors: Mapping[str, Tensor]) -> HFAttention:
    """Layer `index` of a folded checkpoint, with the heads of all processes, from its tensors by
    name; rotated if the cache is.

    Raises ValueError for tensors that are missing or have another shape.
    """
    with torch.device("meta"):
        whole = empty_layer(model_cache.config, model_cache.spec, index)
    # score_map is for learned eviction; plain_weight names the guard tensor (hub.checkpoint).
    unused = ("score_map", family_of(model_cache.config).plain_weight)
    loaded = {name: x.to(model_cache.dtype) for name, x in tensors.items() if name not in unused}
    wanted = {name: x.shape for name, x in whole.state_dict().items()}
    wrong = sorted(
        name
        for name in wanted.keys() | loaded.keys()
        if name not in loaded or wanted.get(name) != loaded[name].shape
    )
    if wrong:
        raise ValueError(
            f"layer {index}: {', '.join(wrong)} missing, unexpected or of another shape; the "
            "checkpoint's files do not belong together: copy it again"
        )
    whole.load_state_dict(loaded, assign=True)
    if model_cache.rotate:
        rotate_layer(whole, model_cache.cache.bits, model_cache.format)
    return whole


def rotary_table(config: Any, device: torch.device) -> RotaryTable | None:
    """The model's RoPE; None if it has none."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary: Any = family_of(config).rotary(model)
    if rotary is None:
        return None
    with torch.device(device):
        return RotaryTable(type(rotary)(config), rope_type(config))
