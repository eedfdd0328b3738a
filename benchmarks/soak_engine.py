"""Soak: an engine in this process under requests, cancels, faults and clock jumps.

    python benchmarks/soak_engine.py --events 1000000 --seed 1 --json soak-engine.json

An event is a request that ended, by whatever reason, or a fault: never a token. One thread does
all, drawn from the seed alone. A random model of one layer (`tiny.py`) is served by one cache after
another (`CACHES`), by a new engine every `--turn` events. Every answer (text, token ids, finish
reason, log-probabilities) must equal that of the same request alone, or it is named: who ended it.
Once all have ended, pages, requests, memory and descriptors are counted. The exit code is 1 where
an answer was different, an error was not to be expected, something was left or memory grew.

Sums of floats round differently in another batch. Requests whose answers a change of weights by
1e-5 of their size would change are left out, since nobody can say which answer is right.
"""

import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import kvfold
from kvfold import LLM, CacheParams, SamplingParams
from kvfold.engine.api import grammar
from kvfold.engine.api.llm import completion_of
from kvfold.engine.api.stream import Stream
from kvfold.engine.core.engine import Hooks
from kvfold.engine.requests.request import Request, StepOutput
from kvfold.utils.errors import SettingError
from soak_command import run_command
from tiny import disturbed, tiny_model, tiny_tokenizer

SLOTS, MAX_TOKENS = 64, 160
PAGES = {"max_sequences": SLOTS, "max_tokens": MAX_TOKENS}
CACHES: dict[str, dict[str, Any]] = {
    "plain": {"tokens": 500, "prefix_caching": False, "page": 4, "guided": True},
    "prefixes": {"tokens": 500, "page": 4},
    "bits": {"tokens": 500, "bits": 4, "page": 4, "guided": True},
    "maps": {"tokens": 500, "maps": "lean", "bits": 8, "page": 4},
    "folded": {"tokens": 500, "fold": "swift", "page": 4},
    "kivi": {"tokens": 1000, "bits": 4, "format": "kivi", "page": 16, "residual": 16},
    "window": {"tokens": 1000, "window": 24, "page": 8},
    "evicting": {"evict": "kv-compress", "max_cache_tokens": 40, "page": 8},
    "keys": {"evict": "knorm", "keep_tokens": 0.5, "page": 8},
}
KINDS = {"read": 60, "leave": 14, "cancel": 14, "lose": 4, "several": 4, "bad": 4}
FAULTS = {"once": 30, "culprit": 20, "poison": 20, "bug": 8, "interrupt": 8, "storm": 8}
FAULTS |= {"jump": 8, "callback": 8, "grammar": 1}
FAULT_SHARE = 0.01  # of events
DISTURBED, NUM_DISTURBED = 1e-5, 6
MOST_GROWTH = 48 * 2**20  # bytes, from the first lap over all caches to the last
GUIDED = 0.02  # of questions; a step waits for another process where one runs
PATTERNS = ("[0-9]{2,4}", "(ab|cd){1,3}!", "x[a-f]{1,5}y?")
SCHEMAS: tuple[Any, ...] = (
    {"enum": ["cat", "dog", 5]},
    {"type": "integer", "minimum": 0, "maximum": 999},
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """turn: events of an engine's life; open: most requests that are open at once."""

    events: int = 1_000_000
    minutes: float = 60.0
    seed: int = 0
    turn: int = 10_000
    questions: int = 240
    open: int = 200
    caches: str = ",".join(CACHES)


class SoakFault(RuntimeError):
    """What a step is made to fail of."""


# Questions ---------------------------------------------------------------------------------------

Said = tuple[str, tuple[int, ...], str, tuple[float, ...]]  # text, ids, reason, log-probabilities


@dataclass(frozen=True)
class Question:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    cache: CacheParams
    wanted: Said | None = None

    def asked_of(self, llm: LLM) -> Said:
        (found,) = llm.generate([list(self.prompt)], self.sampling, cache=self.cache)
        return said(found)


def said(found: Any) -> Said:
    scores = [*(found.prompt_logprobs or ()), *(found.logprobs or ())]
    return found.text, found.token_ids, found.finish_reason, tuple(x.chosen for x in scores)


def random_questions(
    count: int, rng: random.Random, *, budgets: bool, guided: bool
) -> Iterator[Question]:
    """Prompts that share beginnings, with settings of every kind."""
    texts = [rng.randbytes(90) for _ in range(6)]
    for i in range(count):
        begin = rng.choice(texts)[: rng.choice([0, 0, 16, 33, 60])]
        prompt = (0, *(2 + x for x in begin + rng.randbytes(rng.randint(1, 24))))
        settings: dict[str, Any] = {"max_new_tokens": rng.choice([1, 1, 2, 2, 3, 3, 4, 6, 12, 24])}
        if rng.random() < 0.4:
            settings |= {"temperature": rng.uniform(0.2, 1.5), "seed": i}
            settings |= rng.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}])
        nothing: list[dict[str, Any]] = [{}] * 9
        settings |= rng.choice([*nothing, *_settings(rng)])
        if guided and rng.random() < GUIDED:
            settings = {"max_new_tokens": 12}
            settings |= rng.choice([*({"regex": x} for x in PATTERNS), *_schemas()])
        cache = CacheParams()
        if budgets and rng.random() < 0.5:
            cache = CacheParams(max_cache_tokens=rng.choice([12, 30]), every=rng.choice([None, 8]))
        yield Question(prompt, SamplingParams(**settings), cache)


