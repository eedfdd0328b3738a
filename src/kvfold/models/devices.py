"""Devices of a model, also of one whose weights accelerate has offloaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def input_device(model: Any) -> torch.device:
    """The device on which a model takes token ids: where accelerate runs it, if its embedding is
    offloaded."""
    if model.device.type != "meta":
        device: torch.device = model.device
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(device for device in devices if device is not None))


def is_offloaded(model: Any) -> bool:
    """Whether some weights are read from the host or from disk when they are used."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Context manager: replace the forward of a module; accelerate's own forward, if there is one,
    comes back."""
    previous = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if previous is not None:
            module.forward = previous
