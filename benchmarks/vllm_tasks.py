"""Suites of `kvfold eval`, answered by vLLM with a cache type of its own, or with kvfold's plugin.

    python benchmarks/vllm_tasks.py reference:qwen2.5-coder-1.5b --kv-cache-dtype fp8 \\
        --suites math=gsm8k-test.jsonl --set suite-rows=500 --json fp8.json

As `kvfold eval --set engine=vllm`, which leaves vLLM's cache type alone. The JSON is that of
`kvfold eval --suite`, with `cache`. --kv: the cache takes as many bytes, so that other processes
may have the rest of the GPU. --bits, --maps, --window: of kvfold's cache.
"""

import argparse
import os
from functools import partial
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import vllm

from kvfold.cli.bench_common import versions
from kvfold.cli.options import Place, Storage
from kvfold.cli.suites import answers, read_questions
from quantised_tasks import add_suites, suite_flags, write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--maps")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--kv", type=float, default=7, help="gigabytes of cache")
    add_suites(parser)
    given = parser.parse_args()
    flags = suite_flags(parser, given, engine="vllm")
    questions = read_questions(given.model, flags)
    cache = {"engine": f"vllm {vllm.__version__}", "kv_cache_dtype": given.kv_cache_dtype}
    settings: dict[str, Any] = {"bits": given.bits, "window": given.window}
    of_cache = {
        "kv_cache_dtype": given.kv_cache_dtype,
        "kv_cache_memory_bytes": int(given.kv * 1e9),
        "gpu_memory_utilization": 0.1,  # is asked to be free, and does not decide
    }
    with patch.object(vllm, "LLM", partial(vllm.LLM, **of_cache)):
        results = answers(given.model, questions, flags, Storage(**settings), Place(), given.maps)
    cache |= settings | {"maps": given.maps}
    write_results(given, results, cache, versions("cuda"))


if __name__ == "__main__":
    main()
