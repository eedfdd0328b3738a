"""What settings cost a real model, in nats, retrieval and tasks, and what their steps take.

    python benchmarks/real_tasks.py --model reference:qwen2.5-coder-1.5b --folder /tmp/made \\
        --settings swift-4x small-8x --text wiki.txt python.txt \\
        --suites HumanEval.jsonl.gz gsm8k-test.jsonl

A setting is compressed once, into a folder of its own: a folded checkpoint, or with `maps-` before
its name maps beside the weights. Then in float32 its nats a token on every text (windows of 2048
tokens) and hidden facts at 512 to 4096 tokens; in bfloat16 HumanEval and GSM8K through
`kvfold.LLM`, or vLLM with --engine vllm, 64 at a time; and with --steps BATCH CONTEXT the median
decode step. One JSON file a setting, in --folder, written as it is measured: several processes may
share a GPU, each with settings of its own. --ties says, once both engines have answered, how far
apart the two tokens were where their answers first differ.
"""

import argparse
import gc
import json
import os
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import kvfold
from kvfold.config import CacheConfig
from kvfold.engine.api.stream import Stream
from kvfold.engine.requests.params import SamplingParams
from kvfold.evaluation.measure import NEEDLE_LENGTHS, Measurement, measure, text_windows
from kvfold.evaluation.suites import read_suite
from kvfold.evaluation.suites.engines import Answering, ByKVFold, ByVLLM, Reply
from kvfold.evaluation.suites.prompts import Prompt
from kvfold.evaluation.suites.run import run_suite
from kvfold.hub.loading import load, load_config, load_tokenizer, resolve
from kvfold.maps.sidecar import Sidecar
from kvfold.utils.files import finite
from kvfold.utils.progress import Report

PLAIN: dict[str, dict[str, Any]] = {
    "original": {},
    "bits-8": {"bits": 8},
    "bits-4": {"bits": 4},
    "bits-4-window": {"bits": 4, "window": 128},
}
CTX, TOKENS, SLOTS, LONGEST = 2048, 32768, 64, 2048
STEPS, SKIPPED = 100, 10  # timed, after so many that are not
LIKELIEST, UNLIKELY = 20, -1e3  # tokens whose log-probability is read, and that of all others


MAPS = "maps-"


def planned(name: str) -> dict[str, Any]:
    """Arguments of `kvfold.compress` of a setting such as swift-4x, swift-4x-speed, small-8x-150 or
    small-8x-64k-self: a recipe, a factor, then what it is planned for, steps of recovery, thousands
    of tokens to calibrate on, and that the model writes them. `default` has none."""
    if name == "default":
        return {}
    recipe, factor, *more = name.split("-")
    found: dict[str, Any] = {"recipe": recipe, "factor": float(factor.removesuffix("x"))}
    for word in more:
        if word.isdigit():
            found["recover"] = int(word)
        elif word.removesuffix("k").isdigit():
            found["max_tokens"] = 1024 * int(word.removesuffix("k"))
        else:
            found |= {"calib": ["self"]} if word == "self" else {"prefer": word}
    return found


class Keeping:
    """An engine that also remembers the token ids of its prompts and answers."""

    def __init__(self, engine: Answering) -> None:
        self.engine, self.name, self.tokenizer = engine, engine.name, engine.tokenizer
        self.prompts: list[list[int]] = []
        self.tokens: list[list[int]] = []

    def answer(self, prompts: Sequence[Prompt], report: Report | None = None) -> list[Reply]:
        replies = self.engine.answer(prompts, report)
        self.prompts += [list(prompt.ids) for prompt in prompts]
        self.tokens += [list(reply.token_ids) for reply in replies]
        return replies


