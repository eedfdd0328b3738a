"""Times the re-scoring pass over a prompt beside its prefill; JSON.

Run as `python benchmarks/bench_replay.py --help`.
"""

import sys
from typing import Any

from kvfold.cli import common
from kvfold.cli.bench_common import Output, Results, ServedShape, check_names, say, versions
from kvfold.cli.options import Flag, parse_list
from lab.command import run


def replay(
    *,
    shape: ServedShape = "llama-3.1-8b",
    tokens: int = 8192,
    variants: str = "bf16-full",
    policies: str = "kvzip,kvzip+",
    keep: float = 0.25,
    repair: Flag = False,
    json: Output = None,
) -> None:
    """Time prefill, the second reading that scores rows, and the eviction of the others.

    Parameters
    ----------
    tokens
        Tokens of the prompt.
    variants
        Names separated by commas, as in bench decode.
    policies
        Policies that read a context again, separated by commas; each with the whole cache seen, and
        with what comes before a piece's end.
    keep
        Share of the tokens that is kept.
    repair
        Repair rows that stay, as a part of the eviction.
    """
    common.check_outputs(json=json)
    import torch

    from kvfold.bench import synthetic_engine as served
    from kvfold.bench.common import reason
    from kvfold.bench.decode import release
    from kvfold.cache.eviction.policies import POLICIES, get
    from kvfold.cache.eviction.scorers.rescoring import as_rescoring
    from kvfold.hub.loading import default_device
    from lab import replay as benchmark
    from lab import variants as known

    names, asked = parse_list(variants, "--variants", str), parse_list(policies, "--policies", str)
    check_names("--variants", names, known.SERVED)
    check_names("--shape", [shape], served.WIDTHS)
    every = {name: get(name) for name in POLICIES}
    readers = {  # of one forward pass
        name: x
        for name, x in every.items()
        if (scorer := as_rescoring(x)) is not None and not scorer.gradient_weighted
    }
    check_names("--policies", asked, readers)
    if tokens < 2:
        raise ValueError(f"--tokens must be at least 2, got {tokens}")
    if not 0 < keep <= 1:
        raise ValueError(f"--keep must be in (0, 1], got {keep}")
    device = torch.device(default_device())
    settings = {"shape": shape, "tokens": tokens, "variants": names, "keep": keep}
    settings |= {"policies": asked, "repair": repair}
    kinds = ("rows", "skipped")
    results = Results(json, "replay", settings, versions(device), kinds)
    each = [readers[x].changed(sees_suffix=seen) for x in asked for seen in (True, False)]
    for name in names:
        release(device)
        try:
            for found in benchmark.measure(shape, name, each, tokens, keep, device, repair):
                if isinstance(found, str):
                    results.add("skipped", {"variant": name, "reason": found})
                    say(f"{name}: {found}")
                    continue
                results.add("rows", found)
                say(line(found))
        except Exception as error:  # whatever it is, the others run on
            results.add("skipped", {"variant": name, "reason": reason(error)})
            say(f"{name}: {reason(error)}")


def line(x: Any) -> str:
    """A result as a line of a log."""
    seen = "all" if x.whole else "what came before"
    return (
        f"{x.variant}, {x.policy}, seeing {seen}: prefill {x.prefill_ms:.1f} ms, scores"
        f" {x.score_ms:.1f} ms ({x.score_tflop / x.prefill_tflop:.2f} of its operations), eviction"
        f" {x.evict_ms:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(run(replay))
