"""All kernels that steps under vLLM need are compiled before the first step, in parallel.

In a process of its own, because kernels of the tests' process may belong to Triton's interpreter.
Triton's compiler is replaced, and nothing is launched.
"""

import json
import random
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hopper import run_alone
from kvfold.ops.common.compile_ahead import CompileAhead, ZeroResults, compiling_ahead

WINDOW = "+window"
KINDS = ("bits-4", "swift-5x", "lean-6x", f"bits-4{WINDOW}")
MOST = 64  # decoding requests


class Compiler:
    """In place of Triton's. One for all kinds: kernels keep the first one that they meet."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.threads: set[str] = set()

    def __call__(self, source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        self.compiled.append(source.name)
        self.threads.add(threading.current_thread().name)
        known = {"packed_metadata": None, "function": 1, "run": lambda *_: None}
        return SimpleNamespace(launch_metadata=lambda *_: None, **known)


def compile_and_run(kind: str, compiler: Compiler) -> dict[str, Any]:
    """Kernels compiled ahead, and those compiled later, in steps of all sorts."""
    import triton

    import vllm_host as host

    triton.compiler.compile = compiler
    rng, before = random.Random(0), len(compiler.compiled)
    host.LAYERS = 4
    with torch.inference_mode(), host.nothing_runs():
        model = host.ModelAttention(kind.removesuffix(WINDOW), window=128 * kind.endswith(WINDOW))
        with CompileAhead(torch.device("cpu")) as ahead:
            model.attention.warm_up(MOST)
            if model.projections:
                geometry = model.layout.spec.geometry
                heads = geometry.num_query_heads, geometry.num_kv_heads, geometry.num_kv_heads
                qkv = torch.zeros(70, sum(heads), geometry.head_dim).split(heads, 1)
                model.projections[0].score_space(*qkv)
        first = compiler.compiled[before:]
        with ZeroResults():
            for decodes in (1, 2, 3, 8, 24, MOST):
                step = model.step([1] * decodes, ()).decodes()  # as a graph captures it
                model.inputs(decodes)(model.attention, step)
            for _ in range(15):
                decodes = rng.choice([0, 1, 2, 3, 16, 17, 40, MOST])
                chunks = rng.choices([1, 2, 3, 16, 64, 100, 600, 1024], k=rng.choice([1, 2, 3]))
                lengths = [rng.randint(1, 9000) for _ in range(decodes)]
                lengths += [x + rng.choice([0, 1, 15, 16, 700, 5000]) for x in chunks]
                model.inputs(decodes + sum(chunks))(model.attention, model.step(lengths, chunks))
    late = compiler.compiled[before + len(first) :]
    of_threads = all(x.startswith("kvfold-compile") for x in compiler.threads)
    return {"first": first, "late": late, "threads": of_threads, "all": len(ahead.futures)}


@pytest.mark.slow
def test_nothing_compiles_after_the_start() -> None:
    for kind, line in zip(KINDS, run_alone(__file__, *KINDS), strict=True):
        got = json.loads(line)
        assert got["late"] == [], kind
        assert 0 < len(got["first"]) <= 12 and got["threads"], (kind, got)


def test_launches_compile_and_do_not_run() -> None:
    """What fails to compile raises nothing: the launch that needs it will."""
    ran = []

    def kernel() -> None:
        ran.append(threading.current_thread().name)
        raise ValueError

    from kvfold.ops.common.recording import launch_cuda

    reports: list[tuple[int, int]] = []
    with CompileAhead(torch.device("cpu"), lambda *x: reports.append(x)):
        assert compiling_ahead() is not None
        for _ in range(2):
            launch_cuda(kernel, 1, 32, [], 0)
        zeros = torch.full((3,), 7).new_empty(5), torch.empty_like(torch.ones(4))
    assert len(ran) == 1 and ran[0].startswith("kvfold-compile") and reports == [(1, 1)]
    assert not any(x.any() for x in zeros) and compiling_ahead() is None
    with pytest.raises(ValueError):
        launch_cuda(kernel, 1, 32, [], 0)


def test_an_error_ends_the_compilation() -> None:
    with pytest.raises(KeyError), CompileAhead(torch.device("cpu")):
        raise KeyError
    assert compiling_ahead() is None


if __name__ == "__main__":
    compiler = Compiler()
    for kind in sys.argv[1:]:
        print(json.dumps(compile_and_run(kind, compiler)))
