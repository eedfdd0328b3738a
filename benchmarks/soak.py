"""Soak: a router and two servers under requests, cancels, faults and restarts, on one machine.

    python benchmarks/soak.py --minutes 10 --seed 1 --json soak.json
    python benchmarks/soak.py --events 20000 --seed 2

Every answer is compared with what the same request got from a quiet server, or it is named: which
error the client was told. Every 15 seconds all clients stop, and once nothing is open, memory,
descriptors, log bytes and pages of every process are recorded. The exit code is 1 where an answer
was different, an error was not to be expected, something was left open or a process grew.
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp

from kvfold.bench.server_process import free_ports
from soak_command import run_command
from tiny import save_tiny

CLIENTS = {"whole": 24, "stream": 24, "leave": 18, "bad": 12, "header": 6, "half_head": 5}
CLIENTS |= {"half_body": 5, "unread": 3, "slow": 3}
FAULTS = {"fail": 30, "jump": 20, "pause": 15, "kill": 10, "end": 10, "full": 6}
FAULTS |= {"end_router": 3, "kill_router": 2, "kill_all": 2}
FAULT_SECONDS = (0.5, 4.0)  # between two faults
NAMED = {"replica_lost", "shutting_down", "no_replica", "queue_full"}
MOST_GROWTH = {"resident": 48 * 2**20, "descriptors": 16}  # of a process, from lull to lull
PATH = "/v1/completions"
DONE = "data: [DONE]"
TINY = "tiny"  # the random model of tiny.py, whose steps take milliseconds
SERVE = ("--set=device=cpu", f"--set=kv-bytes={2**22}", "--set=max-queue=40")
LIMITS = ("--set=drain-seconds=1", "--set=body-seconds=2", "--set=send-seconds=2")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """clients: that ask at once; events: of clients and faults, 0: by time alone; model: as
    `kvfold serve` takes it, or TINY."""

    model: str = "reference:gqa"
    minutes: float = 10.0
    events: int = 0
    clients: int = 12
    seed: int = 0
    lull_seconds: float = 15.0
    limit_seconds: float = 60.0  # for one event; more is a hang


# Processes ---------------------------------------------------------------------------------------


class SoakFault(RuntimeError):
    """What a server's engine is made to fail of. Logs may hold tracebacks of nothing else."""


def child(words: list[str]) -> int:
    """`kvfold` with words of a command line. SIGUSR1: the clock jumps two hours, forth or back;
    SIGUSR2: the next six steps of the engine fail."""
    clock, ahead, failing = time.time, [0.0], [0]
    time.time = lambda: clock() + ahead[0]

    def jump(*_: object) -> None:
        ahead[0] = 7200.0 - ahead[0]

    def fail(*_: object) -> None:
        failing[0] = 6

    signal.signal(signal.SIGUSR1, jump)
    signal.signal(signal.SIGUSR2, fail)
    if words[0] == "serve":
        from kvfold.engine.runner.runner import ModelRunner

        run = ModelRunner.run

        def run_or_fail(*arguments: Any) -> Any:
            if failing[0]:
                failing[0] -= 1
                raise SoakFault("of a soak")
            return run(*arguments)

        patch.object(ModelRunner, "run", run_or_fail).start()
    from kvfold.cli.main import main

    return main(words)


