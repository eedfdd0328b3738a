"""Bytes of the page pool while serving, beside what was predicted, and the process's own peak.

    python benchmarks/cache_bytes.py reference:gqa --bits 4 --json bytes.json

Prints one JSON object: `predicted_bytes`, pages of all requests at their longest, counted from the
layout before anything runs; `high_water_bytes`, the most that pages held; `process_peak_bytes`, by
which serving raised the process's peak memory (transient tensors and the pool, of which only
touched bytes count).
"""

import argparse
import json
import resource
from pathlib import Path

import torch

import kvfold
from kvfold.utils.files import write_json


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--bits", type=int)
    parser.add_argument("--evict")
    parser.add_argument("--keep-tokens", type=float)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    longest = arguments.tokens + arguments.new_tokens
    llm = kvfold.LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_sequences=arguments.requests,
        max_tokens=longest,
        chunk=128,
        bits=arguments.bits,
        evict=arguments.evict,
        keep_tokens=arguments.keep_tokens,
    )
    pool = llm.runner.pool
    generator = torch.Generator().manual_seed(0)
    vocabulary = llm.model.config.vocab_size
    prompts = torch.randint(
        5, vocabulary, (arguments.requests, arguments.tokens), generator=generator
    )
    before = peak()
    sampling = kvfold.SamplingParams(max_new_tokens=arguments.new_tokens, ignore_eos=True)
    llm.generate(prompts.tolist(), sampling)
    pages = -(-(longest - 1) // pool.layout.page)  # the last token is never read
    found = {
        "settings": {key: str(value) for key, value in vars(arguments).items()},
        "kept_fraction": pool.layout.kept_fraction,
        "predicted_bytes": pool.layout.page_bytes * pages * arguments.requests,
        "high_water_bytes": pool.stats().high_water_bytes,
        "process_peak_bytes": peak() - before,
    }
    print(json.dumps(found))
    if arguments.json:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
