"""Check device and dtype before a model is loaded."""

from typing import Any

import torch

from kvfold.utils.errors import SettingError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def check_dtype(dtype: Any) -> None:
    """Raises SettingError for a dtype in which no model computes."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str | torch.dtype) or name not in DTYPES:
        raise SettingError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}")


def check_device(device: str | torch.device) -> None:
    """Raises SettingError for a device that this machine does not have."""
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError):
        checked = None
    if checked is None or checked.type not in _COUNTS:
        raise SettingError(f"`device` must be cpu, cuda, cuda:N or mps; got {str(device)!r}")
    count = _COUNTS[checked.type]()
    if (checked.index or 0) < count:
        return
    available = f"{checked.type}:0 to {checked.type}:{count - 1}" if count else "none"
    raise SettingError(
        f"`device={str(device)!r}`: of {checked.type} devices this machine has {available};"
        " another one, or `device='cpu'`, works"
    )


_COUNTS = {
    "cpu": lambda: 1,
    "cuda": lambda: torch.cuda.device_count(),
    "mps": lambda: int(torch.backends.mps.is_available()),
}