@dataclass
class Process:
    """One of the three, at its port. log: of all its lives; full: where it writes to a full disk.
    lives: how often it was started; ready: it answered since."""

    name: str
    words: tuple[str, ...]
    port: int
    log: Path
    lives: int = 0
    ready: bool = False
    full: bool = False
    running: subprocess.Popen = field(init=False, repr=False)
    codes: list[int] = field(default_factory=list)  # exit codes after SIGTERM

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        call = [sys.executable, __file__, "child", *self.words, "--port", str(self.port)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "KVFOLD_COMPILE": "off"}
        self.lives, self.ready = self.lives + 1, False
        with open("/dev/full" if self.full else self.log, "ab") as log:
            self.running = subprocess.Popen(call, stdout=log, stderr=log, env=env)

    def send(self, number: int) -> None:
        self.running.send_signal(number)

    async def stop(self, number: int) -> None:
        """End it by a signal, and wait for that."""
        self.ready = False
        self.send(number)
        while self.running.poll() is None:
            await asyncio.sleep(0.02)
        if number == signal.SIGTERM and not self.full:
            self.codes.append(self.running.returncode)

    async def wait(self, session: aiohttp.ClientSession) -> None:
        """Until it answers. Raises RuntimeError where it ended instead."""
        while True:
            try:
                async with session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        break
            except (aiohttp.ClientError, OSError):
                pass
            self.check()
            await asyncio.sleep(0.1)
        self.ready = True

    def check(self) -> None:
        """Raises RuntimeError where it ended."""
        if self.running.poll() is not None:
            raise RuntimeError(f"{self.name} ended by itself: see {self.log}")

    def measure(self) -> dict[str, int]:
        folder = Path(f"/proc/{self.running.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return {
            "resident": pages * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": len(list((folder / "fd").iterdir())),
            "log_bytes": self.log_bytes,
        }

    @property
    def log_bytes(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


# Requests ----------------------------------------------------------------------------------------


Choices = tuple[tuple[str, str], ...]  # a text and a finish reason each


@dataclass(frozen=True)
class Question:
    """A request whose answer is known: `wanted` of a quiet server."""

    body: dict[str, Any]
    wanted: Choices = ()


def questions(short: bool) -> list[Question]:
    """Prompts that share beginnings; greedy, seeded, several choices, echoed. short: few tokens."""
    texts = ("The old house", "A ship", "In the middle of the sea", "Once, when the wind")
    prompts = [
        f"{x} " + "stood by the sea and waited. " * n
        for x in texts
        for n in ((0, 2, 5) if short else (0, 5, 12))
    ]
    options = (
        {"max_tokens": 2 if short else 12},
        {"max_tokens": 8 if short else 40, "ignore_eos": True},
        {"max_tokens": 2 if short else 8, "temperature": 0.9, "seed": 7, "n": 3},
    )
    plain = [
        Question({"prompt": prompt, "temperature": 0} | more)
        for prompt in prompts
        for more in options
    ]
    echoed = Question({"prompt": texts, "max_tokens": 4, "temperature": 0, "echo": True})
    return [*plain, echoed]


def choices_of(content: dict[str, Any]) -> Choices:
    return tuple((x["text"], x["finish_reason"]) for x in content["choices"])


class Joined:
    """Choices of a stream as they come; `error`: the code that it ended with."""

    def __init__(self, count: int) -> None:
        self.texts, self.reasons = [""] * count, [""] * count
        self.error: str | None = None
        self.done = False

    def add(self, line: str) -> None:
        if not line.startswith("data: "):
            assert not line.strip(), f"a line that is no event: {line!r:.80}"
            return
        if line.strip() == DONE:
            self.done = True
            return
        content = json.loads(line[6:])
        if "error" in content:
            self.error = content["error"]["code"]
            return
        assert not self.done and self.error is None, "events after the last"
        for choice in content["choices"]:
            self.texts[choice["index"]] += choice["text"]
            self.reasons[choice["index"]] = choice["finish_reason"]

    @property
    def choices(self) -> Choices:
        return tuple(zip(self.texts, self.reasons, strict=True))


# Events ------------------------------------------------------------------------------------------


class Soak:
    """All that happens, and what it was. outcomes: how events ended, by (kind, name); wrong: what
    must not be, in words."""

    client_kinds, fault_kinds = CLIENTS, FAULTS
    fault_seconds, most_growth, limits = FAULT_SECONDS, MOST_GROWTH, LIMITS

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        ports = free_ports(3)
        words = (*self.serve_words(), *self.limits)
        servers = [
            Process(name, words, port, folder / f"{name}.log")
            for name, port in zip(("first", "second"), ports, strict=False)
        ]
        words = ("route", *(x.url for x in servers), "--set=check-seconds=0.2", *self.limits)
        self.servers, self.router = servers, Process("router", words, ports[2], folder / "r.log")
        self.processes = [*servers, self.router]
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.first_tokens: list[float] = []
        self.samples: list[dict[str, Any]] = []
        self.questions: list[Question] = []
        self.open, self.router_changes = 0, 0
        self.gate, self.over = asyncio.Event(), False

    def serve_words(self) -> tuple[str, ...]:
        """`kvfold serve` of the model, but for its port and limits."""
        model, longest, slots = self.plan.model, "256", "8"
        if model == TINY:
            save_tiny(self.folder / TINY)
            model, longest, slots = str(self.folder / TINY), "512", "32"  # its tokens are bytes
        return ("serve", model, "--max-tokens", longest, "--max-sequences", slots, *SERVE)

    async def run(self) -> dict[str, Any]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self.session:
            try:
                for process in self.processes:
                    process.start()
                for process in self.processes:
                    await process.wait(self.session)
                await self._ask_quietly()
                await self._events()
            finally:
                for process in self.processes:
                    if process.lives and process.running.poll() is None:
                        process.send(signal.SIGCONT)
                        await process.stop(signal.SIGTERM)
        self._check_logs()
        return self.report()

    async def _ask_quietly(self) -> None:
        """The answers of a server that does nothing else."""
        for asked in questions(short=self.plan.model == TINY):
            content = await self._ask_first(asked.body)
            self.questions.append(Question(asked.body, choices_of(content)))

    async def _ask_first(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self.session.post(self.servers[0].url + PATH, json=body) as answer:
            return await answer.json()

    def agrees(self, asked: Question, choices: Choices, *, whole: bool) -> bool:
        """Whether choices are a quiet server's; not whole: whether they begin as those do."""
        if whole:
            return choices == asked.wanted
        return all(w.startswith(x) for (x, _), (w, _) in zip(choices, asked.wanted, strict=True))

    async def _events(self) -> None:
        self.began = time.monotonic()
        self.gate.set()
        seeds = random.Random(self.plan.seed)
        clients = [
            asyncio.create_task(self._client(random.Random(seeds.random())))
            for _ in range(self.plan.clients)
        ]
        faults = asyncio.create_task(self._faults(random.Random(seeds.random())))
        while not self._enough:
            await asyncio.sleep(min(self.plan.lull_seconds, self.plan.minutes * 60 / 4))
            await self._lull(faults)
            faults = asyncio.create_task(self._faults(random.Random(seeds.random())))
        self.over = True
        await asyncio.gather(*clients, faults)
        self.seconds = time.monotonic() - self.began

    @property
    def num_events(self) -> int:
        return self.outcomes.total() + self.faults.total()

    @property
    def _enough(self) -> bool:
        late = time.monotonic() - self.began > 60 * self.plan.minutes
        return late or 0 < self.plan.events <= self.num_events

    async def _client(self, rng: random.Random) -> None:
        while not self.over:
            await self.gate.wait()
            (kind,) = rng.choices(list(self.client_kinds), list(self.client_kinds.values()))
            self.open += 1
            changes = self.router_changes
            try:
                async with asyncio.timeout(self.plan.limit_seconds):
                    name = await getattr(self, f"_{kind}")(rng)
            except TimeoutError:
                name = "hang"
                self.wrong.append(f"{kind}: nothing in {self.plan.limit_seconds} s")
            except (aiohttp.ClientError, OSError, EOFError) as error:
                name = "router_down"
                if changes == self.router_changes and self.router.ready:
                    self.wrong.append(f"{kind}: {error!r} of a router that runs")
                while not (self.router.ready or self.over):
                    await asyncio.sleep(0.05)
            except (AssertionError, ValueError, KeyError) as error:
                name = "wrong"
                self.wrong.append(f"{kind}: {error!r:.500}")
            self.open -= 1
            self.outcomes[kind, name] += 1

    # Of clients: each returns how it ended.

    async def _whole(self, rng: random.Random) -> str:
        asked = rng.choice(self.questions)
        async with self.session.post(self.router.url + PATH, json=asked.body) as answer:
            content = await answer.json(content_type=None)
            if answer.status != 200:
                return self._named(answer.status, content["error"]["code"])
        got = choices_of(content)
        agree = self.agrees(asked, got, whole=True)
        assert agree, f"{asked.body}: {got} for {asked.wanted}"
        return "equal"

    async def _stream(self, rng: random.Random, leave: float = 0.0) -> str:
        asked = rng.choice(self.questions)
        joined, began = Joined(len(asked.wanted)), time.monotonic()
        body = asked.body | {"stream": True}
        async with self.session.post(self.router.url + PATH, json=body) as answer:
            if answer.status != 200:
                content = await answer.json(content_type=None)
                return self._named(answer.status, content["error"]["code"])
            first = True
            async for line in answer.content:
                if first:
                    self.first_tokens.append(time.monotonic() - began)
                    first = False
                joined.add(line.decode())
                if rng.random() < leave:
                    agree = joined.error or self.agrees(asked, joined.choices, whole=False)
                    assert agree, f"{asked.body}: {joined.choices}"
                    return "left"
        return self._ended(asked, joined)

    async def _leave(self, rng: random.Random) -> str:
        return await self._stream(rng, leave=0.15)

    def _ended(self, asked: Question, joined: Joined) -> str:
        assert joined.done, "a stream without its last event"
        agree = self.agrees(asked, joined.choices, whole=joined.error is None)
        assert agree, f"{asked.body}: {joined.choices} for {asked.wanted}"
        return "equal" if joined.error is None else self._named(200, joined.error)

    def _named(self, status: int, code: str | None) -> str:
        """An error that may be. Raises AssertionError for another."""
        if code == "generation_failed":
            assert self.faults["fail"], "generation failed by itself"
            return code
        assert code in NAMED, f"status {status}, code {code}"
        return code

    async def _bad(self, rng: random.Random) -> str:
        wrong: list[dict[str, Any]] = [{"prompt": 5}, {"n": -1}, {"stop": [""]}]
        wrong += {"temperature": -1}, {"prompt": "a " * 3000}
        body = {"prompt": "a"} | rng.choice(wrong)
        async with self.session.post(self.router.url + PATH, json=body) as answer:
            error = (await answer.json(content_type=None))["error"]
            if answer.status == 400:
                assert error["type"] == "invalid_request_error", error
                return "refused"
            return self._named(answer.status, error["code"])

    async def _header(self, rng: random.Random) -> str:
        line = rng.choice([b"X-A: a\x01b", b"X-A: \xe9", b"X-A: \x7f"])
        reader, writer = await self._connect(self.router)
        with Closing(writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), head
        return "refused"

    async def _half_head(self, rng: random.Random) -> str:
        """A request that is never finished, of a router or a server."""
        process = rng.choice([x for x in self.processes if x.ready] or [self.router])
        try:
            _, writer = await self._connect(process)
        except OSError:
            if process is self.router:
                raise
            return "server_down"
        with Closing(writer):
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half: "[: rng.randrange(50)]
            )
            await asyncio.sleep(rng.random())
        return "left"

    async def _half_body(self, rng: random.Random) -> str:
        """A body that stops: its client leaves, or waits to be told that it took too long."""
        reader, writer = await self._connect(self.router)
        with Closing(writer):
            writer.write(post_head(500) + b'{"prompt": "The old ho')
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random())
                return "left"
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 503 ")), head
        return "refused"

    async def _unread(self, rng: random.Random) -> str:
        """A stream that nobody reads, for a while."""
        _, writer = await self._connect(self.router)
        with Closing(writer):
            body = json.dumps(rng.choice(self.questions).body | {"stream": True}).encode()
            writer.write(post_head(len(body)) + body)
            await asyncio.sleep(2 * rng.random())
        return "left"

    async def _slow(self, rng: random.Random) -> str:
        """A stream that is read in drops."""
        asked = rng.choice(self.questions)
        joined = Joined(len(asked.wanted))
        reader, writer = await self._connect(self.router)
        with Closing(writer):
            body = json.dumps(asked.body | {"stream": True}).encode()
            writer.write(post_head(len(body)) + body)
            data = b""
            while piece := await reader.read(rng.choice([50, 200, 2000])):
                data += piece
                await asyncio.sleep(0.02)
        head, _, rest = data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            if not head:
                raise EOFError
            return self._named(int(head[9:12]), json.loads(rest)["error"]["code"])
        for line in unchunked(rest).decode().split("\n"):
            joined.add(line)
        return self._ended(asked, joined)

    async def _connect(self, process: Process) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", process.port)

    # Of operators and machines.

    async def _faults(self, rng: random.Random) -> None:
        """One after another, until the gate closes. A server that ended is back before the next."""
        while not self.over and self.gate.is_set():
            await asyncio.sleep(rng.uniform(*self.fault_seconds))
            if self.over or not self.gate.is_set():
                return
            (kind,) = rng.choices(list(self.fault_kinds), list(self.fault_kinds.values()))
            server = rng.choice(self.servers)
            await FAULT[kind](self, server, rng)
            self.faults[kind] += 1

    async def fault_signal(self, server: Process, number: int) -> None:
        server.send(number)

    async def pause(self, server: Process, rng: random.Random) -> None:
        server.send(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.2, 2))
        server.send(signal.SIGCONT)

    async def restart(self, processes: list[Process], number: int, *, full: bool = False) -> None:
        """full: it then writes to a disk that is full."""
        self.router_changes += self.router in processes
        await asyncio.gather(*(x.stop(number) for x in processes))
        for process in processes:
            process.full = full
            process.start()
        for process in processes:
            await process.wait(self.session)
        self.router_changes += self.router in processes

    # Lulls.

    async def _lull(self, faults: asyncio.Task) -> None:
        """Nothing is asked: what is still open or held then?"""
        self.gate.clear()
        await faults
        async with asyncio.timeout(2 * self.plan.limit_seconds):
            while self.open:
                await asyncio.sleep(0.05)
        sample: dict[str, Any] = {"seconds": time.monotonic() - self.began}
        sample["events"] = self.num_events
        await asyncio.sleep(2.5)  # the router's idle connections are closed after two seconds
        for process in self.processes:
            process.check()
        for server in self.servers:
            sample[server.name] = server.measure() | await self._pages(server)
            sample[server.name]["life"] = server.lives
        sample["router"] = self.router.measure() | {"life": self.router.lives}
        sample["router"]["open"] = await self._metric(self.router, "kvfold_router:open_requests")
        if sample["router"]["open"]:
            self.wrong.append(f"the router counts requests that are open in a lull: {sample}")
        self.samples.append(sample)
        self.gate.set()

    async def _pages(self, server: Process) -> dict[str, float]:
        """What a server holds; nothing may run, wait or own a page."""
        end = time.monotonic() + 10
        while True:
            held = {
                "running": await self._metric(server, "vllm:num_requests_running"),
                "waiting": await self._metric(server, "vllm:num_requests_waiting"),
                "page_bytes": await self._metric(server, 'kvfold:pool_bytes{.*state="used"}'),
            }
            if not any(held.values()) or time.monotonic() > end:
                break
            await asyncio.sleep(0.1)
        if any(held.values()):
            self.wrong.append(f"{server.name} holds {held} in a lull")
        return held

    async def _metric(self, process: Process, name: str) -> float:
        """The sum of what a gauge says."""
        async with self.session.get(f"{process.url}/metrics") as answer:
            text = await answer.text()
        pattern = name if "{" in name else name + r"(?:\{.*\})?"
        return sum(float(x) for x in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))

    # The end.

    def _check_logs(self) -> None:
        for process in self.processes:
            text = process.log.read_text(errors="replace") if process.log.exists() else ""
            for block in text.split("Traceback (most recent call last):\n")[1:]:
                end = re.search(r"^(?!\s)(.*)$", block, re.MULTILINE)
                if end and not end[1].startswith(("__main__.SoakFault", "SoakFault")):
                    self.wrong.append(f"{process.name} logged a traceback: {block[-400:]}")
            if any(process.codes):
                self.wrong.append(f"{process.name} ended with {process.codes} after SIGTERM")

    def growth(self) -> dict[str, dict[str, int]]:
        """The most that a process grew in one of its lives, from its first lull to its last."""
        found: dict[str, dict[str, int]] = {}
        for process in self.processes:
            lives: dict[int, list[dict[str, int]]] = {}
            for sample in self.samples:
                lives.setdefault(sample[process.name]["life"], []).append(sample[process.name])
            found[process.name] = {
                what: max((x[-1][what] - x[0][what] for x in lives.values()), default=0)
                for what in self.most_growth
            }
            for what, most in self.most_growth.items():
                if found[process.name][what] > most:
                    self.wrong.append(f"{process.name} grew by {found[process.name][what]} {what}")
        return found

    def report(self) -> dict[str, Any]:
        growth = self.growth()
        ends: Counter[str] = Counter()
        for (_, name), count in self.outcomes.items():
            ends[name] += count
        times = sorted(self.first_tokens) or [0.0]
        return {
            "plan": asdict(self.plan),
            "seconds": round(self.seconds, 1),
            "events": self.num_events,
            "outcomes": dict(ends),
            "kinds": {f"{kind} {name}": n for (kind, name), n in sorted(self.outcomes.items())},
            "faults": dict(self.faults),
            "lives": {x.name: x.lives for x in self.processes},
            "first_event_s": {p: times[int(len(times) * p / 100)] for p in (50, 99)},
            "growth": growth,
            "log_bytes": {x.name: x.log_bytes for x in self.processes},
            "wrong": self.wrong,
            "samples": self.samples,
        }