class Setting:
    """One of PLAIN, or a checkpoint made from `planned`, or maps, by `maps-` and such a name."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.given = name, given
        self.cache = PLAIN.get(name, {})
        self.maps = str(given.folder / name) if name.startswith(MAPS) else None
        whole = name in PLAIN or self.maps
        self.model = given.model if whole else str(given.folder / name)
        self.record: dict[str, Any] = {"setting": name, "model": given.model}

    def make(self) -> None:
        output = Path(self.maps or self.model)
        if self.name in PLAIN or output.exists():
            return
        begin = time.perf_counter()
        fold, wanted = not self.maps, planned(self.name.removeprefix(MAPS))
        kvfold.compress(
            self.given.model, fold=fold, output=output, check=self.given.check, **wanted
        )
        self.record["compress_s"] = time.perf_counter() - begin

    def read(self) -> None:
        """Nats and hidden facts, in float32."""
        config, tokenizer = load_config(self.given.model), load_tokenizer(self.given.model)
        texts = {path.stem: path.read_text(encoding="utf-8") for path in self.given.text}
        what = Measurement(
            windows=text_windows(config, tokenizer, texts, ctx=CTX, max_tokens=TOKENS),
            needle=self.given.needle,
            lengths=NEEDLE_LENGTHS,
            cache=None if self.name == "original" else CacheConfig(**self.cache),
            chunk=CTX,
            maps=Sidecar.load(self.maps) if self.maps else None,
        )
        found = measure(load(self.model, dtype="float32"), tokenizer, what)
        self.record["nll"] = {name: x.nll for name, x in found.texts.items()}
        self.record["window_nll"] = {name: x.window_nll for name, x in found.texts.items()}
        self.record["needle"] = {length: x.exact for length, x in found.needle.items()}

    def answer(self) -> None:
        """Tasks, in bfloat16."""
        begin = time.perf_counter()
        engine = Keeping(self._engine())
        self.record["ready_s"] = time.perf_counter() - begin
        for name, path in zip(("code", "math"), self.given.suites, strict=False):
            result = run_suite(name, read_suite(name, path, self.given.rows), engine)
            self.record[name] = result.record()
            print(self.name, name, result.right, "of", len(result.answers), result.errors)
        self.record |= {"prompts": engine.prompts, "tokens": engine.tokens}

    def _engine(self) -> Answering:
        if self.given.engine == "kvfold":
            return ByKVFold(self._llm(SLOTS, LONGEST))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        more: dict[str, Any] = {}
        if self.cache or self.maps:
            maps = {"maps": self.maps} if self.maps else {}
            more = {"additional_config": {"kvfold": {**self.cache, **maps}}}
        model = str(resolve(self.model))
        about = {"max_num_seqs": SLOTS, "max_model_len": LONGEST, "dtype": "bfloat16"}
        share: dict[str, Any] = {"gpu_memory_utilization": self.given.share}
        if self.given.kv:
            share["kv_cache_memory_bytes"] = int(self.given.kv * 2**30)
        return ByVLLM(vllm.LLM(model=model, **about, **share, **more), load_tokenizer(self.model))

    def _llm(self, slots: int, longest: int, **more: Any) -> kvfold.LLM:
        return kvfold.LLM(
            self.model,
            dtype="bfloat16",
            max_sequences=slots,
            max_tokens=longest,
            maps=self.maps,
            **more,
            **self.cache,
        )

    def compare(self) -> None:
        """Where both engines' answers first differ: by how many nats their tokens do."""
        ours, theirs = (json.loads(self.file(x).read_text()) for x in ("kvfold", "vllm"))
        pairs = zip(ours["prompts"], ours["tokens"], theirs["tokens"], strict=True)
        places = [(p, a, b, _parted(a, b)) for p, a, b in pairs if a != b]
        places = [place for place in places if place[-1] is not None]
        llm = self._llm(SLOTS, LONGEST)
        asked = SamplingParams(max_new_tokens=1, logprobs=LIKELIEST, ignore_eos=True)
        prompts = [p + a[:n] for p, a, _, n in places]
        gaps = []
        for (_, a, b, n), done in zip(places, llm.generate(prompts, asked), strict=True):
            (found,) = done.logprobs or ()
            likely = dict(found.top)
            gaps.append(abs(likely.get(a[n], UNLIKELY) - likely.get(b[n], UNLIKELY)))
        self.record["parted"] = {"answers": len(ours["tokens"]), "gaps": sorted(gaps)}
        print(self.name, f"{len(gaps)} of {len(ours['tokens'])} part, by", sorted(gaps)[-8:])

    def file(self, kind: str) -> Path:
        return Path(self.given.folder) / f"{self.name}-{kind}.json"

    def step(self) -> None:
        """The median decode step of as many sequences, all of them as long."""
        batch, context = self.given.steps
        begin = time.perf_counter()
        llm = self._llm(batch, context + STEPS + 2 * SKIPPED, prefix_caching=False)
        self.record["ready_s"] = time.perf_counter() - begin
        top = load_config(self.given.model).vocab_size
        ids = torch.randint(top // 2, (batch, context), generator=torch.Generator().manual_seed(0))
        wanted = SamplingParams(max_new_tokens=STEPS + 2 * SKIPPED, ignore_eos=True)
        opened = [llm.request(own, wanted, None, whole=True) for own in ids.tolist()]
        last, seen, times = opened[-1][0].id, set[int](), list[float]()
        with Stream(llm.engine).submit(opened) as stream:
            for output in stream:
                seen.add(output.id)
                if len(seen) == batch and output.id == last:
                    times.append(time.perf_counter())
        steps = [y - x for x, y in pairwise(times)][SKIPPED:STEPS]
        self.record["step_ms"] = 1e3 * float(torch.tensor(steps).median())
        self.record["storage"] = dict(llm.summary())
        print(self.name, f"{batch} x {context}: {self.record['step_ms']:.2f} ms a step")


def _parted(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place where two answers differ, None where one begins the other."""
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="reference:qwen2.5-coder-1.5b")
    parser.add_argument("--settings", nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--text", nargs="*", type=Path, default=())
    parser.add_argument("--needle", type=int, default=5, help="contexts of four facts a length")
    parser.add_argument("--suites", nargs="*", type=Path, default=(), help="of code, then of math")
    parser.add_argument("--rows", type=int, help="first questions of each suite")
    parser.add_argument("--engine", choices=("kvfold", "vllm"), default="kvfold")
    parser.add_argument("--share", type=float, default=0.9, help="of the GPU's memory, for vLLM")
    parser.add_argument("--kv", type=float, help="GiB of vLLM's cache, beside other processes")
    parser.add_argument("--drop", action="store_true", help="checkpoints once they are measured")
    parser.add_argument("--no-check", dest="check", action="store_false", help="of what was made")
    parser.add_argument("--ties", action="store_true", help="of answers of both engines")
    parser.add_argument("--steps", nargs=2, type=int, metavar=("BATCH", "CONTEXT"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.settings:
        setting = Setting(name, given)
        setting.make()
        for wanted, run in (
            (given.text, setting.read),
            (given.suites, setting.answer),
            (given.ties, setting.compare),
            (given.steps, setting.step),
        ):
            if wanted:
                run()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                kinds = {"ties": given.ties, "steps": given.steps, given.engine: True}
                file = setting.file(next(kind for kind, found in kinds.items() if found))
                file.write_text(json.dumps(finite(setting.record)))
                print(
                    name, {x: setting.record[x] for x in ("nll", "needle") if x in setting.record}
                )
        if given.drop and name not in PLAIN:
            shutil.rmtree(setting.maps or setting.model)


if __name__ == "__main__":
    main()
