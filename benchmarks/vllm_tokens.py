"""Whether vLLM with kvfold's plugin gives the tokens that transformers gives, on a GPU.

    python benchmarks/vllm_tokens.py --json tokens.json --cases "reference:gqa fast .5"

A case: a model, a recipe, and what it keeps (up to 1) or how many times smaller it is; or a model
in so many bits. Prompts of 5 to 333 tokens, two of which begin alike, are answered greedily, twice,
prefill in chunks of at most 128 tokens, prefix caching on, decode steps in CUDA graphs. Compared
with transformers in float32; where bits are planned or set, which it does not store, with
kvfold.LLM in the same dtype. parted: for every prompt whose tokens differ, the first place, and how
far the other engine's first token was ahead of its second there, in log-probabilities. off: how far
log-probabilities of first new tokens differ, where these are the same.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from forks import forked

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
# Steps start sooner without compiled pieces; asking whether there is a GPU must not begin using it.
os.environ |= {"KVFOLD_COMPILE": "off", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

CASES = "; ".join(
    f"reference:{model} {case}"
    for model in ("gqa", "mha")
    for case in ("fast .5", "palu-j .5", "swift 5", "lean 6", "small 8", "bits 4")
)
LENGTHS = 5, 40, 170, 333  # tokens of prompts; then two that share SHARED
SHARED = 150


class Case(NamedTuple):
    model: str
    recipe: str
    size: float

    @property
    def bits(self) -> int | None:
        return int(self.size) if self.recipe == "bits" else None

    @property
    def whole(self) -> bool:
        """Whether numbers keep 16 bits, so that transformers computes the same."""
        return self.recipe != "bits" and self.size <= 1


class Answer(NamedTuple):
    """To every prompt: tokens; how far each was ahead of the next one; the first one's
    log-probability."""

    tokens: list[list[int]]
    ahead: list[list[float]]
    first: list[float]


@lru_cache
def prompts() -> list[list[int]]:
    from kvfold.hub.loading import load_tokenizer
    from kvfold.utils.text import packaged

    ids = load_tokenizer("reference:gqa")(packaged("calibration.txt")[:20000])["input_ids"]
    found = [ids[100 * i : 100 * i + n] for i, n in enumerate(LENGTHS)]
    shared = ids[2000 : 2000 + SHARED]
    return [*found, shared + ids[3000:3010], shared + ids[3100:3130]]


# -- each in a process of its own -----------------------------------------------------------------


def compressed(case: Case, folder: str, new: int) -> Answer | None:
    """The checkpoint, and transformers' answer where that is what to compare with."""
    import torch

    import kvfold

    keep, factor = (case.size, None) if case.size <= 1 else (None, case.size)
    kvfold.compress(
        case.model, case.recipe, keep=keep, factor=factor, output=folder, max_tokens=4096,
        device="cpu", fold=True,
    )  # fmt: skip
    if not case.whole:
        return None
    model, tokens, ahead = kvfold.load(folder, dtype=torch.float32, device="cpu"), [], []
    first = []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        tops = [score[0].topk(2).values for score in out.scores]
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        ahead.append([float(a - b) for a, b in tops])
        first.append(float(out.scores[0][0].log_softmax(-1).max()))
    return Answer(tokens, ahead, first)


def by_the_engine(model: str, bits: int | None, dtype: str, new: int) -> Answer:
    import kvfold

    llm = kvfold.LLM(model, max_tokens=512, kv_bytes=2**28, dtype=dtype, bits=bits)
    wanted = kvfold.SamplingParams(max_new_tokens=new, ignore_eos=True, logprobs=2)
    found = llm.generate(prompts(), wanted)
    logprobs = [out.logprobs or () for out in found]
    tops = [[sorted(y for _, y in x.top) for x in own] for own in logprobs]
    return Answer(
        [list(out.token_ids) for out in found],
        [[x[-1] - x[-2] for x in own] for own in tops],
        [own[0].chosen for own in logprobs],
    )


def served(model: str, bits: int | None, dtype: str, new: int) -> dict[str, Any]:
    """vLLM's, of the first and of the second time."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"block_size": 64, "max_model_len": 512, "max_num_seqs": 8}
    if bits:
        options["additional_config"] = {"kvfold": {"bits": bits}}
    sizes = [1, 2, 4, 8]
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    llm = LLM(
        model,
        dtype=dtype,
        max_num_batched_tokens=128,
        compilation_config=graphs | {"mode": 0},  # nothing is compiled, to start soon
        kv_cache_memory_bytes=2**28,
        gpu_memory_utilization=0.01,
        **options,
    )
    wanted = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=1)
    asked = [{"prompt_token_ids": x} for x in prompts()]
    outputs = [llm.generate(asked, wanted, use_tqdm=False) for _ in range(2)]
    compilation = llm.llm_engine.vllm_config.compilation_config
    return {
        "tokens": [[list(x.outputs[0].token_ids) for x in out] for out in outputs],
        "first": [
            [x.outputs[0].logprobs[0][x.outputs[0].token_ids[0]].logprob for x in out]
            for out in outputs
        ],
        "cached": [x.num_cached_tokens for x in outputs[1]],
        "graphs": str(compilation.cudagraph_mode),
    }


# -- in the process that asks ---------------------------------------------------------------------


def compare(case: Case, dtype: str, new: int) -> dict[str, Any]:
    from kvfold.hub.loading import resolve

    with tempfile.TemporaryDirectory() as folder:
        model, want = case.model, None
        if case.bits is None:
            model, want = folder, forked(compressed, case, folder, new)
        else:
            model = str(resolve(model))
        if want is None:
            want = forked(by_the_engine, model, case.bits, dtype, new)
        found = forked(served, model, case.bits, dtype, new)
    rows = {}
    for i, name in enumerate(("first", "again")):
        tokens, parted, off = found["tokens"][i], [], []
        each = zip(prompts(), tokens, found["first"][i], *want, strict=True)
        for prompt, got, likely, wanted, ahead, sure in each:
            if got[0] == wanted[0]:
                off.append(abs(likely - sure))
            if got != wanted:
                at = next(k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
                parted.append({"prompt": len(prompt), "at": at, "ahead": round(ahead[at], 4)})
        rows[name] = {"equal": len(tokens) - len(parted), "of": len(tokens), "parted": parted}
        rows[name] |= {"off_median": statistics.median(off), "off_max": max(off)} if off else {}
    against = "transformers float32" if case.whole else f"kvfold.LLM {dtype}"
    about = {"against": against, "cached": found["cached"], "graphs": found["graphs"]}
    return case._asdict() | about | rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    import vllm
    import vllm.v1.worker.gpu_worker  # before the forks

    prompts()  # as well
    settings = {"dtype": given.dtype, "new": given.new, "vllm": vllm.__version__}
    found: dict[str, Any] = {"benchmark": "vllm tokens", "settings": settings, "rows": []}

    def one(text: str) -> None:
        begun, (model, recipe, size) = time.perf_counter(), text.split()
        case = Case(model, recipe, float(size))
        try:
            row = compare(case, given.dtype, given.new)
        except Exception as error:
            row = {**case._asdict(), "failed": str(error)}
        row["seconds"] = round(time.perf_counter() - begun, 1)
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(one, given.cases.split("; ")))


if __name__ == "__main__":
    main()
