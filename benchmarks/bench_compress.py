"""Times an eviction of all sequences, and what a decode step consists of; JSON.

Run as `python benchmarks/bench_compress.py --help`.
"""

import sys
from typing import Any

from kvfold.cli import common
from kvfold.cli.bench_common import Output, Results, ServedShape, check_names, say, versions
from kvfold.cli.options import parse_list
from lab.command import run


def compress(
    *,
    shape: ServedShape = "llama-3.1-8b",
    batch: int = 64,
    tokens: int = 8192,
    variants: str = "bf16-half,int4-half",
    keep: str = ".5,.125",
    steps: int = 10,
    json: Output = None,
) -> None:
    """Time a compression of all sequences beside a decode step, and what that step consists of.

    Parameters
    ----------
    batch
        Number of sequences.
    tokens
        Tokens of a sequence.
    variants
        Names separated by commas, as in bench decode.
    keep
        Shares of the tokens that are kept, separated by commas; policy kv-compress.
    steps
        Decode steps that are timed.
    """
    common.check_outputs(json=json)
    import torch

    from kvfold.bench import synthetic_engine as served
    from kvfold.bench.common import reason
    from kvfold.bench.decode import release
    from kvfold.hub.loading import default_device
    from lab import compression
    from lab import variants as known

    names, keeps = parse_list(variants, "--variants", str), parse_list(keep, "--keep", float)
    check_names("--variants", names, known.SERVED)
    check_names("--shape", [shape], served.WIDTHS)
    for option, value, least in (
        ("--batch", batch, 1),
        ("--tokens", tokens, 2),
        ("--steps", steps, 1),
    ):
        if value < least:
            raise ValueError(f"{option} must be at least {least}, got {value}")
    if not all(0 < x <= 1 for x in keeps):
        raise ValueError(f"--keep: {keep!r} has numbers that are not in (0, 1]")
    device = torch.device(default_device())
    settings = {"shape": shape, "batch": batch, "tokens": tokens, "variants": names, "keep": keeps}
    kinds = ("rows", "shares", "skipped")
    results = Results(json, "compress", settings | {"steps": steps}, versions(device), kinds)
    for name in names:
        release(device)
        skipped = {"variant": name, "batch": batch, "tokens": tokens}
        try:
            for found in compression.measure(
                shape, name, batch, tokens, tuple(keeps), steps, device
            ):
                if isinstance(found, str):
                    results.add("skipped", skipped | {"reason": found})
                else:
                    results.add("rows" if isinstance(found, compression.Row) else "shares", found)
                say(line(found))
        except Exception as error:  # whatever it is, the others run on
            results.add("skipped", skipped | {"reason": reason(error)})
            say(f"{name}: {reason(error)}")


def line(found: Any) -> str:
    """A result as a line of a log."""
    if isinstance(found, str):
        return found
    if hasattr(found, "keep"):
        return (
            f"{found.variant}, keep {found.keep:g}: compression {found.compress_ms:.1f} ms,"
            f" a step {found.decode_ms:.2f} ms"
        )
    parts = ", ".join(f"{kind} {100 * part:.1f} %" for kind, part in found.shares.items() if part)
    with_ = found.policy or "no policy"
    return f"{found.variant}, {with_}: {found.kernel_ms:.2f} of {found.step_ms:.2f} ms; {parts}"


if __name__ == "__main__":
    sys.exit(run(compress))
