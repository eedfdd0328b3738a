"""Soak of a real model, on a GPU too, whose answers may part at ties: see `soak.py`.

    python benchmarks/soak_real.py --model reference:qwen2.5-coder-1.5b --maps MAPS --device cuda \\
        --dtype bfloat16 --kv-bytes 4294967296 --json soak-qwen-gpu.json
    python benchmarks/soak_real.py --minutes 2 --clients 8

Sums in another batch round differently, and a long text of a real model has places where two tokens
are as likely as each other. A greedy answer may part from a quiet server's where its two likeliest
tokens lay less than `--tie` nats apart, and the report counts how many did.
"""

import math
import sys
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import soak
from soak import Choices, Question
from soak_command import run_command

CLIENTS = {"whole": 20, "stream": 60, "leave": 10, "bad": 3, "header": 2, "half_head": 2}
CLIENTS |= {"half_body": 1, "unread": 1, "slow": 1}
FAULTS = {"fail": 30, "jump": 20, "pause": 15, "kill": 2, "end": 4}
MOST_GROWTH = {"resident": 200 * 2**20, "descriptors": 80}
NEAR = 12  # characters between two texts' first difference and the token that differs


@dataclass(frozen=True, kw_only=True)
class RealPlan(soak.Plan):
    """maps: a folder of maps, "": none; tie: nats; kv_bytes: of a server's pages."""

    minutes: float = 8.0
    clients: int = 64
    lull_seconds: float = 60.0
    limit_seconds: float = 120.0
    maps: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    max_tokens: int = 1024
    kv_bytes: int = 2**26
    tie: float = 0.5


def questions() -> list[Question]:
    """Greedy answers of 60 to 300 tokens, behind prompts that share beginnings."""
    texts = ["Write about the old house", "def fibonacci(n):"]
    texts += "In the middle of the sea", "List the prime numbers"
    prompts = [f"{x} " + "The wind rose and they waited. " * n for x in texts for n in (0, 20, 60)]
    return [
        Question({"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": count})
        for prompt, count in zip(prompts, (60, 150, 300) * len(texts), strict=True)
    ]


def gaps_of(logprobs: dict[str, Any]) -> list[tuple[int, float]]:
    """Where every token of an answer ends, in characters, and how much likelier it was than the
    second."""
    ends = accumulate(map(len, logprobs["tokens"]))
    best = [sorted(x.values())[-2:] for x in logprobs["top_logprobs"]]
    gaps = [x[1] - x[0] if len(x) == 2 else math.inf for x in best]
    return list(zip(ends, gaps, strict=True))


def parts_at(text: str, wanted: str) -> int:
    """The first character that differs; the length of the shorter text where none does."""
    pairs = enumerate(zip(text, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(wanted)))


class RealSoak(soak.Soak):
    """gaps: of a quiet server's answers, by prompt; parted: the gap where an answer parted."""

    client_kinds, fault_kinds, most_growth = CLIENTS, FAULTS, MOST_GROWTH
    fault_seconds = (4.0, 15.0)  # as a server takes half a minute to come back
    limits = ("--set=drain-seconds=20", "--set=body-seconds=2", "--set=send-seconds=5")
    plan: RealPlan

    def serve_words(self) -> tuple[str, ...]:
        plan = self.plan
        sizes = {"max-tokens": plan.max_tokens, "max-sequences": 64, "max-queue": 400}
        named = sizes | {"kv-bytes": plan.kv_bytes, "device": plan.device, "dtype": plan.dtype}
        named |= {"maps": plan.maps} if plan.maps else {}
        return ("serve", plan.model, *(x for k, v in named.items() for x in (f"--{k}", str(v))))

    async def _ask_quietly(self) -> None:
        self.gaps: dict[str, list[tuple[int, float]]] = {}
        self.parted: list[float] = []
        for asked in questions():
            content = await self._ask_first(asked.body | {"logprobs": 2})
            self.gaps[asked.body["prompt"]] = gaps_of(content["choices"][0]["logprobs"])
            self.questions.append(Question(asked.body, soak.choices_of(content)))

    def agrees(self, asked: Question, choices: Choices, *, whole: bool) -> bool:
        """The same but for ties, behind which nothing is compared but the finish reason."""
        ((text, reason),), ((wanted, ended),) = choices, asked.wanted
        if whole and reason != ended:
            return False
        place = parts_at(text, wanted)
        if text == wanted or (place == len(text) and not whole):
            return True
        near = [gap for end, gap in self.gaps[asked.body["prompt"]] if abs(end - place) <= NEAR]
        if (gap := min(near, default=math.inf)) < self.plan.tie:
            self.parted.append(gap)
        return gap < self.plan.tie

    def report(self) -> dict[str, Any]:
        largest = sorted(self.parted)[-5:]
        return super().report() | {"parted": {"count": len(self.parted), "largest": largest}}


def soak_real(plan: RealPlan) -> dict[str, Any]:
    return soak.soak(plan, RealSoak)


if __name__ == "__main__":
    sys.exit(run_command(__doc__.splitlines()[0], RealPlan, soak_real))
