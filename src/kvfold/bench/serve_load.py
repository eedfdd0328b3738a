"""What a load test sends and when: lengths as stated or of a trace, arrivals, prompts of real text;
and what its answers must keep to.

Everything is a function of a seed, so that two servers can be sent the same. Imports neither torch
nor NumPy.
"""

import csv
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from io import StringIO
from itertools import accumulate, count, islice
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvfold.config import SEEDS, check, setting
from kvfold.utils.errors import SettingError
from kvfold.utils.kinds import fits
from kvfold.utils.text import json_object, read_text

if TYPE_CHECKING:
    from kvfold.bench.serve_client import Outcome

Arrival = Literal["poisson", "fixed"]
SIGMA = 0.6  # of the logarithm of an agent's lengths
NARROWEST, WIDEST = 1 / 3, 2.5  # bounds of these lengths, in medians
MOST_TOKENS = 10**7  # of a prompt or an answer in a trace
QUESTION = 64  # tokens at the end of a prompt, or its half if it is shorter
TRACES = (  # fields of time, prompt and output; what makes their times seconds
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", None),  # Azure's LLM inference traces
    ("timestamp", "input_length", "output_length", 1e-3),  # Mooncake's, as JSON lines
    (None, "num_prefill_tokens", "num_decode_tokens", None),  # lengths alone
)


@dataclass(frozen=True, kw_only=True)
class TimedRequest:
    """One request to send. at: seconds after the start. prompt, output: tokens. questions: how
    many requests with the same document are sent, each after the answer to the one before."""

    at: float
    prompt: int
    output: int
    questions: int = 1


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The requests that are sent at every rate. Raises SettingError for settings that do not go
    together."""

    requests: int = setting(100, "Requests sent at each rate.", least=1)
    trace: Path | None = setting(
        None,
        "File with the lengths of recorded requests, and perhaps their times: Azure's or arXiv's"
        " CSV, Mooncake's JSON lines.",
    )
    input_tokens: int = setting(256, "Tokens of a prompt, without a trace.", least=1)
    output_tokens: int = setting(64, "Tokens of an answer, without a trace.", least=1)
    spread: float = setting(0.0, "Vary lengths by up to this share.", least=0, below=1)
    questions: int = setting(
        1,
        "Questions about each prompt, one after another: requests that differ in their last"
        f" {QUESTION} tokens.",
        least=1,
        most=1000,
    )
    max_input: int | None = setting(None, "Cut a trace's prompts to this many tokens.", least=1)
    max_output: int | None = setting(None, "Cut a trace's answers to this many tokens.", least=1)
    speed: float = setting(1.0, "Replay a trace's times this many times as fast.", above=0)
    arrival: Arrival = setting("poisson", "Gaps between requests at a rate: random or equal.")
    seed: int = setting(0, "Seed of arrivals, lengths and prompts.", **SEEDS)

    def __post_init__(self) -> None:
        check(self)
        for name in ("max_input", "max_output"):
            if self.trace is None and getattr(self, name) is not None:
                raise SettingError(f"`{name}` needs a `trace`: give one, or leave it out")
        if self.trace is None and self.speed != Traffic.speed:
            raise SettingError("`speed` needs a `trace`: give one, or leave it out")
        for name in ("input_tokens", "output_tokens", "spread"):
            if self.trace is not None and getattr(self, name) != getattr(Traffic, name):
                raise SettingError(f"`trace` sets the lengths of requests: leave `{name}` out")

    def timed(self, rate: float | None) -> list[TimedRequest]:
        """The requests of one rate, in requests a second. Infinite: all at once; None: at the times
        of the trace."""
        rows = list(islice(self._rows(), self.requests))
        if rate is None:
            if not all(isfinite(row.at) for row in rows):
                raise SettingError("`rate` is missing: without the times of a trace it is needed")
            times = iter([(row.at - rows[0].at) / self.speed for row in rows])
        else:
            rng = random.Random(f"{self.seed} arrivals {rate}")
            times = arrivals(self.arrival, rate, rng)
        same = {"questions": self.questions}
        return [replace(row, at=at, **same) for row, at in zip(rows, times, strict=False)]

    def _rows(self) -> Iterator[TimedRequest]:
        """Lengths, with the times of a trace, or infinity if it has none."""
        if self.trace is not None:
            most_in, most_out = self.max_input or inf, self.max_output or inf
            for row in read_trace(self.trace):
                prompt, output = min(row.prompt, most_in), min(row.output, most_out)
                yield TimedRequest(at=row.at, prompt=int(prompt), output=int(output))
            return
        rng = random.Random(f"{self.seed} lengths")
        while True:
            prompt, output = (
                max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))
                for mean in (self.input_tokens, self.output_tokens)
            )
            yield TimedRequest(at=inf, prompt=prompt, output=output)


def arrivals(kind: Arrival, rate: float, rng: random.Random) -> Iterator[float]:
    """Seconds at which requests arrive, endlessly; the first at 0 or after a gap."""
    if rate == inf:
        return iter(lambda: 0.0, None)
    if kind == "fixed":
        return (i / rate for i in count())
    return accumulate(rng.expovariate(rate) for _ in count())


def read_trace(path: Path) -> list[TimedRequest]:
    """The requests of a trace in the order of their times, without those of no tokens, which
    Azure's traces have. Raises ValueError for a file that is none of TRACES."""
    try:
        lines = StringIO(read_text(path), newline="")
        requests = [x for x in _parse(path, lines) if x.prompt and x.output]
    except csv.Error:
        raise ValueError(f"{path} is not a text file with a trace; see --help") from None
    if not requests:
        raise ValueError(f"{path} has no request with a prompt and an answer")
    return sorted(requests, key=lambda x: x.at)


