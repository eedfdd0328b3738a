"""A checkpoint's attention weights, layer by layer, as the folded attention that vLLM runs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvfold.layout import CacheSpec
from kvfold.models.adapter import HFAttention
from kvfold.models.families import family_of
from kvfold.models.rotary import RotaryTable, rope_type
from kvfold.models.rotate import rotate_layer
from kvfold.vllm_plugin.model_cache import StoredCache


def empty_layer(config: Any, spec: CacheSpec, index: int) -> HFAttention:
    """A folded attention without numbers, on torch's current default device."""
    folded = family_of(config).folded[config.model_type]
    return folded(config, spec.geometry, spec.layers[index], index).requires_grad_(False)


def fold_layer(stored: StoredCache, index: int, tensors: Mapping[str, Tensor]) -> HFAttention:
    """Layer `index`, whole, of a folded checkpoint's attention tensors by name; rotated where that
    is wanted. Raises ValueError for tensors
    that are missing or of another shape."""
    with torch.device("meta"):
        whole = empty_layer(stored.config, stored.spec, index)
    # vLLM evicts nothing by what was learned of rows; the other one is a guard.
    unused = ("score_map", family_of(stored.config).plain_weight)
    found = {name: x.to(stored.dtype) for name, x in tensors.items() if name not in unused}
    wanted = {name: x.shape for name, x in whole.state_dict().items()}
    wrong = sorted(
        name
        for name in wanted.keys() | found.keys()
        if name not in found or wanted.get(name) != found[name].shape
    )
    if wrong:
        raise ValueError(
            f"layer {index}: {', '.join(wrong)} missing, unexpected or of another shape; the "
            "checkpoint's files do not belong together: copy it again"
        )
    whole.load_state_dict(found, assign=True)
    if stored.turn:
        rotate_layer(whole, stored.cache.bits, stored.format)
    return whole


def rotary_table(config: Any, device: torch.device) -> RotaryTable | None:
    """The model's own RoPE, None where it has none."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary: Any = family_of(config).rotary(model)
    if rotary is None:
        return None
    with torch.device(device):
        return RotaryTable(type(rotary)(config), rope_type(config))