def _settings(rng: random.Random) -> list[dict[str, Any]]:
    ids = [rng.randrange(2, 258) for _ in range(60)]
    return [
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"stop_token_ids": tuple(ids)},
        {"stop": ("a", "e", "0")},
        {"ignore_eos": True, "logit_bias": {1: 5.0}},
        {"logit_bias": {1: 3.0, ids[0]: 4.0}},
        {"min_tokens": 3, "logit_bias": {1: 8.0}, "max_new_tokens": 8},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"presence_penalty": 1.0},
        {"allowed_token_ids": tuple(ids)},
        {"bad_words": ((ids[0],), tuple(ids[1:3]), "a")},
    ]


def _schemas() -> list[dict[str, Any]]:
    return [{"json_schema": x} for x in SCHEMAS]


# Caches ------------------------------------------------------------------------------------------


class Served:
    """A cache, and questions whose answers are known."""

    def __init__(self, name: str, plan: Plan) -> None:
        settings = dict(CACHES[name])
        self.name, self.tokenizer = name, tiny_tokenizer()
        self.model = tiny_model(settings.pop("window", None))
        tokens, self.guided = settings.pop("tokens", None), settings.pop("guided", False)
        if recipe := settings.pop("maps", None):
            settings["maps"] = self._compressed(recipe)
        if recipe := settings.pop("fold", None):
            self.model = self._compressed(recipe, fold=True)
        self.settings = PAGES | settings
        if tokens:  # as many bytes as so many tokens take, so that some requests lose theirs
            whole = self.engine(0)
            layout = whole.runner.pool.layout
            self.settings["kv_bytes"] = -(-tokens // layout.page) * layout.page_bytes
        self.evicts = "evict" in settings
        self.questions = self._questions(plan)

    def _compressed(self, recipe: str, **more: Any) -> Any:
        return kvfold.compress(
            self.model, recipe, keep=0.5, tokenizer=self.tokenizer, max_tokens=2048, align=4, **more
        )

    def engine(self, seed: int, model: Any = None) -> LLM:
        model = self.model if model is None else model
        return LLM(model, tokenizer=self.tokenizer, seed=seed, **self.settings)

    def _questions(self, plan: Plan) -> list[Question]:
        rng = random.Random(f"{plan.seed} {self.name}")
        asked = list(random_questions(plan.questions, rng, budgets=self.evicts, guided=self.guided))
        llm = self.engine(0)
        wanted = [x.asked_of(llm) for x in asked]
        clear = [True] * len(asked)
        for seed in range(NUM_DISTURBED):
            other = self.engine(0, disturbed(self.model, DISTURBED, seed))
            found = other.generate(
                [list(x.prompt) for x in asked],
                [x.sampling for x in asked],
                cache=[x.cache for x in asked],
            )
            each = zip(clear, found, wanted, strict=True)
            clear = [ok and said(x)[:3] == y[:3] for ok, x, y in each]
        self.num_unclear = clear.count(False)
        return [
            Question(x.prompt, x.sampling, x.cache, y)
            for ok, x, y in zip(clear, asked, wanted, strict=True)
            if ok
        ]


# Events ------------------------------------------------------------------------------------------


class Watch(Hooks):
    """Counts requests from their start to their end, and times of first tokens. raises: in how many
    of the next calls."""

    def __init__(self) -> None:
        self.begun: dict[int, float] = {}
        self.open: set[int] = set()
        self.first_tokens: list[float] = []
        self.raises = 0

    def on_request_init(self, request: Request) -> None:
        self.begun[request.id] = time.perf_counter()
        self.open.add(request.id)
        self._raise()

    def on_context_step_end(self, chunks: Any) -> None:
        for chunk in chunks:
            if chunk.wants_logits and (begun := self.begun.pop(chunk.request.id, None)):
                self.first_tokens.append(time.perf_counter() - begun)
        self._raise()

    def on_generation_step_end(self, chunks: Any) -> None:
        self._raise()

    def on_request_finish(self, request: Request) -> None:
        self.begun.pop(request.id, None)
        self.open.remove(request.id)
        self._raise()

    def _raise(self) -> None:
        if self.raises:
            self.raises -= 1
            raise SoakFault("of a hook")


@dataclass(eq=False)
class Open:
    """Requests of one stream that is being read."""

    kind: str
    stream: Stream
    asked: dict[int, Question]
    outputs: dict[int, list[StepOutput]]
    left: int  # outputs until it is left, or cancelled
    cancelled: set[int] = field(default_factory=set)


class Life:
    """An engine from its start to its end."""

    def __init__(self, served: Served, rng: random.Random, soak: "Soak") -> None:
        self.served, self.rng, self.soak = served, rng, soak
        self.llm = served.engine(rng.randrange(2**31))
        self.engine, self.runner = self.llm.engine, self.llm.runner
        self.engine.scheduler.headroom = 0  # so that some are pre-empted
        self.engine.hooks = self.watch = Watch()
        self.open: list[Open] = []
        self.harmed: set[int] = set()  # by faults: they may end with an error
        self.cancelled: set[int] = set()
        self.culprits: set[int] = set()
        self.poisoned: set[int] = set()
        self.next_fault: BaseException | None = None
        self._run = self.runner.run
        self._failing = patch.object(self.runner, "run", self._run_or_fail)
        self._failing.start()

    def _run_or_fail(self, batch: Any, tokens: Any = None) -> Any:
        ids = [chunk.request.id for chunk in batch.chunks]
        error, self.next_fault = self.next_fault, None
        late = self.rng.random() < 0.5  # rows are stored, and nobody has the tokens
        if self.culprits.intersection(ids):
            error = error or SoakFault("of a culprit")
        if error is not None and not late:
            self._harm(ids, error)
        logits = self._run(batch, tokens)
        if error is not None:
            self._harm(ids, error)
        if bad := self.poisoned.intersection(ids):
            logits = logits.clone()
            for i, chunk in enumerate(batch.with_logits):
                if chunk.request.id in bad:
                    logits[i] = torch.nan
        return logits

    def _harm(self, ids: list[int], error: BaseException) -> None:
        bug = isinstance(error, AssertionError)
        if isinstance(error, KeyboardInterrupt):  # all are prefilled once more
            raise error
        if bug or len(ids) == 1 or not self.runner.can_retry:
            self.harmed.update([x.id for x in self.engine.scheduler.running] if bug else ids)
        raise error

    def run(self, events: int) -> None:
        until = self.soak.num_events + events
        while self.soak.num_events < until:
            self.most = self.rng.choice([1, *[self.soak.plan.open // x for x in (1, 1, 2, 4)]])
            for _ in range(self.rng.randrange(50 + 10 * self.most)):
                self._act()
                if self.soak.num_events >= until:
                    break
        self.close()

    def _act(self) -> None:
        if self.rng.random() < FAULT_SHARE:
            (kind,) = self.rng.choices(list(FAULTS), list(FAULTS.values()))
            if kind == "interrupt" and self.served.evicts:
                kind = "storm"  # a prompt that is read again is not evicted to the same rows
            getattr(self, f"_{kind}")()
            self.soak.faults[kind] += 1
        if len(self.open) < self.most:
            self._begin()
        else:
            self._read(self.rng.choice(self.open))

    # Requests.

    def _begin(self) -> None:
        (kind,) = self.rng.choices(list(KINDS), list(KINDS.values()))
        if kind == "bad":
            self._bad()
            return
        count = self.rng.randint(2, 4) if kind == "several" else 1
        asked = [self.rng.choice(self.served.questions) for _ in range(count)]
        try:
            opened = [self.llm.request(list(x.prompt), x.sampling, x.cache) for x in asked]
        except SettingError as error:
            if "takes over" not in str(error) or not self.soak.faults["grammar"]:
                raise
            self.soak.outcomes["grammar killed"] += 1
            return
        stream = Stream(self.engine).submit(opened)
        ids = [request.id for request, _ in opened]
        self.open.append(
            Open(
                kind,
                stream,
                dict(zip(ids, asked, strict=True)),
                {id: [] for id in ids},
                self.rng.choice([0, 1, 1, 2, 4, 8]),
            )
        )

    def _bad(self) -> None:
        """What is refused before it is queued."""
        what: Callable[[], object] = self.rng.choice(
            [
                lambda: self.llm.request([], None, None),
                lambda: self.llm.request([9999], None, None),
                lambda: self.llm.request([5] * (MAX_TOKENS + 1), None, None),
                lambda: self.llm.request([5], SamplingParams(temperature=-1), None),
                lambda: self.llm.request([5], SamplingParams(regex="("), None),
                lambda: self.llm.request([5], None, CacheParams(keep_tokens=2)),
            ]
        )
        try:
            what()
            self.soak.wrong.append(f"{self.served.name}: accepted what is wrong")
        except ValueError:
            self.soak.outcomes["refused"] += 1

    def _read(self, one: Open) -> None:
        """The next output of one stream, which takes steps where there is none yet."""
        with self._faults():
            if one.kind in ("leave", "lose", "cancel") and not one.left:
                self._leave(one)
                return
            one.left -= 1
            output = next(one.stream, None)
            if output is None:
                self._end(one)
            else:
                one.outputs[output.id].append(output)

    def _leave(self, one: Open) -> None:
        if one.kind == "cancel":
            self._cancel(one)
            one.kind = "read"
            return
        if one.kind == "leave":
            one.stream.close()
        self.open.remove(one)
        for id, asked in one.asked.items():
            self._judge(id, asked, one.outputs[id], left=True)

    def _cancel(self, one: Open) -> None:
        for id in one.asked:
            if self.engine.cancel(id):
                self.cancelled.add(id)

    def _end(self, one: Open) -> None:
        self.open.remove(one)
        for id, asked in one.asked.items():
            self._judge(id, asked, one.outputs[id])

    def _judge(
        self, id: int, asked: Question, outputs: list[StepOutput], left: bool = False
    ) -> None:
        """Count how one ended, and compare what it said."""
        reason = outputs[-1].finish_reason if outputs else None
        text = "".join(x.text for x in outputs)
        ids = tuple(token for x in outputs for token in x.token_ids)
        assert asked.wanted is not None
        begins = (
            asked.wanted[0].startswith(text.rstrip("\ufffd")) and asked.wanted[1][: len(ids)] == ids
        )
        if reason is None:
            name, fine = "left", left and begins
        elif reason == "cancelled":
            name, fine = "cancelled", id in self.cancelled
            fine &= asked.wanted[1][: len(ids)] == ids
        elif reason == "error":
            name, fine = "error", begins and self._may_fail(id, outputs[-1], asked)
        else:
            name, fine = "equal", same(said(completion_of(outputs)), asked.wanted)
        self.soak.outcomes[name if fine else "wrong"] += 1
        if not fine:
            self.soak.wrong.append(
                f"{self.served.name}: {asked} got {name} {text!r} {ids} {outputs[-1:]}"[:1500]
            )

    def _may_fail(self, id: int, last: StepOutput, asked: Question) -> bool:
        assert last.error is not None
        if id in self.harmed and ("SoakFault" in last.error or "of a soak" in last.error):
            return True
        if id in self.poisoned and "not finite" in last.error:
            return True
        return asked.sampling.guided and self.soak.faults["grammar"] > 0

    # Faults.

    @property
    def _running(self) -> list[int]:
        return [x.id for x in self.engine.scheduler.running] or [0]

    def _once(self) -> None:
        kinds = (SoakFault, MemoryError, torch.OutOfMemoryError)
        self.next_fault = self.rng.choice(kinds)("SoakFault: once")

    def _culprit(self) -> None:
        self.culprits.add(self.rng.choice(self._running))

    def _poison(self) -> None:
        self.poisoned.add(self.rng.choice(self._running))

    def _bug(self) -> None:
        self.next_fault = AssertionError("of a soak")

    def _interrupt(self) -> None:
        self.next_fault = KeyboardInterrupt()

    def _storm(self) -> None:
        share = self.rng.choice([0.3, 1.0])
        for one in self.open:
            if self.rng.random() < share:
                self._cancel(one)

    def _jump(self) -> None:
        self.soak.ahead = self.rng.choice([-86400.0, 0.0, 7200.0])

    def _callback(self) -> None:
        self.watch.raises = self.rng.randint(1, 5)

    def _grammar(self) -> None:
        """The processes of all grammars are killed."""
        for pid in children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _faults(self) -> Any:
        """What a step raises that was told to."""
        return suppress(AssertionError, KeyboardInterrupt)

    # The end.

    def close(self) -> None:
        """Read all to their ends, and look for what is left."""
        self.next_fault, self.watch.raises = None, 0
        while self.open:
            self._read(self.open[0])
        with self._faults():
            while self.engine.has_work:
                self.engine.step()
        pool = self.runner.pool
        left = {"pages": pool.used_bytes, "requests": len(self.watch.open)}
        left |= {"waiting": len(self.engine.scheduler.waiting), "open": len(pool.open_slots)}
        pool.check_integrity()
        if any(left.values()):
            self.soak.wrong.append(f"{self.served.name}: left {left}")
        self.soak.preempted += self.engine.scheduler.num_preemptions
        self.soak.steps += self.engine.scheduler.num_steps
        self.soak.first_tokens.extend(self.watch.first_tokens)
        self._failing.stop()


def same(one: Said, other: Said) -> bool:
    near = len(one[3]) == len(other[3]) and all(
        abs(x - y) < 1e-3 for x, y in zip(one[3], other[3], strict=True)
    )
    return one[:3] == other[:3] and near


def children() -> list[int]:
    """Processes that this one started, and these."""
    found, todo = [], [os.getpid()]
    while todo:
        for path in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with suppress(OSError):
                new = [int(x) for x in path.read_text().split()]
                found += new
                todo += new
    return found


class Log(list[str]):
    """Lines that are told at once, too."""

    def append(self, line: str) -> None:
        super().append(line)
        print(line, file=sys.stderr)


class Soak:
    """All lives, and what came of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.by_cache: dict[str, dict[str, float]] = {}
        self.wrong = Log()
        self.first_tokens: deque[float] = deque(maxlen=200_000)
        self.samples: list[dict[str, Any]] = []
        self.preempted = self.steps = 0
        self.ahead = 0.0  # of the clock

    @property
    def num_events(self) -> int:
        return self.outcomes.total() + self.faults.total()

    def run(self) -> dict[str, Any]:
        clock, rng = time.time, random.Random(self.plan.seed)
        served = [Served(name, self.plan) for name in self.plan.caches.split(",")]
        begun = time.monotonic()
        time.time = lambda: clock() + self.ahead
        try:
            while self.num_events < self.plan.events and not self.wrong[100:]:
                one = served[len(self.samples) % len(served)]
                before, since = self.num_events, time.monotonic()
                Life(one, random.Random(rng.random()), self).run(self.plan.turn)
                self._count(one, self.num_events - before, time.monotonic() - since)
                self._sample(one.name, time.monotonic() - begun)
                print(json.dumps(self.samples[-1] | {"wrong": len(self.wrong)}), file=sys.stderr)
                if time.monotonic() - begun > 60 * self.plan.minutes:
                    break
        finally:
            time.time = clock
        self.seconds = time.monotonic() - begun
        return self.report(served)

    def _count(self, one: Served, events: int, seconds: float) -> None:
        total = self.by_cache.setdefault(one.name, {"events": 0, "seconds": 0.0})
        total["events"] += events
        total["seconds"] += seconds
        total |= {"questions": len(one.questions), "unclear": one.num_unclear}

    def _sample(self, name: str, seconds: float) -> None:
        gc.collect()
        self.samples.append(
            {
                "cache": name,
                "seconds": round(seconds, 1),
                "events": self.num_events,
                "resident": int(Path("/proc/self/statm").read_text().split()[1])
                * os.sysconf("SC_PAGE_SIZE"),
                "cpu_seconds": round(time.process_time(), 1),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "children": len(children()),
                "threads": threading.active_count(),
                "requests": sum(type(x) is Request for x in gc.get_objects()),
            }
        )

    def growth(self, lap: int) -> dict[str, int]:
        """From the end of the first lap over all caches to the end of the last."""
        if len(self.samples) < 2 * lap:
            return {}
        first, last = self.samples[lap - 1], self.samples[len(self.samples) // lap * lap - 1]
        names = ("resident", "descriptors", "children", "threads", "requests")
        return {x: last[x] - first[x] for x in names}

    def report(self, served: list[Served]) -> dict[str, Any]:
        growth = self.growth(len(served))
        if growth.get("resident", 0) > MOST_GROWTH or growth.get("requests"):
            self.wrong.append(f"grew: {growth}")
        if self.num_events > 100_000 and not self.preempted:
            self.wrong.append("no request was ever pre-empted: pools are too large")
        if any(growth.get(x, 0) > 4 for x in ("descriptors", "children", "threads")):
            self.wrong.append(f"grew: {growth}")
        times = sorted(self.first_tokens) or [0.0]
        return {
            "plan": asdict(self.plan),
            "seconds": round(self.seconds, 1),
            "events": self.num_events,
            "events_per_s": round(self.num_events / self.seconds, 1),
            "outcomes": dict(self.outcomes),
            "faults": dict(self.faults),
            "caches": self.by_cache,
            "engines": len(self.samples),
            "steps": self.steps,
            "preempted": self.preempted,
            "first_token_s": {p: times[int(len(times) * p / 100)] for p in (50, 99)},
            "growth": growth,
            "wrong": self.wrong,
            "samples": self.samples,
        }


def soak(plan: Plan) -> dict[str, Any]:
    logging.getLogger("kvfold").setLevel(logging.CRITICAL)  # faults are meant
    grammar.REFUSED_SECONDS = 1.0  # of one whose process was killed
    torch.set_num_threads(1)
    return Soak(plan).run()


if __name__ == "__main__":
    sys.exit(run_command(__doc__.splitlines()[0], Plan, soak))
