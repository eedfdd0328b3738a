"""Where a model runs and in which numbers: checked before one is loaded."""

from typing import Any

import torch

from kvfold.utils.errors import SettingError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def check_dtype(dtype: Any) -> None:
    """Raises SettingError for a dtype that no model computes in."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str | torch.dtype) or name not in DTYPES:
        raise SettingError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}")


def check_device(device: str | torch.device) -> None:
    """Raises SettingError for a device that this machine does not have."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in _COUNTS:
        raise SettingError(f"`device` must be cpu, cuda, cuda:N or mps; got {str(device)!r}")
    count = _COUNTS[found.type]()
    if (found.index or 0) < count:
        return
    has = f"{found.type}:0 to {found.type}:{count - 1}" if count else "none"
    raise SettingError(
        f"`device={str(device)!r}`: of {found.type} devices this machine has {has}; another one, or"
        " `device='cpu'`, works"
    )


_COUNTS = {
    "cpu": lambda: 1,
    "cuda": lambda: torch.cuda.device_count(),
    "mps": lambda: int(torch.backends.mps.is_available()),
}
