"""kvfold recover: trains low-rank additions that make up for the loss of compression."""

import time
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from kvfold.cli import common
from kvfold.cli.options import ADAPTERS, PLACE, Adapters, Files, Model, NewDirectory, Place


def recover(
    model: Model,
    /,
    *,
    output: NewDirectory,
    text: Annotated[
        Files,
        Parameter(help="Text files to train on (.txt, .xz, .gz); by default a packaged text."),
    ] = (),
    original: str | None = None,
    adapters: Adapters = ADAPTERS,
    place: Place = PLACE,
) -> None:
    """Train low-rank additions (LoRA) to the weights of a folded MODEL, and merge them.

    Recovers quality that compression lost. Best on a GPU.

    Parameters
    ----------
    original
        The model that MODEL was made from. Then the original's predictions are learned, instead of
        the text itself.
    """
    from kvfold import recovery
    from kvfold.hub.checkpoint import provenance_of

    common.quiet()
    begin = time.perf_counter()
    with common.progress() as progress:
        model_with_lora = recovery.recover(
            model,
            output=output,
            text=list(text) or None,
            original=original,
            device=place.device,
            dtype=place.dtype,
            progress=progress,
            **asdict(adapters),
        )
    lora = provenance_of(model_with_lora)["lora"]
    what = "from the original" if original else "of held-out text"
    print(
        f"{lora['before']:.4f} to {lora['after']:.4f} nats a token {what}, after {lora['steps']}"
        f" steps on {lora['tokens']} tokens"
    )
    print(f"recovered in {time.perf_counter() - begin:.1f} seconds, saved to {output}")
