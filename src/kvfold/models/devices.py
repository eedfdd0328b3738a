"""Where a model runs, also where its weights are elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def input_device(model: Any) -> torch.device:
    """Where a model takes token ids: where accelerate runs it, if it has offloaded their table."""
    if model.device.type != "meta":
        found: torch.device = model.device
        return found
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(device for device in devices if device is not None))


def is_offloaded(model: Any) -> bool:
    """Whether some of a model's weights are read from the host or from disk when they are used."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """A module with another forward until the block ends; accelerate's own, if it has one, comes
    back then."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
