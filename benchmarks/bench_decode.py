"""Times decode steps of a whole model with all of the lab's variants, and transformers' caches.

`kvfold bench decode` is the same with the variants that users choose from. Run as
`python benchmarks/bench_decode.py --help`.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvfold.cli import bench_common as shared
from kvfold.cli.bench_decode import DEFAULT, time_decoding
from lab.command import run

if TYPE_CHECKING:
    from kvfold.cli.bench_decode import BuildDecoder


def decode(
    *,
    shape: shared.ServedShape = "llama-3.1-8b",
    batch: shared.Batches = "1,8,64",
    tokens: shared.Lengths = "8192",
    variants: str = DEFAULT,
    steps: int = 20,
    prefill: bool = False,
    json: shared.Output = None,
) -> None:
    """Time decode steps of a whole model with random weights, with a cache that is already full.

    What fails or does not fit into memory is reported with its reason; the other cases still run.

    Parameters
    ----------
    variants
        Caches to time, separated by commas: transformers (its dynamic cache, with SDPA),
        transformers-static (its static one, as a CUDA graph), or names of lab/variants.py.
    steps
        Steps to time, and as many again, after four that are not timed.
    prefill
        Also time the first token of one prompt of every length.
    """

    def load() -> "tuple[Sequence[str], BuildDecoder]":
        from lab import decoders

        return decoders.NAMES, decoders.build_decoder

    time_decoding(
        load,
        shape=shape,
        batch=batch,
        tokens=tokens,
        variants=variants,
        steps=steps,
        prefill=prefill,
        json=json,
    )


if __name__ == "__main__":
    sys.exit(run(decode))
