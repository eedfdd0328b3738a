"""kvfold compress --maps: maps beside the weights, for models of any type."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.cli import common
from kvfold.cli.options import Calibration, Fastest, Place, Size
from kvfold.errors import SettingError

if TYPE_CHECKING:
    from kvfold.seam.sidecar import Sidecar


def write_maps(
    model: str,
    recipe: str | None,
    size: Size,
    windows: bool,
    calibration: Calibration,
    place: Place,
    output: Path,
    check: bool,
) -> None:
    """Measure what the model's layers ask of attention, and save maps of its keys and values.
    check: measure first what they lose."""
    from kvfold.evaluation.maps import measured
    from kvfold.files import new_directory
    from kvfold.seam.compress import make_maps

    target = size.target
    begin = time.perf_counter()
    common.quiet()
    with new_directory(output) as folder, common.progress() as progress:
        made = make_maps(
            model,
            recipe,
            keep=target.keep,
            factor=target.factor,
            bytes_per_token=target.bytes_per_token,
            levels=target.levels,
            prefer=target.prefer,
            windows=windows,
            align=size.align,
            statistics=calibration.stats,
            calib=list(calibration.calib) or None,
            dtype=place.dtype,
            device=place.device,
            max_tokens=calibration.max_tokens,
            seed=calibration.seed,
            check=measured if check else None,
            progress=progress,
        )
        made.write(folder, output)
    say(made)
    seconds = time.perf_counter() - begin
    print(
        f"made in {seconds:.1f} seconds, saved to {output} ({in_bytes(folder_bytes(output))}): use"
        f' them by --maps {output}, or kvfold.attach(model, "{output}")'
    )
    if made.spec.planned:
        print(
            "kvfold's engine stores the planned bits; attached, transformers' cache 16-bit numbers"
        )


def folder_bytes(folder: Path) -> int:
    """Of a sidecar's files, as they are on the disk."""
    from kvfold.seam.sidecar import FILES

    return sum((folder / x).stat().st_size for x in FILES if (folder / x).exists())


def in_bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def say(made: "Sidecar") -> None:
    """What was planned, and what was left."""
    from kvfold.card import facts
    from kvfold.spec.layout import cache_layout

    if why := made.provenance.get("chosen"):
        print(f"recipe {made.provenance['recipe']['name']}: {why}")
    print(f"maps of {len(made.maps)} layers: " + "\n".join(facts(made.spec, dict(made.provenance))))
    if left := made.provenance.get("left"):
        kept = cache_layout(made.spec).kept_fraction
        whole = (
            f"{1 / (share + (1 - share) * kept):.2f} times at {tokens}"
            for tokens, share in left["share"].items()
        )
        print(f"{left['words']}; the whole cache is smaller {', '.join(whole)} tokens")


def check(size: Size, fastest: Fastest, **more: object) -> None:
    """Raises SettingError for what maps beside the weights are not made by. more: other settings by
    name, which are to be off."""
    wanted = {"budget": size.budget, "hybrid": size.hybrid, "fastest": fastest.fastest, **more}
    if wrong := [name for name, value in wanted.items() if value]:
        raise SettingError(
            f"`maps` and `{wrong[0]}` exclude each other: only folded checkpoints are made by"
            f" `{wrong[0]}`; give `keep` or `factor`"
        )


def check_context(maps: str | None, context: object) -> None:
    """Raises SettingError for packed contexts, which lose tokens, where maps stand beside a
    model."""
    if maps is not None and context:
        raise SettingError(
            "`maps` and `context` exclude each other: with maps beside the weights nothing is"
            " evicted, as in a packed context: leave one out"
        )
