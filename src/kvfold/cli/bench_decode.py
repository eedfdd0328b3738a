"""kvfold bench decode: times decode steps and first tokens of whole models, as tables and JSON."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvfold.cli import bench_common as shared
from kvfold.cli import common
from kvfold.cli.bench_common import Results, check_names, empty_table, say, versions
from kvfold.cli.options import parse_list

if TYPE_CHECKING:
    from kvfold.bench.decode import DecodeResult, FirstTokenResult
    from kvfold.bench.decoders import Decoder

    BuildDecoder = Callable[[str, str, Any], Decoder]

GB = ("cache\nGB", "peak\nGB", "predicted\nGB")
DEFAULT = "transformers,bf16-full,bf16-half,int8-half,int4-half"


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
        Caches to time, separated by commas: transformers (its dynamic cache, with SDPA), or those
        of bench attention.
    steps
        Steps to time, and as many again, after four that are not timed.
    prefill
        Also time the first token of one prompt of every length.
    """

    def load() -> "tuple[Sequence[str], BuildDecoder]":
        from kvfold.bench import decoders

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


def time_decoding(
    load: "Callable[[], tuple[Sequence[str], BuildDecoder]]",
    *,
    shape: str,
    batch: str,
    tokens: str,
    variants: str,
    steps: int,
    prefill: bool,
    json: Path | None,
) -> None:
    """Run a benchmark of the decoders that `load` names and builds, with the command's options."""
    common.check_outputs(json=json)
    import torch

    from kvfold.bench.synthetic_engine import WIDTHS
    from kvfold.hub.loading import default_device

    legal, build = load()
    names = parse_list(variants, "--variants", str)
    check_names("--variants", names, legal)
    check_names("--shape", [shape], WIDTHS)
    if steps < 2:
        raise ValueError(f"--steps must be at least 2, got {steps}")
    batches, lengths = (
        parse_list(text, option, int) for text, option in ((batch, "--batch"), (tokens, "--tokens"))
    )
    for option, least in (("--batch", min(batches)), ("--tokens", min(lengths) - 1)):
        if least < 1:
            raise ValueError(f"{option} is too small; legal: batches from 1, tokens from 2")
    settings: dict[str, Any] = {"shape": shape, "batch": batches, "tokens": lengths}
    settings |= {"variants": names, "steps": steps, "prefill": prefill}
    device = torch.device(default_device())
    kinds = ("rows", "first_tokens", "skipped")
    results = Results(json, "decode", settings, versions(device), kinds)
    try:
        for name in names:
            measure(results, name, device, build)
    finally:
        print_results(results.by_kind)


def measure(results: Results, name: str, device: Any, build: "BuildDecoder") -> None:
    """Time one decoder at all batches and lengths. Its model is built once."""
    from kvfold.bench import decode as bench
    from kvfold.bench.common import reason

    settings = results.metadata["settings"]
    shape, steps = settings["shape"], settings["steps"]
    bench.release(device)
    try:
        decoder = build(shape, name, device)
    except Exception as error:  # the other decoders still run
        skip(results, name, "all", "all", reason(error))
        return
    batches = [*settings["batch"], *[None] * settings["prefill"]]  # None: a first token
    for tokens, batch in product(settings["tokens"], batches):
        result: DecodeResult | FirstTokenResult | str
        try:
            bench.release(device)
            if batch is None:
                result = bench.measure_first(decoder, shape, name, tokens, device)
            else:
                result = bench.measure_step(decoder, shape, name, batch, tokens, steps, device)
        except Exception as error:  # the other cases still run
            result = reason(error)
        if isinstance(result, str):
            skip(results, name, "first token" if batch is None else batch, tokens, result)
        else:
            what = "to the first token" if batch is None else f"a step of {batch}"
            say(f"{name}, {tokens} tokens: {result.ms:.2f} ms {what}")
            results.add("first_tokens" if batch is None else "rows", result)


def skip(results: Results, name: str, batch: int | str, tokens: int | str, reason: str) -> None:
    """Report a case that is not timed."""
    say(f"{name} at {batch} x {tokens}: {reason}")
    case = {"variant": name, "batch": batch, "tokens": tokens, "reason": reason}
    results.add("skipped", case)


def print_results(results: dict[str, list[Any]]) -> None:
    """Print what was measured, and what was not."""
    common.print_table(step_table(results["rows"]))
    if results["first_tokens"]:
        common.print_table(first_token_table(results["first_tokens"]))
    for case in results["skipped"]:
        print(f"{case['variant']} at {case['batch']} x {case['tokens']}: {case['reason']}")


def step_table(results: "Sequence[DecodeResult]") -> Table:
    """Times of decode steps."""
    table = empty_table("cache", "B x T", "ms", "p10-p90", "again", "tokens/s", *GB)
    for x in results:
        table.add_row(
            x.variant,
            f"{x.batch} x {x.tokens}",
            f"{x.ms:.2f}",
            f"{x.ms_p10:.2f}-{x.ms_p90:.2f}",
            f"{x.repeat_ms:.2f}",
            f"{x.tokens_per_s:.0f}",
            *(f"{size / 1e9:.2f}" for size in (x.cache_bytes, x.peak_bytes, x.predicted_bytes)),
        )
    return table


def first_token_table(results: "Sequence[FirstTokenResult]") -> Table:
    """Times to the first token."""
    table = empty_table("cache", "T", "chunk", "ms to the first token", "low-high", "tokens/s")
    for x in results:
        chunk = "all" if x.chunk is None else str(x.chunk)
        numbers = f"{x.ms:.1f}", f"{x.ms_low:.1f}-{x.ms_high:.1f}", f"{x.tokens_per_s:.0f}"
        table.add_row(x.variant, str(x.tokens), chunk, *numbers)
    return table
