"""lm-evaluation-harness with its own model of vLLM, on a CPU: the scores of `--model kvfold`.

Its own environment (`make test-vllm`). Every engine has a process of its own, as in `test_vllm`.
"""

import os
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-vllm")

from forks import forked
from kvfold.hub.loading import resolve
from lm_eval_cases import answers_of, evaluated, rounded, tasks  # noqa: F401

pytestmark = pytest.mark.vllm
LENGTH, TASKS = 256, ["choices", "answers"]


class Scores(NamedTuple):
    """Accuracies, log-likelihoods of all choices in nats, and answers."""

    accuracies: dict[str, float]
    likelihoods: list[float]
    answers: list[str]

    @classmethod
    def of(cls, results: dict[str, Any]) -> "Scores":
        choices = [x["resps"] for x in results["samples"]["choices"]]
        likelihoods = [float(choice[0][0]) for row in choices for choice in row]
        return cls(rounded(results), likelihoods, answers_of(results))

    def apart(self, other: "Scores") -> float:
        """The sum of the differences of log-likelihoods."""
        pairs = zip(self.likelihoods, other.likelihoods, strict=True)
        return fsum(abs(x - y) for x, y in pairs)


def by_vllm(folder: Path, bits: int) -> Scores:
    """With `--model vllm`. 16 bits: without kvfold."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    how = {"pretrained": resolve("reference:gqa"), "dtype": "float32", "max_model_len": LENGTH}
    how |= {"enforce_eager": True, "block_size": 32}
    if bits < 16:
        how["additional_config"] = {"kvfold": {"bits": bits}}
    return Scores.of(evaluated(folder, TASKS, "vllm", model_args=how, batch_size="auto"))


def by_kvfold(folder: Path, bits: int) -> Scores:
    import kvfold.lm_eval  # noqa: F401  registers the model

    how = {"pretrained": "reference:gqa", "dtype": "float32", "max_length": LENGTH, "bits": bits}
    how |= {"device": "cpu", "kv_bytes": 2**22}
    return Scores.of(evaluated(folder, TASKS, "kvfold", model_args=how, batch_size=1))


def test_scores_are_those_of_kvfold(tasks: Path) -> None:
    """At 16 bits up to rounding. At 8 bits rounding changes a stored number now and then, which
    counts for less than what is lost to 8 bits."""
    import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork

    run = partial(forked, _run, tasks)
    whole, expected_whole = run(by_vllm, 16), run(by_kvfold, 16)
    assert whole.likelihoods == pytest.approx(expected_whole.likelihoods, abs=1e-3)
    assert whole.answers == expected_whole.answers
    packed, expected = run(by_vllm, 8), run(by_kvfold, 8)
    assert packed.apart(expected) < packed.apart(whole) / 2
    assert whole.accuracies == expected_whole.accuracies
    assert packed.accuracies == expected.accuracies


def _run(folder: Path, call: Any, bits: int) -> Scores:
    return call(folder, bits)
