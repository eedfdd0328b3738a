"""What a compressed cache loses along a long answer: KL(original || compressed) by position.

    python benchmarks/answer_divergence.py reference:smollm2 --folder made \\
        --prompts gsm8k-test.jsonl --settings bits-4 bits-4+128 maps-small-8x \\
        maps-small-9x@128 --pairs maps-small-9x@128 maps-small-8x

The original answers each question greedily, and never with an end of text. Then a setting reads the
prompt and the original's answer, where every token attends to what the setting stored of all the
tokens before it: as in decoding, but many tokens at once (`windowed`). --shots: as many questions
with the original's own answers stand before each. --text: pieces of a text instead, of which
--context tokens are the prompt and the next --tokens the answer.

Settings are named as in real_tasks.py, or kivi-BITS, kvquant-BITS or a name of
published_quantisers.py. `+R` keeps the last 1 to R tokens in 16 bits (`--set residual=R`). `@N`
keeps the last N tokens exactly (`--set window=N`): there, and for KVQuant, kvfold's engine decodes
the answer, all questions in one batch. `~KIND-TOKENS-FIRST` adds a window that kvfold has not
(`windowed.Window`).

nats: increase of the cross-entropy of the answer's tokens. flips: share of positions where another
token is the likeliest. smaller: than 16 bits a number, at a context of so many tokens. growth: KL
in the last quarter less KL in the first. pairs: the KL and the nats of one setting less those of
another. Standard errors are over questions, which pairs share.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

import kvfold
from kvfold.cli.bench_common import versions
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.trial import run_tokens
from kvfold.hub import checkpoint
from kvfold.hub.loading import load, load_config, load_tokenizer
from kvfold.layout import CacheSpec
from kvfold.layout.formats import format_of
from kvfold.layout.pages import cache_layout
from kvfold.maps.sidecar import Sidecar
from kvfold.utils.chat import encode_chat
from kvfold.utils.files import write_json
from kvfold.utils.text import running
from kvfold.utils.tokens import windows
from published_quantisers import NAMES, Kivi, Moments, Quantiser, calibrated
from real_tasks import MAPS, planned
from windowed import Reader, Window, spec_of, windowed

PAGE, POOL = 32, 2**31  # bytes of the page pool
CONTEXTS = (1024, 8192)  # tokens at which sizes are stated
KINDS = {"bits": "integers", "kivi": "kivi", "kvquant": "kvquant"}  # formats, by names of settings


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Token ids that stand before all B prompts, of the rest of each prompt, and of its answer of N
    tokens; and the original's log-probabilities [N, V] before each of them."""

    before: list[int]
    prompts: Sequence[list[int]]
    tokens: Sequence[list[int]]
    logp: Sequence[Tensor]

    @classmethod
    def of(cls, model: Any, prompts: Sequence[list[int]], tokens: Sequence[list[int]]) -> Self:
        """Answers with the original's distributions along them."""
        same = next(i for i, x in enumerate(zip(*prompts, strict=False)) if len(set(x)) > 1)
        found = cls(
            before=prompts[0][:same], prompts=[x[same:] for x in prompts], tokens=tokens, logp=()
        )
        with windowed(model, None, 16, Window()) as read:
            return replace(found, logp=list(found.read(read)))

    def read(self, read: Reader) -> Iterator[Tensor]:
        """A reader's log-probabilities [N, V] along each answer."""
        if self.before:
            read.remember(self.before)
        for prompt, answer in zip(self.prompts, self.tokens, strict=True):
            logits = read(prompt + answer[:-1])[-len(answer) :]
            yield logits.float().log_softmax(-1)


