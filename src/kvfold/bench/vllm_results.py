"""The results of a load in the format of `vllm bench serve --save-result --save-detailed` (vLLM
0.32), for tools that read its files."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvfold.bench.serve_client import Endpoint, Outcome
from kvfold.bench.serve_load import Goals
from kvfold.utils.files import write_json

BACKENDS = {"completions": "openai", "chat": "openai-chat"}


def vllm_result(
    outcomes: Sequence[Outcome],
    *,
    seconds: float,
    goals: Goals,
    endpoint: Endpoint,
    label: str,
    model: str,
    request_rate: float | str,
    concurrency: int | None,
) -> dict[str, Any]:
    """The fields of vLLM's file, with its meanings: times count from when a request was sent, and
    its end is its last text. Requests without an answer have zeros.

    seconds: of the whole load. request_rate: "inf" where requests had no given times.
    """
    good = [x for x in outcomes if x.ok]
    total = {"input": sum(x.prompt_tokens for x in good)}
    total["output"] = sum(x.output_tokens for x in good)
    queued = [x.sent - x.at for x in good]
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": BACKENDS[endpoint],
        "backend": BACKENDS[endpoint],
        "label": label,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(outcomes),
        "request_rate": request_rate,
        "burstiness": 1.0,
        "max_concurrency": concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total["input"],
        "total_output_tokens": total["output"],
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(map(goals.are_met, good)) / seconds if goals.any_set else None,
        "output_throughput": total["output"] / seconds,
        "total_token_throughput": sum(total.values()) / seconds,
        "input_lens": [x.prompt_tokens for x in outcomes],
        "output_lens": [x.output_tokens if x.ok else 0 for x in outcomes],
        "ttfts": [_first(x) if x.ok else 0.0 for x in outcomes],
        "itls": [x.gaps for x in outcomes],
        "latencies": [_latency(x) if x.ok else 0.0 for x in outcomes],
        "start_times": [x.sent for x in outcomes],
        "queue_times": [x.sent - x.at if x.sent else 0.0 for x in outcomes],
        "generated_texts": [x.text for x in outcomes],
        "errors": [x.error or "" for x in outcomes],
        "max_output_tokens_per_s": float(_most(_seconds_of_text(good))),
        "max_concurrent_requests": _most(_seconds_open(good)),
        "rtfx": 0.0,  # of audio
    }
    times = {
        "ttft": [_first(x) for x in good],
        "tpot": [x.tpot for x in good if x.output_tokens > 1],
        "itl": [gap for x in good for gap in x.gaps],
        "e2el": [_latency(x) for x in good],
    }
    if concurrency is not None:
        times["client_queue_time"] = queued
    for name, values in times.items():
        result |= _statistics(name, values)
    return result


def _first(outcome: Outcome) -> float:
    return outcome.events[0] - outcome.sent


def _latency(outcome: Outcome) -> float:
    return outcome.events[-1] - outcome.sent


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    """Of seconds, in milliseconds; zeros without values, as vLLM writes them."""
    ms = 1e3 * np.asarray(values or [0.0])
    return {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }


def _start(outcomes: Sequence[Outcome]) -> float:
    return min((x.sent for x in outcomes), default=0.0)


def _seconds_of_text(outcomes: Sequence[Outcome]) -> list[int]:
    """For every piece of text, the whole second in which it arrived."""
    start = _start(outcomes)
    return [int(event - start) for x in outcomes for event in x.events]


def _seconds_open(outcomes: Sequence[Outcome]) -> list[int]:
    """For every request, the whole seconds in which it was open."""
    start = _start(outcomes)
    spans = [(int(x.sent - start), int(x.events[-1] - start)) for x in outcomes]
    return [second for first, last in spans for second in range(first, last + 1)]


def _most(seconds: Sequence[int]) -> int:
    """How often the most frequent second occurs."""
    return int(np.bincount(seconds).max()) if seconds else 0


def write_vllm_result(folder: Path, name: str, result: Mapping[str, Any]) -> None:
    """Write a result beside earlier ones: its name ends with the date."""
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-")
    write_json(folder / f"{plain}-{result['date']}.json", result)
