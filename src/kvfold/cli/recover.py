"""kvfold recover: what compression left alone learns to make up for it."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvfold.cli import common
from kvfold.cli.options import ADAPTERS, PLACE, Adapters, Files, Model, Place


def recover(
    model: Model,
    /,
    *,
    output: Path,
    text: Annotated[Files, Parameter(help="Text files instead of ours (.txt, .xz, .gz).")] = (),
    original: str | None = None,
    adapters: Adapters = ADAPTERS,
    place: Place = PLACE,
) -> None:
    """Train low-rank additions to a compressed MODEL's weights on text, and merge them.

    Parameters
    ----------
    output
        New directory, written whole or not at all.
    original
        The model it was compressed from: what that predicts is learnt, instead of the text.
    """
    from kvfold import recovery
    from kvfold.hub.checkpoint import provenance_of

    common.quiet()
    begin = time.perf_counter()
    with common.progress() as progress:
        made = recovery.recover(
            model,
            output=output,
            text=list(text) or None,
            original=original,
            device=place.device,
            dtype=place.dtype,
            progress=progress,
            **asdict(adapters),
        )
    lora = provenance_of(made)["lora"]
    what = "from the original" if original else "of text that was kept back"
    print(
        f"{lora['before']:.4f} to {lora['after']:.4f} nats a token {what}, after {lora['steps']}"
        f" steps on {lora['tokens']} tokens"
    )
    print(f"recovered in {time.perf_counter() - begin:.1f} seconds, saved to {output}")
