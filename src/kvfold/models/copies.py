"""Copies of a model that share what nobody changes."""

import copy
from typing import Any


def shared_copy(model: Any) -> Any:
    """Another model object over the same weights, whose attentions can be replaced or rotated."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
