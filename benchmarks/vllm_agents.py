"""How many agent sessions one GPU bears under vLLM: contexts that grow turn by turn, with prefix
caching, for a model of random weights.

    python benchmarks/vllm_agents.py bits-4 --sessions 32,64,115 --json agents-bits-4.json

KIND is as in vllm_speed.py: bf16-full, fp8, bits-8, bits-4, or a compressed variant such as
swift-5x. A session starts with a system prompt that all share and a context of --shortest to
--longest tokens, drawn log-uniformly. A turn adds some 600 tokens (200 to 1,500) and is answered
with some 150 (50 to 400); then comes a pause, --pause seconds in the mean. A session that reaches
--longest ends, and another starts at --shortest.

Numbers of sessions are tried upwards in one engine. Sessions join four at a time; their first turn
is not counted. Then turns that are due within --seconds are. The time to a first token counts from
when the turn was due. A number of sessions is borne where 95 % of first tokens come within --first
seconds and 95 % of turns take at most --token milliseconds a token. The run ends with the first
number that is not borne, or after --limit seconds. Quality is not measured here.

--filled: first contexts are not read but taken for what the cache has (small numbers), all else is
as it is: what is counted begins when every context is in the cache, as far as it fits, and that
takes seconds in place of minutes.

--documents 64: afterwards, in the same engine, so many people each read a document of 32,768
tokens, ask three questions about it, --reading seconds apart in the mean, and go on to another
document. What counts is how many questions are answered a second. --sessions '' leaves out agents.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import vllm
from vllm import LLM

from kvfold.bench.synthetic_engine import WIDTHS
from vllm_speed import (
    as_read,
    cache_options,
    capacity,
    device,
    greedy,
    model_folder,
    scribble,
)

JOINING = 4  # sessions that read their first context at the same time
WAIT = 20  # seconds after the counted time for turns that are not answered yet
DOCUMENT = 32768  # tokens
QUESTIONS = 3  # about a document


@dataclass
class Session:
    """An agent's conversation. due: when its next turn is to be sent (None: it is being answered).
    turns: how many were answered."""

    context: list[int]
    due: float | None
    turns: int = 0


@dataclass
class Turn:
    """A turn under way or answered: when it was due, its first token came and it ended; tokens of
    its prompt, of those found in the cache, and of the answer."""

    session: Session
    due: float
    prompt: int
    counted: bool
    first: float | None = None
    end: float | None = None
    cached: int = 0
    answered: list[int] = field(default_factory=list)

    @property
    def token_ms(self) -> float:
        assert self.first is not None and self.end is not None
        return (self.end - self.first) / max(1, len(self.answered) - 1) * 1e3


class Agents:
    """The sessions of one engine."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.engine = llm, llm.llm_engine
        self.options, self.random = options, random.Random(0)
        self.pause = options.pause
        self.vocabulary = llm.model_config.get_vocab_size()
        self.system = self.tokens(options.system)
        self.sessions: list[Session] = []
        self.running: dict[str, Turn] = {}
        self.turns: list[Turn] = []
        self.sent = 0

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(10, self.vocabulary), k=count)

    def size(self, low: int, middle: int, high: int) -> int:
        drawn = self.random.lognormvariate(math.log(middle), 0.6)
        return int(min(high, max(low, drawn)))

    def mix(self) -> None:
        """Called when all have joined."""

    def join(self) -> None:
        """One more session."""
        self.sessions.append(Session(self.first_context(), due=time.perf_counter()))

    def first_context(self) -> list[int]:
        """A context of a random length."""
        low, high = self.options.shortest, 0.95 * self.options.longest
        return self.context(int(math.exp(self.random.uniform(math.log(low), math.log(high)))))

    def context(self, length: int) -> list[int]:
        return self.system + self.tokens(max(1, length - len(self.system)))

    def ask(self, session: Session) -> int:
        """Let a session's context grow by its next turn. The tokens of the answer."""
        if len(session.context) + 2000 > self.options.longest:
            session.context = self.context(self.options.shortest)
        session.context = session.context + self.tokens(self.size(200, 600, 1500))
        return self.size(50, 150, 400) if session.turns else 8

    def run(self, until: Callable[[], bool]) -> None:
        """Send turns that are due, and take steps, until `until()`."""
        while not until():
            now = time.perf_counter()
            for session in self.sessions:
                if session.due is not None and session.due <= now:
                    self._send(session)
            if self.running:
                self._step()
            else:
                time.sleep(0.001)

    def _send(self, session: Session) -> None:
        answer = self.ask(session)
        self.sent += 1
        name = str(self.sent)
        self.engine.add_request(name, {"prompt_token_ids": session.context}, greedy(answer))
        assert session.due is not None
        turn = Turn(session, session.due, len(session.context), counted=session.turns > 0)
        self.running[name], session.due = turn, None

    def _step(self) -> None:
        for output in self.engine.step():
            turn = self.running.get(output.request_id)
            if turn is None:
                continue
            now = time.perf_counter()
            turn.answered += [x for part in output.outputs for x in part.token_ids]
            if turn.answered and turn.first is None:
                turn.first, turn.cached = now, output.num_cached_tokens or 0
            if output.finished:
                del self.running[output.request_id]
                turn.end, session = now, turn.session
                session.context, session.turns = session.context + turn.answered, session.turns + 1
                session.due = now + self.random.expovariate(1 / self.pause)
                self.turns.append(turn)

    def level(self, sessions: int, out_of_time: Callable[[], bool]) -> dict[str, Any] | None:
        """Measure so many sessions. None if time ran out before."""
        with as_read(self.llm) if self.options.filled else nullcontext():
            while len(self.sessions) < sessions:
                self.join()
                self.run(lambda: self._new() < JOINING or out_of_time())
            self.run(lambda: not self._new() or out_of_time())
        if out_of_time():
            return None
        self.mix()
        self._for(self.options.settle)
        start = time.perf_counter()
        self._for(self.options.seconds)
        end = time.perf_counter()

        def inside(turn: Turn) -> bool:
            return turn.counted and start <= turn.due < end

        waited = end + WAIT
        self.run(
            lambda: time.perf_counter() > waited or not any(map(inside, self.running.values()))
        )
        unanswered = [x for x in self.running.values() if inside(x)]
        answered = sum(x.end is not None and start <= x.end < end for x in self.turns)
        result = self._result(sessions, [x for x in self.turns if inside(x)], unanswered)
        return result | {"answered_per_s": answered / (end - start)}

    def end(self) -> None:
        """End all sessions, answered or not."""
        self.engine.abort_request([*self.running])
        self.sessions, self.running = [], {}

    def _new(self) -> int:
        return sum(not x.turns for x in self.sessions)

    def _for(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        self.run(lambda: time.perf_counter() > end)

    def _result(self, sessions: int, turns: list[Turn], unanswered: list[Turn]) -> dict[str, Any]:
        now, options = time.perf_counter(), self.options
        firsts = [(x.first or now) - x.due for x in (*turns, *unanswered)]
        token_ms = [x.token_ms for x in turns]
        borne = bool(turns) and share(firsts) <= options.first and share(token_ms) <= options.token
        return {
            "sessions": sessions,
            "borne": borne,
            "turns": len(turns),
            "unanswered": len(unanswered),
            "first_ms_median": 1e3 * statistics.median(firsts) if firsts else None,
            "first_ms_95": 1e3 * share(firsts) if firsts else None,
            "token_ms_median": statistics.median(token_ms) if turns else None,
            "token_ms_95": share(token_ms) if turns else None,
            "tokens_per_s": sum(len(x.answered) for x in turns) / options.seconds,
            "found_in_cache": sum(x.cached for x in turns) / max(1, sum(x.prompt for x in turns)),
            "context_tokens": sum(len(x.context) for x in self.sessions),
        }


class Readers(Agents):
    """People who each ask three questions about a document, and then go on to another one."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        super().__init__(llm, options)
        self.pause = options.reading

    def first_context(self) -> list[int]:
        return self.context(DOCUMENT)

    def mix(self) -> None:
        """A third of them goes on to another document with the next question."""
        for session in self.sessions:
            session.turns = self.random.randint(1, QUESTIONS)

    def ask(self, session: Session) -> int:
        if session.turns and session.turns % QUESTIONS == 0:
            session.context = self.first_context()
        session.context = session.context + self.tokens(self.size(20, 60, 200))
        return self.size(50, 150, 400)


def numbers(given: str) -> list[int]:
    """16,24 as [16, 24]; nothing as []."""
    return [int(x) for x in given.split(",") if x]


def share(values: list[float], part: float = 0.95) -> float:
    """The value that this part of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def engine(folder: Path, maps: Path, options: argparse.Namespace) -> LLM:
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=options.longest + 4096,
        max_num_seqs=max(64, *options.sessions, options.documents or 0),
        max_num_batched_tokens=options.chunk,
        gpu_memory_utilization=options.memory,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
        **cache_options(options.kind, maps),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=WIDTHS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sessions", type=numbers, default=[16, 24, 32, 40])
    parser.add_argument("--shortest", type=int, default=8192, help="tokens of a context")
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--system", type=int, default=2048, help="tokens that all share")
    parser.add_argument("--pause", type=float, default=10, help="seconds between turns")
    parser.add_argument("--first", type=float, default=2, help="seconds to a first token")
    parser.add_argument("--token", type=float, default=40, help="milliseconds a token")
    parser.add_argument("--seconds", type=float, default=40, help="that count")
    parser.add_argument("--settle", type=float, default=8, help="seconds before them")
    parser.add_argument("--filled", action="store_true", help="first contexts are not read")
    parser.add_argument("--limit", type=float, default=480, help="seconds of the whole run")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's")
    parser.add_argument("--documents", type=int, help="people who read documents, afterwards")
    parser.add_argument("--reading", type=float, default=30, help="seconds between questions")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()

    def out_of_time() -> bool:
        return time.perf_counter() - begin > options.limit

    with model_folder(options.kind, options.shape, options.layers) as folder:
        llm = engine(folder / "model", folder / "maps", options)
    if options.filled:
        llm.collective_rpc(scribble)
    settings = {name: x for name, x in vars(options).items() if name != "json"}
    tokens, size = capacity(llm)
    report: dict[str, Any] = {
        "benchmark": "agents",
        "settings": settings,
        "versions": {"vllm": vllm.__version__, "device": device()},
        "ready_s": time.perf_counter() - begin,
        "capacity": {"tokens": tokens, "bytes_per_token": size},
        "levels": [],
        "documents": [],
    }
    print(json.dumps({x: report[x] for x in ("ready_s", "capacity")}), flush=True)

    def keep(name: str, level: dict[str, Any]) -> None:
        report[name].append(level)
        print(json.dumps(level), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    agents = Agents(llm, options)
    for sessions in options.sessions:
        level = agents.level(sessions, out_of_time)
        if level is not None:
            keep("levels", level)
        if level is None or not level["borne"] or out_of_time():
            break
    agents.end()
    if options.documents:
        level = Readers(llm, options).level(options.documents, out_of_time)
        if level is not None:
            keep("documents", level)
    os._exit(0)  # vLLM's engine takes its time to end


if __name__ == "__main__":
    main()
