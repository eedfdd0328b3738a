"""Copies of a model that share what nobody changes."""

import copy
from typing import Any

from kvfold.models.adapter import HFAttention


def shared_copy(model: Any) -> Any:
    """Another model object over the same weights, whose attentions can be replaced or rotated."""
    folded = [module for module in model.modules() if isinstance(module, HFAttention)]
    own = {id(parameter) for module in folded for parameter in module.parameters()}
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, {key: shared[key] for key in shared.keys() - own})
