"""How fast the device's memory can be read at all: what every kernel is measured against."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kvfold.bench.timing import Step, time_steps

BYTES = {"cuda": 4 << 30}  # read at a time; elsewhere SMALL
SMALL = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """read_tb_per_s: the best of several pure reads of `num_bytes`, `read_by` its name;
    copy_tb_per_s: a copy of half as many, bytes read and written."""

    read_tb_per_s: float
    read_by: str
    copy_tb_per_s: float
    num_bytes: int


def measure_ceiling(device: torch.device, rounds: int) -> Ceiling:
    """Stream through memory by every way that is known here, and keep the fastest."""
    num_bytes = BYTES.get(device.type, SMALL)
    data = torch.zeros(num_bytes // 8, dtype=torch.int64, device=device)
    source, target = data.chunk(2)
    steps: dict[str, Step] = {"int64 amax": lambda _: data.amax()}
    if device.type == "cuda" and find_spec("triton"):
        from lab.ceiling_triton import read

        steps["triton"] = lambda _: read(data)
    steps["copy"] = lambda _: target.copy_(source)
    times = time_steps(steps, layers=1, rounds=rounds, device=device)
    rates = {name: num_bytes / time.us / 1e6 for name, time in times.items()}
    copy = rates.pop("copy")
    best = max(rates, key=rates.__getitem__)
    return Ceiling(read_tb_per_s=rates[best], read_by=best, copy_tb_per_s=copy, num_bytes=num_bytes)
