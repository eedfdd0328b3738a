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
    check: bool,
) -> None:
    """Measure what the model's layers ask of attention, and save maps of its keys and values.
    check: measure first what they lose."""
    from kvfold.card import facts
    from kvfold.evaluation.maps import measured
    from kvfold.files import new_directory
    from kvfold.seam.compress import make_maps

    begin = time.perf_counter()
    common.quiet()
    with new_directory(output) as folder, common.progress() as progress:
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
            check=measured if check else None,
            progress=progress,
        )
        made.write(folder, output)
    print(f"maps of {len(made.maps)} layers: " + "\n".join(facts(made.spec, dict(made.provenance))))
    seconds = time.perf_counter() - begin
    print(
        f"made in {seconds:.1f} seconds, saved to {output} ({in_bytes(folder_bytes(output))}): use"
        f' them by --maps {output}, or kvfold.attach(model, "{output}")'
    )


def folder_bytes(folder: Path) -> int:
    """Of a sidecar's files, as they are on the disk."""
    from kvfold.seam.sidecar import FILES

    return sum((folder / x).stat().st_size for x in FILES if (folder / x).exists())


def in_bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


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


def check_context(maps: str | None, context: object) -> None:
    """Raises SettingError for packed contexts, which lose tokens, where maps stand beside a
    model."""
    if maps is not None and context:
        raise SettingError(
            "`maps` and `context` exclude each other: with maps beside the weights nothing is"
            " evicted, as in a packed context: leave one out"
        )
