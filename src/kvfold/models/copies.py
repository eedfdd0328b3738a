"""Copy a model without copying its weights."""

import copy
from typing import Any


def shared_copy(model: Any) -> Any:
    """Another model object with the same weight tensors, whose attention modules can be replaced or
    rotated."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
