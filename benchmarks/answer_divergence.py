"""What a compressed cache loses along a long answer: KL(original || compressed) by position.

    python benchmarks/answer_divergence.py reference:smollm2 --folder made \\
        --prompts gsm8k-test.jsonl --settings bits-4 bits-4+128 maps-swift-5x maps-small-8x+64

The original answers each prompt greedily. Then a setting reads the prompt and the original's answer
token by token through the paged cache, so every token was decoded with what the setting stored of
all the tokens before it. Settings are named as in real_tasks.py; `+R` keeps the last 1 to R tokens
in 16 bits (`--set residual=R`). flips: share of positions where another token is the likeliest.
Standard errors are over prompts.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvfold
from kvfold.cli.bench_common import versions
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.trial import run_tokens
from kvfold.evaluation.dense import DenseSession, inference
from kvfold.hub.loading import load, load_tokenizer
from kvfold.maps.sidecar import Sidecar
from kvfold.utils.chat import encode_chat
from kvfold.utils.files import write_json
from real_tasks import MAPS, planned

PAGE, POOL = 32, 2**31  # bytes of the page pool


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """The original's: token ids of B prompts, of B answers of N tokens each, and the log-
    probabilities [N, B, V] before each of them."""

    prompts: Sequence[list[int]]
    tokens: Tensor
    logp: Tensor


@torch.no_grad()
def answered(model: Any, prompts: Sequence[list[int]], count: int) -> Answers:
    """Answer every prompt greedily with `count` tokens; ends of texts do not end it."""
    tokens, steps = [], []
    for prompt in prompts:
        with inference(model), DenseSession(model) as session:
            logits, mine = session.read(prompt), []
            for _ in range(count):
                mine.append((int(logits.argmax()), logits.float().log_softmax(-1).cpu()))
                logits = session.read([mine[-1][0]])
        tokens.append([token for token, _ in mine])
        steps.append(torch.stack([logp for _, logp in mine]))
    return Answers(prompts=prompts, tokens=torch.tensor(tokens), logp=torch.stack(steps, 1))


def chat(asked: dict[str, str], before: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """A question after others that are answered."""
    turns = [(x["question"], x["answer"]) for x in before] + [(asked["question"], "")]
    texts = [text for turn in turns for text in turn][:-1]
    return [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(texts)]


class Setting:
    """A setting's name, such as bits-4+128 or maps-swift-5x, and where its maps are."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.given = name, given
        self.base, _, last = name.partition("+")
        self.residual = int(last) if last else None
        self.maps = given.folder / self.base if self.base.startswith(MAPS) else None
        kind, _, bits = self.base.partition("-")
        if not self.maps and self.base != "original" and (kind != "bits" or not bits.isdigit()):
            raise SystemExit(f"settings are original, bits-N and maps-RECIPE-Nx; got {name}")
        self.bits = int(bits) if bits and not self.maps else None

    def make(self) -> None:
        if self.maps and not self.maps.exists():
            wanted = planned(self.base.removeprefix(MAPS))
            kvfold.compress(self.given.model, output=self.maps, check=False, **wanted)

    def logits(self, model: Any, answers: Answers) -> Iterator[Tensor]:
        """Logits [B, V] before each token of the answers."""
        longest = max(map(len, answers.prompts)) + answers.tokens.shape[1]
        runner = build_runner(
            model,
            CacheConfig(bits=self.bits, residual=self.residual, kv_bytes=POOL),
            num_slots=len(answers.prompts),
            max_tokens=-(-longest // PAGE) * PAGE,
            maps=Sidecar.load(self.maps) if self.maps else None,
        )
        yield from run_tokens(runner, answers.prompts, answers.tokens[:, :-1].tolist())

    def measured(self, model: Any, answers: Answers) -> dict[str, Any]:
        lost, flips = [], []
        for original, logits in zip(answers.logp, self.logits(model, answers), strict=True):
            own = logits.float().log_softmax(-1).cpu()
            lost.append((original.exp() * (original - own)).sum(-1))
            flips.append(own.argmax(-1) != original.argmax(-1))
        return {"setting": self.name} | summary(torch.stack(lost), torch.stack(flips).float())


def summary(lost: Tensor, flips: Tensor) -> dict[str, Any]:
    """Means and standard errors of [N, B], in all and by quarters of the answers."""
    parts = {"all": slice(None)}
    size = len(lost) // 4
    parts |= {
        f"{i * size + 1} to {(i + 1) * size}": slice(i * size, (i + 1) * size) for i in range(4)
    }
    return {
        name: {"kl": mean(lost[part]), "flips": mean(flips[part])} for name, part in parts.items()
    } | {"worst": float(lost.max())}


def mean(values: Tensor) -> list[float]:
    """Of [N, B]: the mean, and its standard error over the B prompts."""
    means = values.double().mean(0)
    error = means.std() / len(means) ** 0.5 if len(means) > 1 else torch.tensor(torch.nan)
    return [round(float(means.mean()), 6), round(float(error), 6)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True, help="where maps are kept")
    parser.add_argument("--prompts", type=Path, required=True, help="GSM8K's file")
    parser.add_argument("--settings", nargs="+", required=True)
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--shots", type=int, default=0, help="solved questions before each")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    settings = [Setting(name, given) for name in given.settings]
    for setting in settings:
        setting.make()
    model, tokenizer = load(given.model, dtype=given.dtype), load_tokenizer(given.model)
    lines = given.prompts.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: given.count + given.shots]]
    chats = [chat(rows[given.shots + i], rows[: given.shots]) for i in range(given.count)]
    answers = answered(model, [encode_chat(tokenizer, x) for x in chats], given.tokens)
    found = []
    for setting in settings:
        found.append(setting.measured(model, answers))
        print(found[-1], flush=True)
        if given.json:
            told = {
                "model": given.model,
                "tokens": given.tokens,
                "prompts": given.count,
                "shots": given.shots,
            }
            about = {"dtype": given.dtype, "versions": versions(model.device)}
            write_json(given.json, told | about | {"rows": found})


if __name__ == "__main__":
    main()