def answered(
    model: Any, prompts: Sequence[list[int]], count: int, end: int | None = None
) -> list[list[int]]:
    """Answer every prompt greedily with `count` tokens, none of which is `end`."""
    answers: list[list[int]] = [[] for _ in prompts]
    longest = -(-(max(map(len, prompts)) + count) // PAGE) * PAGE
    config = CacheConfig(kv_bytes=POOL)
    runner = build_runner(model, config, num_slots=len(prompts), max_tokens=longest)
    for logits in run_tokens(runner, prompts, answers):  # which reads what is appended here
        if len(answers[0]) == count:
            break
        if end is not None:
            logits[:, end] = -torch.inf
        for answer, token in zip(answers, logits.argmax(-1).tolist(), strict=True):
            answer.append(token)
    return answers


def chat(asked: dict[str, str], before: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """A question after others that are answered."""
    turns = [(x["question"], x["answer"]) for x in before] + [(asked["question"], "")]
    texts = [text for turn in turns for text in turn][:-1]
    return [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(texts)]


class Setting:
    """A setting's name, such as bits-4+128 or maps-swift-5x@64, and where its maps are."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.given = name, given
        plain, _, window = name.partition("~")
        plain, _, exact = plain.partition("@")
        self.base, _, last = plain.partition("+")
        kind = f"residual-{last}" if last else f"whole-{exact}" if exact else window
        self.window = Window.parse(kind) if kind else Window()
        self.maps = given.folder / self.base if self.base.startswith(MAPS) else None
        self.quantiser = self.base if self.base in NAMES else None
        kind, _, bits = self.base.partition("-")
        self.format, self.bits, self.folded = "integers", None, None
        if self.quantiser or self.base == "original":
            self.bits = 16
        elif not self.maps:
            if kind not in KINDS or not bits.isdigit():
                kinds = ", ".join(f"{x}-N" for x in KINDS)
                legal = f"original, maps-RECIPE-Nx, {kinds}, {', '.join(NAMES)}"
                raise SystemExit(f"settings are {legal}; got {name}")
            self.format, self.bits = KINDS[kind], int(bits)
        if self.format != "integers" and self.window != Window():
            raise SystemExit(f"{kind} has its own recent tokens or none: leave them out of {name}")
        if self.format == "kivi":
            self.window = Window(kind="residual", tokens=format_of("kivi").residual or 0)
        if self.format == "kvquant":
            self.folded = given.folder / "kvquant"
        self.decodes = bool(exact) or self.format == "kvquant"

    def make(self) -> None:
        if self.maps and not self.maps.exists():
            wanted = planned(self.base.removeprefix(MAPS))
            kvfold.compress(self.given.model, output=self.maps, check=False, **wanted)
        if self.folded and not self.folded.exists():
            wanted = {"recipe": "kvquant", "keep": 1.0, "fold": True, "check": False}
            kvfold.compress(self.given.model, output=self.folded, **wanted)

    def measured(
        self, model: Any, answers: Answers, moments: Sequence[Moments] = ()
    ) -> dict[str, Any]:
        """moments: of the model's layers, for quantisers that need them."""
        sidecar = Sidecar.load(self.maps) if self.maps else None
        quantiser = NAMES[self.quantiser](moments) if self.quantiser else None
        lost, flips, nats = [], [], []
        read = self._read(model, sidecar, answers, quantiser)
        for before, own, tokens in zip(answers.logp, read, answers.tokens, strict=True):
            lost.append((before.exp() * (before - own)).sum(-1))
            flips.append((own.argmax(-1) != before.argmax(-1)).float())
            nats.append((before - own).gather(1, torch.tensor(tokens)[:, None])[:, 0])
        spec = spec_of(model, sidecar)
        entries = self._bits_per_token(spec, quantiser)
        sizes = {x: self.window.smaller(spec, entries, x) for x in CONTEXTS}
        smaller = {str(x): round(size, 3) for x, size in sizes.items()}
        found = {"setting": self.name, "smaller": smaller} | own_nats(torch.stack(nats, 1))
        return found | summary(torch.stack(lost, 1), torch.stack(flips, 1))

    def _bits_per_token(self, spec: CacheSpec, quantiser: Quantiser | None) -> float:
        """Bits of a token that is not exact."""
        if quantiser is not None:
            return quantiser.stored_bits * spec.geometry.full_numbers
        if self.folded:
            spec = checkpoint.saved_spec(load_config(self.folded)) or spec
        return cache_layout(spec, bits=self.bits, format=self.format).bits_per_token

    def _read(
        self, model: Any, sidecar: Sidecar | None, answers: Answers, quantiser: Quantiser | None
    ) -> Iterator[Tensor]:
        """The setting's log-probabilities [N, V] along each answer."""
        if self.decodes:
            yield from self._decoded(model, sidecar, answers)
            return
        bits = self.bits
        if self.format == "kivi":
            quantiser, bits = Kivi(bits or 0), 16
        with windowed(model, sidecar, bits, self.window, quantiser) as read:
            yield from answers.read(read)

    def _decoded(self, model: Any, sidecar: Sidecar | None, answers: Answers) -> Tensor:
        """The log-probabilities of kvfold's engine [B, N, V]."""
        prompts = [answers.before + x for x in answers.prompts]
        longest = max(map(len, prompts)) + len(answers.tokens[0])
        window = self.window.tokens if self.format == "integers" else 0
        config = CacheConfig(bits=self.bits, format=self.format, window=window, kv_bytes=POOL)
        slots = len(prompts)
        if self.folded:
            model = load(self.folded, dtype=self.given.dtype)
        runner = build_runner(model, config, num_slots=slots, max_tokens=longest, maps=sidecar)
        steps = run_tokens(runner, prompts, [x[:-1] for x in answers.tokens])
        return torch.stack([x.float().log_softmax(-1) for x in steps], 1)


def own_nats(lost: Tensor) -> dict[str, Any]:
    """The increase of cross-entropy [N, B], in all and by prompt."""
    by_prompt = [round(x, 6) for x in lost.double().mean(0).tolist()]
    return {"nats": mean(lost), "nats_prompts": by_prompt}


def summary(lost: Tensor, flips: Tensor) -> dict[str, Any]:
    """Means and standard errors of [N, B], in all and by quarters of the answers."""
    parts = {"all": slice(None)}
    size = len(lost) // 4
    parts |= {
        f"{i * size + 1} to {(i + 1) * size}": slice(i * size, (i + 1) * size) for i in range(4)
    }
    return {
        name: {"kl": mean(lost[part]), "flips": mean(flips[part])} for name, part in parts.items()
    } | {
        "worst": float(lost.max()),
        "growth": mean(lost[3 * size : 4 * size].mean(0) - lost[:size].mean(0)),
        "prompts": [round(x, 6) for x in lost.double().mean(0).tolist()],
    }


def mean(values: Tensor) -> list[float]:
    """Of [N, B] or [B]: the mean, and its standard error over the B prompts."""
    means = values.double().view(-1, values.shape[-1]).mean(0)
    error = means.std() / len(means) ** 0.5 if len(means) > 1 else torch.tensor(torch.nan)
    return [round(float(means.mean()), 6), round(float(error), 6)]


def difference(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The KL, and the nats, of one setting less those of another, paired by prompt."""
    pair = [next(x for x in rows if x["setting"] == name) for name in names]
    found = dict[str, Any](setting=names[0], less=names[1])
    for measure, by_prompt in (("kl", "prompts"), ("nats", "nats_prompts")):
        first, second = (torch.tensor(x[by_prompt]) for x in pair)
        found[measure] = mean(first - second)
    return found


def prepared(model: Any, given: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the original's answers, which --answers keeps for later runs; or pieces of a
    text."""
    tokenizer = load_tokenizer(given.model)
    if given.text:
        length = given.context + given.tokens
        text = running(given.text.read_text(encoding="utf-8"))
        pieces = windows(tokenizer, text, length, length * given.count).tolist()
        return [x[: given.context] for x in pieces], [x[given.context :] for x in pieces]
    lines = given.prompts.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: given.count + given.shots]]
    if given.answers and given.answers.exists():
        answers = json.loads(given.answers.read_text(encoding="utf-8"))["answers"]
    else:
        prompts = [encode_chat(tokenizer, chat(x, [])) for x in rows]
        answers = answered(model, prompts, given.tokens, tokenizer.eos_token_id)
        if given.answers:
            write_json(given.answers, {"answers": answers})
    told = [
        {"question": row["question"], "answer": tokenizer.decode(answer)}
        for row, answer in zip(rows[: given.shots], answers, strict=False)
    ]
    asked = rows[given.shots :]
    prompts = [encode_chat(tokenizer, chat(x, told)) for x in asked]
    return prompts, answers[given.shots : len(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True, help="where maps are kept")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--prompts", type=Path, help="GSM8K's file")
    texts.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--context", type=int, default=512, help="tokens before those of --text")
    parser.add_argument("--settings", nargs="+", required=True)
    parser.add_argument("--pairs", nargs=2, action="append", default=[], help="settings")
    parser.add_argument("--count", type=int, default=12, help="questions")
    parser.add_argument("--shots", type=int, default=0, help="answered questions before each")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer")
    parser.add_argument("--answers", type=Path, help="file that keeps them for later runs")
    parser.add_argument("--calib-tokens", type=int, default=8192, help="of published quantisers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    settings = [Setting(name, given) for name in given.settings]
    for setting in settings:
        setting.make()
    model = load(given.model, dtype=given.dtype)
    answers = Answers.of(model, *prepared(model, given))
    moments = list[Moments]()
    if any(setting.quantiser for setting in settings):
        moments = calibrated(model, load_tokenizer(given.model), given.calib_tokens)
    found: list[dict[str, Any]] = []
    for setting in settings:
        found.append(setting.measured(model, answers, moments))
        print(found[-1], flush=True)
        if given.json:
            known = {x["setting"] for x in found}
            told = {
                "model": given.model,
                "tokens": given.tokens,
                "prompts": len(answers.prompts),
                "prompt_tokens": [len(answers.before) + len(x) for x in answers.prompts],
                "shots": given.shots,
                "text": given.text and given.text.name,
                "pairs": [difference(found, x) for x in given.pairs if known.issuperset(x)],
            }
            about = {"dtype": given.dtype, "versions": versions(model.device)}
            write_json(given.json, told | about | {"rows": found})


if __name__ == "__main__":
    main()
