"""Suites of `kvfold eval`, answered by a model whose cache a published quantiser rounds.

    python benchmarks/quantised_tasks.py reference:qwen2.5-coder-1.5b --quantiser oscar-2 \\
        --recent 256 --first 64 --suites ruler --set suite-length=4096 --json rows.json

kvfold's engine does not have these quantisers, so the model runs in plain PyTorch. Its cache holds,
in the model's dtype, what keys and values are when they are read again: the --first and --recent
tokens exactly, others rounded (`published_quantisers`). A prompt's tokens attend as if they came
one by one, as in kvfold's engine; --exact-prompt: to exact tokens, as in OSCAR's release. Without
--quantiser the cache is exact. Bytes are counted, not taken. The JSON is that of
`kvfold eval --suite`, with `cache`.

Shapes: B slots, S tokens of the longest sequence, T of a prompt, Hq / Hk heads, d head dim.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.cli.bench_common import versions
from kvfold.cli.suites import SuiteFlags, length_of, read_questions
from kvfold.engine.api.detokenizer import Detokenizer, decoder_of
from kvfold.evaluation.dense import inference
from kvfold.evaluation.suites.engines import Reply
from kvfold.evaluation.suites.prompts import Prompt
from kvfold.evaluation.suites.run import SuiteResult, run_suite
from kvfold.hub.loading import load, load_tokenizer
from kvfold.maps.layers import using_attention
from kvfold.models.families import family_of
from kvfold.utils.files import finite, write_json
from kvfold.utils.progress import Report
from published_quantisers import CALIBRATION_TOKENS, NAMES, Quantiser, calibrated
from windowed import Window, mixed

NAME = "kvfold_benchmark_quantised"
COUNTS = ("suite-rows", "suite-length", "suite-tokens", "max-sequences")  # of --set


class Slots:
    """The caches of B sequences, and the attention to them.

    keys, values: [B, Hk, S, d] of each layer. lengths: int64 [B], tokens of each sequence, and
    longest: the largest of these with the token that is decoded. prompt: the slot whose prompt is
    read; None: every slot decodes a token.
    """

    def __init__(
        self, model: Any, quantiser: Quantiser | None, window: Window, slots: int, longest: int
    ) -> None:
        geometry = family_of(model.config).geometry(model.config)
        shape = slots, geometry.num_kv_heads, longest, geometry.head_dim
        places = range(geometry.num_layers)
        options = {"dtype": model.dtype, "device": model.device}
        self.keys, self.values = ([torch.zeros(shape, **options) for _ in places] for _ in "kv")
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self.quantiser, self.window = quantiser, window
        self.prompt: int | None = None
        self.exact_prompt, self.longest = False, 0

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any
    ) -> tuple[Tensor, None]:
        """Attention function for transformers: [B, heads, T, d] -> [B, T, Hq, d]."""
        attend = self._decode if self.prompt is None else self._read
        return attend(module.layer_idx, query, key, value, named["scaling"]).transpose(1, 2), None

    def _stored(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [Hk, T, d] as they are read again."""
        if self.quantiser is None:
            return k, v
        return self.quantiser.keys(layer, k), self.quantiser.values(layer, v)

    def _read(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """A prompt of T tokens, the first of its slot."""
        slot, count = self.prompt, q.shape[2]
        coarse = self._stored(layer, k[0], v[0])
        near = self.window.near(count, count, q.device)
        caches = self.keys[layer], self.values[layer]
        for cache, exact, rounded in zip(caches, (k[0], v[0]), coarse, strict=True):
            cache[slot, :, :count] = torch.where(near[-1, :, None], exact, rounded)
        if self.exact_prompt or self.quantiser is None:
            near = torch.ones_like(near)
        return mixed((q[0], k[0], v[0]), (q[0], *coarse), near, scale)[None]

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """One token of every slot. The token that leaves the window is rounded."""
        keys, values = self.keys[layer], self.values[layer]
        slots = torch.arange(len(q), device=q.device)
        for cache, new in ((keys, k), (values, v)):
            cache[slots, :, self.lengths] = new[:, :, 0]
        leaving = self.lengths - self.window.tokens
        at = leaving.clamp(min=0)
        old = keys[slots, :, at], values[slots, :, at]  # [B, Hk, d]
        stored = self._stored(layer, *(x.transpose(0, 1) for x in old))
        leaves = (leaving >= self.window.first)[:, None, None]
        for cache, exact, rounded in zip((keys, values), old, stored, strict=True):
            cache[slots, :, at] = torch.where(leaves, rounded.transpose(0, 1), exact)
        longest = self.longest
        seen = torch.arange(longest, device=q.device) <= self.lengths[:, None]
        return scaled_dot_product_attention(
            q,
            keys[:, :, :longest],
            values[:, :, :longest],
            attn_mask=seen[:, None, None],
            scale=scale,
            enable_gqa=True,
        )


class Answer:
    """A prompt's answer so far."""

    def __init__(self, place: int, prompt: Prompt, tokenizer: Any, ends: frozenset[int]) -> None:
        self.place, self.prompt, self.ends = place, prompt, ends
        self.tokens: list[int] = []
        self.text = Detokenizer(decoder_of(tokenizer), prompt.ids, prompt.stop)
        self.reply: Reply | None = None

    def push(self, token: int) -> None:
        """Add a token, which may end the answer."""
        self.tokens.append(token)
        reason = "eos" if token in self.ends else None
        if reason is None and self.text.push([token]) is not None:
            reason = "stop"
        if reason is None and len(self.tokens) == self.prompt.max_new_tokens:
            reason = "length"
        if reason is not None:
            text = self.text.take(last=True)
            self.reply = Reply(text=text, token_ids=tuple(self.tokens), finish_reason=reason)


class ByPyTorch:
    """Answers suites with a model and a quantised cache, `slots` prompts at once."""

    name = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        quantiser: Quantiser | None,
        window: Window,
        *,
        slots: int,
        exact_prompt: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.quantiser, self.window, self.exact_prompt = quantiser, window, exact_prompt
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self.ends = frozenset(ends if isinstance(ends, list | tuple) else [ends])

    def answer(self, prompts: Sequence[Prompt], report: Report | None = None) -> list[Reply]:
        longest = max(len(x.ids) + x.max_new_tokens for x in prompts)
        slots = Slots(
            self.model, self.quantiser, self.window, min(self.slots, len(prompts)), longest
        )
        slots.exact_prompt = self.exact_prompt
        ALL_ATTENTION_FUNCTIONS.register(NAME, slots.attention)
        with using_attention(self.model, lambda _: NAME), inference(self.model):
            return self._answer(slots, prompts, report)

    def _answer(
        self, slots: Slots, prompts: Sequence[Prompt], report: Report | None
    ) -> list[Reply]:
        replies: list[Reply | None] = [None] * len(prompts)
        waiting = deque(Answer(i, x, self.tokenizer, self.ends) for i, x in enumerate(prompts))
        running: list[Answer | None] = [None] * len(slots.lengths)
        while waiting or any(running):
            for slot, answer in enumerate(running):
                if answer is None and waiting:
                    running[slot] = answer = waiting.popleft()
                    answer.push(self._prefill(slots, slot, answer.prompt.ids))
            for slot, token in enumerate(self._step(slots, running)):
                answer = running[slot]
                if answer is None:
                    continue
                if answer.reply is None:
                    answer.push(token)
                if answer.reply is not None:
                    replies[answer.place], running[slot] = answer.reply, None
                    if report is not None:
                        report(sum(x is not None for x in replies), len(prompts))
        return [reply for reply in replies if reply is not None]

    def _prefill(self, slots: Slots, slot: int, ids: Sequence[int]) -> int:
        """Read a prompt, and return the likeliest next token."""
        slots.prompt = slot
        logits = self._logits(torch.tensor([ids]), torch.arange(len(ids))[None])
        slots.prompt = None
        slots.lengths[slot] = len(ids)
        return int(logits[0].argmax())

    def _step(self, slots: Slots, running: Sequence[Answer | None]) -> list[int]:
        """The likeliest next token of every slot, after the last one of its answer. A slot without
        one reads a token for nothing."""
        last = [x.tokens[-1] if x else 0 for x in running]
        lengths = slots.lengths
        lengths.clamp_(max=slots.keys[0].shape[2] - 1)
        slots.longest = int(lengths.max()) + 1
        logits = self._logits(torch.tensor(last)[:, None], lengths[:, None])
        lengths += 1
        return logits.argmax(-1).tolist()

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, V] after the last of ids [B, T]."""
        inputs = {"input_ids": ids, "position_ids": positions}
        inputs = {name: x.to(self.model.device) for name, x in inputs.items()}
        logits: Tensor = self.model(**inputs, use_cache=False, logits_to_keep=1).logits
        return logits[:, -1]


def add_suites(parser: argparse.ArgumentParser) -> None:
    """The arguments that choose questions, and the file of results."""
    parser.add_argument("--suites", nargs="+", default=["ruler"], help="of `kvfold eval --suite`")
    parser.add_argument("--set", nargs="*", default=[], help=f"NAME=NUMBER of {', '.join(COUNTS)}")
    parser.add_argument("--json", type=Path, required=True)


def suite_flags(
    parser: argparse.ArgumentParser, given: argparse.Namespace, **more: Any
) -> SuiteFlags:
    """What the arguments say, and `more` flags. Ends the program for an unknown --set."""
    counts = dict(pair.partition("=")[::2] for pair in given.set)
    if unknown := [x for x in counts if x not in COUNTS]:
        parser.error(f"--set takes {', '.join(COUNTS)}; got {unknown[0]}")
    named: dict[str, Any] = {x.replace("-", "_"): int(value) for x, value in counts.items()}
    return SuiteFlags(suite=tuple(given.suites), **named, **more)


def write_results(
    given: argparse.Namespace, results: dict[str, SuiteResult], cache: dict, versions: dict
) -> None:
    """Print scores, and write what `kvfold eval --suite` writes, with `cache`."""
    for name, result in results.items():
        print(f"{name}: {100 * result.score.mean:.1f} %, {result.seconds:.0f} s", flush=True)
    about = {"model": given.model, "cache": cache, "versions": versions}
    suites = {name: result.record() for name, result in results.items()}
    write_json(given.json, finite(about | {"suites": suites}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--quantiser", choices=NAMES, help="none: an exact cache")
    parser.add_argument("--recent", type=int, default=0, help="exact last tokens")
    parser.add_argument("--first", type=int, default=0, help="exact first tokens")
    parser.add_argument("--exact-prompt", action="store_true")
    add_suites(parser)
    parser.add_argument("--calib-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    flags = suite_flags(parser, given)
    questions = read_questions(given.model, flags)
    model, tokenizer = load(given.model, dtype=given.dtype), load_tokenizer(given.model)
    quantiser, stored_bits = None, 16.0
    if given.quantiser:
        quantiser = NAMES[given.quantiser](calibrated(model, tokenizer, given.calib_tokens))
        stored_bits = quantiser.stored_bits
    window = Window(kind="whole", tokens=given.recent, first=given.first)
    how = {"slots": flags.max_sequences, "exact_prompt": given.exact_prompt}
    engine = ByPyTorch(model, tokenizer, quantiser, window, **how)
    most, length = flags.suite_tokens, length_of(given.model, flags)
    results = {
        name: run_suite(name, rows, engine, max_new_tokens=most, length=length)
        for name, rows in questions.items()
    }
    cache = {"quantiser": given.quantiser, "stored_bits": stored_bits}
    cache |= {"recent": given.recent, "first": given.first, "exact_prompt": given.exact_prompt}
    write_results(given, results, cache, versions(model.device))


if __name__ == "__main__":
    main()
