"""kvfold compress --maps: maps beside the weights, for models of any type."""

import time
from pathlib import Path

from kvfold.cli import common
from kvfold.cli.options import Calibration, Fastest, Place, Size
from kvfold.config import DEFAULT_KEEP
from kvfold.errors import SettingError


def write_maps(
    model: str,
    recipe: str | None,
    size: Size,
    calibration: Calibration,
    place: Place,
    output: Path,
) -> None:
    """Measure what the model's layers ask of attention, and save maps of its keys and values."""
    from kvfold.card import facts
    from kvfold.seam.compress import make_maps

    begin = time.perf_counter()
    common.quiet()
    with common.progress() as progress:
        made = make_maps(
            model,
            recipe,
            keep=DEFAULT_KEEP if size.keep is None else size.keep,
            align=size.align,
            calib=list(calibration.calib) or None,
            dtype=place.dtype,
            device=place.device,
            max_tokens=calibration.max_tokens,
            seed=calibration.seed,
            output=output,
            progress=progress,
        )
    print(f"maps of {len(made.maps)} layers: " + "\n".join(facts(made.spec, dict(made.provenance))))
    seconds = time.perf_counter() - begin
    print(f'measured in {seconds:.1f} seconds, saved to {output}: kvfold.attach(model, "{output}")')


def check(size: Size, fastest: Fastest, calibration: Calibration, **more: object) -> None:
    """Raises SettingError for what maps beside the weights are not made by. more: other settings by
    name, which are to be off."""
    wanted = {x: getattr(size, x) for x in ("budget", "factor", "bytes_per_token", "hybrid")}
    wanted |= {"fastest": fastest.fastest, "stats": calibration.stats, **more}
    if wrong := [name for name, value in wanted.items() if value]:
        raise SettingError(
            f"`maps` and `{wrong[0]}` exclude each other: maps beside the weights drop dimensions,"
            " as `keep` says"
        )
