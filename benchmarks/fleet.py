"""A paper plan for many nodes, of one node's measured numbers: requests a second, bytes of caches
that move between nodes, and prefixes that are found, by what is kept of a cache.

    python benchmarks/fleet.py --nodes 10,100,1000 --json fleet.json

Nodes that read prompts send each prompt's cache to a node that decodes it (all to all), and keep
prefixes that prompts share: of others they fetch what they lack. What a node does by itself was
measured (`kvfold bench decode --set prefill`: milliseconds of a step at 3 batches, of a prompt);
everything between nodes is simulated, request by request. Not modelled: failures, links that are
shared, tensor parallelism, prompts of many lengths.

Steps between the batches measured are interpolated by tokens stored, beyond them extrapolated. A
decoding node's requests share its steps alike; a prompt is read whole, first come first served.
"""

import argparse
import heapq
import json
import random
import statistics
from bisect import bisect
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, field
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Tokens of a request: prefix (shared with others), own, answer. prefixes: how many there are
    to a node, asked for by Zipf's law; cache_bytes: of a node; link: bytes/s into one; most_ms: of
    a step; load: share of the bound that arrives; seconds: that are simulated; patience: seconds
    that a prompt waits at most where its prefix is, before it goes elsewhere."""

    prefix: int = 6144
    own: int = 2048
    answer: int = 256
    prefixes: int = 300
    cache_bytes: float = 891e3 * 131072  # vLLM 0.25.1 on an H200 beside Llama-3.1-8B, measured
    link: float = 50e9  # 400 Gb/s
    most_ms: float = 40.0
    load: float = 0.8
    seconds: float = 20.0
    patience: float = 0.5

    @property
    def prompt(self) -> int:
        return self.prefix + self.own

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Node:
    """One that was measured. token: bytes; steps: (tokens stored, ms), ascending; prefill: tokens
    a second."""

    variant: str
    token: float
    steps: tuple[tuple[float, float], ...]
    prefill: float

    @classmethod
    def of(cls, variant: str, measured: dict) -> "Node":
        rows = [x for x in measured["rows"] if x["variant"] == variant]
        (first,) = [x for x in measured["first_tokens"] if x["variant"] == variant]
        steps = sorted((x["batch"] * x["tokens"], x["ms"]) for x in rows)
        token = rows[0]["cache_bytes"] / (rows[0]["batch"] * rows[0]["tokens"])
        return cls(variant, token, tuple(steps), first["tokens_per_s"])

    def step(self, stored: float) -> float:
        """Milliseconds of a step over so many tokens."""
        if stored <= self.steps[0][0]:
            return self.steps[0][1]
        for (x0, y0), (x1, y1) in pairwise(self.steps):
            if stored <= x1 or x1 == self.steps[-1][0]:
                return y0 + (y1 - y0) * (stored - x0) / (x1 - x0)
        raise AssertionError

    def batch(self, plan: Plan) -> int:
        """Most requests that decode at once, by memory and by `most_ms`."""
        room = int(plan.cache_bytes / self.token / plan.tokens)
        return max(1, sum(self.step(b * plan.tokens) <= plan.most_ms for b in range(1, room + 1)))

    def decodes(self, plan: Plan) -> float:
        """Requests a second."""
        batch = self.batch(plan)
        return batch / (plan.answer * self.step(batch * plan.tokens) / 1e3)

    def room(self, plan: Plan) -> int:
        """Prefixes that fit into a node."""
        return int(plan.cache_bytes / self.token / plan.prefix)

    def split(self, plan: Plan, nodes: int, popular: list[float]) -> tuple[int, float]:
        """How many nodes had best read prompts, and requests a second that the fleet then bears,
        where the most popular prefixes are kept, each by one node. popular: how often any of the
        first prefixes is asked for, cumulated."""
        decodes, best = self.decodes(plan), (0.0, 1)
        for readers in range(1, nodes):
            kept = min(readers * self.room(plan), len(popular))
            found = popular[kept - 1] / popular[-1] if kept else 0.0
            reads = readers * self.prefill / (plan.own + (1 - found) * plan.prefix)
            best = max(best, (min(reads, (nodes - readers) * decodes), readers))
        return best[1], best[0]


@dataclass
class Reader:
    """A node that reads prompts. kept: prefixes, the least recently used first."""

    room: int
    free: float = 0.0
    kept: OrderedDict = field(default_factory=OrderedDict)

    def keep(self, prefix: int) -> None:
        self.kept[prefix] = True
        self.kept.move_to_end(prefix)
        while len(self.kept) > self.room:
            self.kept.popitem(last=False)


@dataclass
class Decoder:
    """A node that decodes: its requests all advance by a token a step. steps: done by `now`;
    running: (step at which it ends, number), a heap; waiting: numbers."""

    room: int
    now: float = 0.0
    steps: float = 0.0
    version: int = 0
    running: list = field(default_factory=list)
    waiting: deque = field(default_factory=deque)

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)


class Fleet:
    """One run, in order of time. Counts bytes between nodes, and seconds of requests."""

    def __init__(self, node: Node, plan: Plan, nodes: int, seed: int = 0) -> None:
        self.node, self.plan, self.nodes = node, plan, nodes
        self.popular = list(accumulate(1 / k for k in range(1, plan.prefixes * nodes + 1)))
        readers, self.bound = node.split(plan, nodes, self.popular)
        self.readers = [Reader(node.room(plan)) for _ in range(readers)]
        for prefix in reversed(range(min(len(self.popular), readers * node.room(plan)))):
            self.readers[prefix % readers].keep(prefix)
        self.decoders = [Decoder(node.batch(plan)) for _ in range(nodes - readers)]
        self.rng, self.order = random.Random(seed), count()
        self.events: list = []
        self.began: list[float] = []
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.moved = self.fetched = 0.0
        self.hits = self.fetches = 0

    def run(self) -> dict:
        now, rate = 0.0, self.bound * self.plan.load
        while (now := now + self.rng.expovariate(rate)) < self.plan.seconds:
            self._at(now, "arrive", len(self.began))
            self.began.append(now)
        while self.events:
            now, _, kind, *what = heapq.heappop(self.events)
            getattr(self, f"_{kind}")(now, *what)
        return self.report()

    def _at(self, time: float, *event: Any) -> None:
        heapq.heappush(self.events, (time, next(self.order), *event))

    def _arrive(self, now: float, request: int) -> None:
        """The prompt goes where its prefix is at home, or, where many wait, to the emptier of two;
        which fetches the prefix if its home has it."""
        plan, node = self.plan, self.node
        prefix = bisect(self.popular, self.rng.random() * self.popular[-1])
        home = chosen = self.readers[prefix % len(self.readers)]
        if home.free - now > plan.patience:
            pair = (self.rng.choice(self.readers) for _ in range(2))
            chosen = min(pair, key=lambda x: x.free)
        start, tokens = max(now, chosen.free), plan.own
        if prefix in chosen.kept:
            self.hits += 1
        elif prefix in home.kept:
            self.fetches += 1
            self.fetched += plan.prefix * node.token
            start += plan.prefix * node.token / plan.link
        else:
            tokens = plan.prompt
        chosen.keep(prefix)
        chosen.free = start + tokens / node.prefill
        self.moved += plan.prompt * node.token
        self._at(chosen.free + plan.prompt * node.token / plan.link, "decode", request)

    def _decode(self, now: float, request: int) -> None:
        node = min((self.rng.choice(self.decoders) for _ in range(2)), key=lambda x: x.load)
        self._advance(node, now)
        node.waiting.append(request)
        self._admit(node, now)

    def _finish(self, now: float, node: Decoder, version: int) -> None:
        if version != node.version:
            return  # others came or went since
        self._advance(node, now)
        while node.running and node.running[0][0] <= node.steps + 1e-6:
            self.ended[heapq.heappop(node.running)[1]] = now
        self._admit(node, now)

    def _ms(self, node: Decoder) -> float:
        return self.node.step(len(node.running) * (self.plan.prompt + self.plan.answer / 2))

    def _advance(self, node: Decoder, now: float) -> None:
        if node.running:
            node.steps += (now - node.now) * 1e3 / self._ms(node)
        node.now = now

    def _admit(self, node: Decoder, now: float) -> None:
        while node.waiting and len(node.running) < node.room:
            request = node.waiting.popleft()
            heapq.heappush(node.running, (node.steps + self.plan.answer, request))
            self.first[request] = now
        node.version += 1
        if node.running:
            left = node.running[0][0] - node.steps
            self._at(now + left * self._ms(node) / 1e3, "finish", node, node.version)

    def report(self) -> dict:
        """Of all requests; rates are over the seconds in which they came."""
        plan, n = self.plan, len(self.began)
        waits = sorted(self.first[i] - x for i, x in enumerate(self.began))
        each = [(self.ended[i] - x) / plan.answer * 1e3 for i, x in self.first.items()]
        return {
            "variant": self.node.variant,
            "nodes": self.nodes,
            "prefill_nodes": len(self.readers),
            "token_bytes": self.node.token,
            "tokens_per_node": int(plan.cache_bytes / self.node.token),
            "batch": self.node.batch(plan),
            "bound_per_s": self.bound,
            "requests": n,
            "requests_per_s_per_node": n / plan.seconds / self.nodes,
            "first_token_s_p50": waits[n // 2],
            "first_token_s_p95": waits[int(n * 0.95)],
            "step_ms": statistics.fmean(each),
            "prefix_found": self.hits / n,
            "prefix_fetched": self.fetches / n,
            "cache_bytes_per_request": plan.prompt * self.node.token,
            "all_to_all_bytes_per_s": self.moved / plan.seconds,
            "prefix_bytes_per_s": self.fetched / plan.seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, default=RESULTS / "decode-tiers-8b.json")
    parser.add_argument("--nodes", default="10,100")
    parser.add_argument("--variants", default="bf16-full,int4-half,swift-4x,swift-5x,lean-6x")
    parser.add_argument("--json", type=Path)
    for name, value in asdict(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = vars(parser.parse_args())
    plan = Plan(**{name: given[name] for name in asdict(Plan())})
    measured = json.loads(given["measured"].read_text(encoding="utf-8"))
    rows = []
    for nodes in map(int, given["nodes"].split(",")):
        for variant in given["variants"].split(","):
            rows.append(Fleet(Node.of(variant, measured), plan, nodes).run())
            print(json.dumps(rows[-1]), flush=True)
    if given["json"]:
        source = {"file": given["measured"].name, "versions": measured["versions"]}
        found = {"benchmark": "fleet", "plan": asdict(plan), "measured": source, "rows": rows}
        given["json"].write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
