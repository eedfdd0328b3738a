"""Launch kernels early and copy between host and device without waiting."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PDL = True  # programmatic dependent launch, where the device has it


@lru_cache
def multiprocessors(device: torch.device) -> int:
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 3


def launch_options(device: torch.device) -> dict[str, bool]:
    """Launch options of kernels that wait themselves for the data they read: on devices with
    programmatic dependent launch they start before the kernel in front has ended."""
    early = PDL and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {}


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy to the device without waiting: a copy from pinned memory is queued like a kernel."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Download:
    """Tensors being copied to the host. The copies are queued like kernels; waiting for them does
    not wait for later work."""

    def __init__(self, *tensors: Tensor) -> None:
        self._host = [x.to("cpu", non_blocking=True) for x in tensors]  # pinned, from a GPU
        self._done = torch.cuda.Event() if tensors[0].is_cuda else None
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[Tensor]:
        """On the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def download_each(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy from the device to the host: pairs of a target in host memory and its source. While the
    host copies one from pinned memory to its target, the next one is on its way."""
    last: tuple[Tensor, Download] | None = None
    for target, source in pairs:
        current = target, Download(source)
        if last is not None:
            last[0].copy_(last[1].wait()[0])
        last = current
    if last is not None:
        last[0].copy_(last[1].wait()[0])
