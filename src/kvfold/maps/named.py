"""Load a model by the name of its folder of maps, which stands for the base model with these
maps."""

from pathlib import Path
from typing import Any, TypeVar

import torch

from kvfold.hub import loading
from kvfold.maps.attach import attach
from kvfold.maps.sidecar import PLAN, Sidecar
from kvfold.utils.errors import SettingError

M = TypeVar("M")


def base_and_maps(model: Path | str, maps: M | None = None) -> tuple[str, M | str | None]:
    """Split a name into the name of a model and its maps. For a folder of maps: its base model and
    the folder; otherwise the arguments unchanged. Raises SettingError for a base that cannot be
    loaded, and for two sets of maps."""
    if not holds_maps(model):
        return str(model), maps
    if maps is not None:
        raise SettingError(
            f"{model} holds maps, and `maps` names others: name a model, or leave `maps` out"
        )
    base = Sidecar.load(model).source
    try:
        loading.load_config(base)
    except ValueError as error:
        raise SettingError(
            f"{model} holds maps for {base}, which is not here under that name ({error}): name the"
            f" model where it is, and `maps={str(model)!r}` beside it"
        ) from None
    return base, str(model)


def holds_maps(model: Path | str) -> bool:
    """Whether a name is a folder of maps."""
    return (Path(model) / PLAN).is_file()


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    **options: Any,
) -> Any:
    """Load a model as `hub.loading.load` does; for a folder of maps, load its base and attach the
    maps. Raises ValueError."""
    if not isinstance(name, str | Path):
        return loading.load(name)  # which says what is wrong
    base, maps = base_and_maps(name)
    model = loading.load(base, dtype=dtype, device=device, **options)
    if maps is not None:
        attach(model, maps)
    return model
