"""Times attention of one decode step with all of the lab's variants and baselines.

`kvfold bench attention` is the same with those that users choose from. Run as
`python benchmarks/bench_attention.py --help`.
"""

import sys

from kvfold.cli import bench_common as shared
from kvfold.cli.bench_attention import time_attention
from lab.command import run


def attention(
    *,
    shape: shared.Shape = "llama-3.1-8b",
    batch: shared.Batches = "1,16,64",
    tokens: shared.Lengths = "1024,8192,32768",
    variants: str | None = None,
    baselines: str | None = None,
    layers: int = 32,
    rounds: shared.Rounds = 30,
    json: shared.Output = None,
) -> None:
    """Time the attention of one decode step on random caches, beside bf16 baselines, and as a share
    of the fastest read of memory.

    The output of every kernel is checked before it is timed. Kernels take turns; times are medians
    in microseconds a layer.

    Parameters
    ----------
    variants
        Names of lab/variants.py, separated by commas; by default those that reconstruct no keys
        and are no ablation.
    baselines
        sdpa-flash, sdpa-flash-folded, sdpa-cudnn, sdpa-cudnn-folded, flex or flashinfer, separated
        by commas; by default all.
    layers
        Layers a call, each with its own cache if memory allows.
    """
    from lab.attention import LabBenchmark

    time_attention(
        LabBenchmark(),
        shape=shape,
        batch=batch,
        tokens=tokens,
        variants=variants,
        baselines=baselines,
        layers=layers,
        rounds=rounds,
        json=json,
    )


if __name__ == "__main__":
    sys.exit(run(attention))