Fault = Callable[[Soak, Process, random.Random], Awaitable[None]]
FAULT: dict[str, Fault] = {
    "fail": lambda soak, server, _: soak.fault_signal(server, signal.SIGUSR2),
    "jump": lambda soak, server, _: soak.fault_signal(server, signal.SIGUSR1),
    "pause": lambda soak, server, rng: soak.pause(server, rng),
    "kill": lambda soak, server, _: soak.restart([server], signal.SIGKILL),
    "end": lambda soak, server, _: soak.restart([server], signal.SIGTERM),
    "full": lambda soak, server, _: soak.restart([server], signal.SIGTERM, full=True),
    "end_router": lambda soak, *_: soak.restart([soak.router], signal.SIGTERM),
    "kill_router": lambda soak, *_: soak.restart([soak.router], signal.SIGKILL),
    "kill_all": lambda soak, *_: soak.restart(soak.servers, signal.SIGKILL),
}


class Closing:
    """Closes a connection, whatever happens."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.writer.transport.abort()


def post_head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % length
    )


def unchunked(data: bytes) -> bytes:
    """The content of a chunked body. Raises EOFError where it is cut."""
    content = b""
    while True:
        size, end, data = data.partition(b"\r\n")
        if not end:
            raise EOFError
        if not (length := int(size, 16)):
            return content
        content, data = content + data[:length], data[length + 2 :]


def soak(plan: Plan, kind: type[Soak] = Soak) -> dict[str, Any]:
    """What happened. Its logs are kept where something was wrong."""
    folder = Path(tempfile.mkdtemp(prefix="kvfold-soak-"))
    report = asyncio.run(_soak(plan, kind, folder))
    if not report["wrong"]:
        shutil.rmtree(folder)
    return report | {"logs": str(folder) if report["wrong"] else None}


async def _soak(plan: Plan, kind: type[Soak], folder: Path) -> dict[str, Any]:
    return await kind(plan, folder).run()


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        sys.exit(child(sys.argv[2:]))
    sys.exit(run_command(__doc__.splitlines()[0], Plan, soak))