def _parse(path: Path, lines: Iterable[str]) -> Iterator[TimedRequest]:
    rows = map(_json, lines) if path.suffix == ".jsonl" else csv.DictReader(lines)
    kind = None
    for line, row in enumerate(rows, start=1 if path.suffix == ".jsonl" else 2):
        kind = kind or next((x for x in TRACES if set(x[:3]) - {None} <= row.keys()), None)
        if kind is None:
            known = "; ".join(", ".join(filter(None, x[:3])) for x in TRACES)
            raise ValueError(
                f"{path}, line {line}: a trace has the fields {known}; got none of these"
            )
        try:
            yield _request(row, kind)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{path}, line {line}: expected a time and two numbers of tokens, got {row!r:.100}"
            ) from None


def _json(line: str) -> dict[str, Any]:
    try:
        return json_object(line)
    except ValueError:
        return {}


def _request(
    row: Mapping[str, Any], kind: tuple[str | None, str, str, float | None]
) -> TimedRequest:
    time, prompt, output, unit = kind
    at = inf
    if time is not None:
        at = float(row[time]) * unit if unit else datetime.fromisoformat(row[time]).timestamp()
        if not isfinite(at):
            raise ValueError
    return TimedRequest(at=at, prompt=_tokens(row[prompt]), output=_tokens(row[output]))


def _tokens(value: Any) -> int:
    """A number of tokens, written as JSON or as text. Raises ValueError for anything else."""
    number = int(value) if isinstance(value, str) else value
    if not fits(number, int) or not 0 <= number <= MOST_TOKENS:
        raise ValueError
    return int(number)


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The conversations that agents hold. Raises SettingError."""

    shortest: int = setting(8192, "Fewest tokens of a context that begins.", least=1)
    longest: int = setting(65536, "Most tokens of a context; at them another one begins.", least=1)
    shared: int = setting(2048, "Tokens at the beginning that all contexts share.", least=0)
    turn_tokens: int = setting(600, "Tokens that a turn adds, in the median.", least=1)
    answer_tokens: int = setting(150, "Tokens of an answer, in the median.", least=1)
    pause: float = setting(10.0, "Seconds from an answer to the next turn, in the mean.", least=0)
    seed: int = setting(0, "Seed of lengths, pauses and texts.", **SEEDS)

    def __post_init__(self) -> None:
        check(self)
        if self.shared >= self.shortest:
            raise SettingError(
                f"`shared` must be below `shortest`; got {self.shared} and {self.shortest}:"
                " lower `shared`"
            )
        if self.shortest + self.most_per_turn > self.longest:
            raise SettingError(
                f"`longest` must hold a context and a turn, {self.shortest + self.most_per_turn}"
                f" tokens; got {self.longest}: raise it, or lower `shortest` or `turn_tokens`"
            )

    @property
    def most_per_turn(self) -> int:
        """Tokens that a turn and its answer add at most."""
        return sum(int(WIDEST * x) for x in (self.turn_tokens, self.answer_tokens))


def length(rng: random.Random, median: int) -> int:
    """A length, log-normally distributed within bounds."""
    drawn = median * rng.lognormvariate(0.0, SIGMA)
    return max(1, int(min(WIDEST * median, max(NARROWEST * median, drawn))))


class Prompts:
    """Cuts prompts of exact lengths from a text, which starts again at its end.

    units: token ids of the text, or its words if the server does not tokenise.
    """

    def __init__(self, units: Sequence[int] | Sequence[str], seed: int) -> None:
        self.units, self.seed = units, seed

    @property
    def are_tokens(self) -> bool:
        """Whether prompts are token ids."""
        return isinstance(self.units[0], int)

    def cut(self, name: str, length: int) -> list[int] | str:
        """The prompt of a name: always the same one. Other names start elsewhere in the text."""
        return self.joined(self.units_of(name, length))

    def ask(self, name: str, length: int, question: int) -> list[int] | str:
        """The document of a name and the question of a number, together `length` units."""
        size = min(QUESTION, length // 2)
        document = self.units_of(name, length - size)
        return self.joined(document + self.units_of(f"{name} question {question}", size))

    def units_of(self, name: str, length: int) -> list[int | str]:
        """The prompt of a name, as token ids or words."""
        start = random.Random(f"{self.seed} {name}").randrange(len(self.units))
        return [self.units[(start + i) % len(self.units)] for i in range(length)]

    def joined(self, units: list[int | str]) -> list[int] | str:
        """A prompt from token ids, or from words."""
        return units if self.are_tokens else " ".join(map(str, units))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Goals:
    """Latencies that an answer must not exceed to count as goodput, in milliseconds."""

    ttft_ms: float | None = setting(None, "Longest time to the first token.", above=0)
    tpot_ms: float | None = setting(None, "Longest mean time of each later token.", above=0)
    normalised_ms: float | None = setting(
        None, "Longest time per output token, from a request's arrival to its end.", above=0
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def any_set(self) -> bool:
        """Whether there is a goal."""
        return (self.ttft_ms, self.tpot_ms, self.normalised_ms) != (None, None, None)

    def are_met(self, outcome: "Outcome") -> bool:
        """Whether an answer meets all goals."""
        pairs = (
            (outcome.ttft, self.ttft_ms),
            (outcome.tpot, self.tpot_ms),
            (outcome.normalised, self.normalised_ms),
        )
        return all(most is None or 1e3 * seconds <= most for seconds, most in pairs)
