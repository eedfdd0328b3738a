"""Results of a load test: percentiles, goodput, and how far answers agree. Imports no torch."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import inf
from typing import Any

import numpy as np

from kvfold.bench.serve_client import Outcome
from kvfold.bench.serve_load import Goals

PERCENTILES = (50, 90, 99)
ATTAINED = 0.9  # share of the requests that must meet the goals for a rate to be sustained


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles of seconds, in milliseconds; None without values."""
    if not values:
        return None
    ms = 1e3 * np.asarray(values)
    return {"mean": float(ms.mean())} | {
        f"p{p}": float(value)
        for p, value in zip(PERCENTILES, np.percentile(ms, PERCENTILES), strict=True)
    }


def summary(
    rate: float | None, outcomes: Sequence[Outcome], goals: Goals, questions: int = 1
) -> dict[str, Any]:
    """The results of one rate.

    rate: requests a second that were offered, or documents with so many questions; infinite: all at
    once; None: at the times of a trace.
    Rates in the result are over the time from the start to the end of the last request. ttft, jct:
    from when a request was due. tbt: between pieces of text. tpot: see `Outcome`. late_ms: longest
    delay of the client itself.
    """
    good = [x for x in outcomes if x.ok]
    seconds = max(x.ended for x in outcomes)
    row: dict[str, Any] = {
        "rate": "trace" if rate is None else f"{rate:g}",
        "offered_per_s": None if rate == inf else _offered(rate, questions, outcomes),
        "requests": len(outcomes),
        "completed": len(good),
        "errors": _counts([x.error or "no text" for x in outcomes if not x.ok]),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "input_tokens_per_s": sum(x.prompt_tokens for x in good) / seconds,
        "output_tokens_per_s": sum(x.output_tokens for x in good) / seconds,
        "late_ms": 1e3 * max((x.sent - x.at for x in outcomes if x.sent), default=0.0),
        "ttft_ms": spread([x.ttft for x in good]),
        "tbt_ms": spread([gap for x in good for gap in x.gaps]),
        "tpot_ms": spread([x.tpot for x in good if x.output_tokens > 1]),
        "jct_ms": spread([x.jct for x in good]),
        "normalised_ms": spread([x.normalised for x in good]),
    }
    if goals.any_set:
        count = sum(map(goals.are_met, good))
        row |= {"goodput_per_s": count / seconds, "attained": count / len(outcomes)}
    return row


def _offered(rate: float | None, questions: int, outcomes: Sequence[Outcome]) -> float | None:
    """Requests a second, by the rate or by the times of a trace."""
    if rate is not None:
        return rate * questions
    last = max(x.at for x in outcomes)
    return (len(outcomes) - 1) / last if last else None


def _counts(reasons: Sequence[str]) -> dict[str, int]:
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def sustained(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The results of the highest rate that is sustained: ATTAINED of the requests meet the goals at
    it and at all lower rates."""
    rated = [x for x in rows if x["offered_per_s"] is not None]
    rated = sorted(rated, key=lambda row: row["offered_per_s"])
    return next(reversed([*takewhile(lambda row: row["attained"] >= ATTAINED, rated)]), None)


def agreement(ours: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """How far two lists of answers to the same requests agree; neither may be empty.

    equal: share of equal answers. prefix: mean share of an answer before the first difference.
    """
    pairs = list(zip(ours, others, strict=True))
    return {
        "answers": len(pairs),
        "equal": sum(a == b for a, b in pairs) / len(pairs),
        "prefix": sum(_common(a, b) for a, b in pairs) / len(pairs),
    }


def _common(a: str, b: str) -> float:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return same / max(len(a), len(b), 1)
