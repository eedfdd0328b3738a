"""Load of agents: conversations with long contexts, which grow turn by turn and pause between
turns. How many of them does a server bear?

A conversation starts with tokens that all share and others of its own. A turn adds tokens and asks
for an answer, which becomes part of the context; then comes a pause. A server with prefix caching
reads only what is new, as long as all contexts fit in its memory.
"""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import aiohttp

from kvfold.bench.serve_client import Client, Outcome
from kvfold.bench.serve_load import Conversations, Goals, Prompts, length
from kvfold.bench.serve_results import summary

JOINING = 4  # conversations that read their first context at the same time
FIRST_ANSWER = 8  # tokens of the answer to a first context, which is not measured
SHARE = 0.95  # of the turns that must keep to each goal


class Agents:
    """Agents that talk to one server. `join` adds more of them, which go on until `leave`."""

    def __init__(self, client: Client, prompts: Prompts, settings: Conversations) -> None:
        self.client, self.prompts, self.settings = client, prompts, settings
        self.outcomes: list[Outcome] = []  # of turns that are due, without first ones
        self.start = time.perf_counter()
        self.agents: list[asyncio.Task[None]] = []
        self.joining = asyncio.Semaphore(JOINING)
        self.new = 0  # agents whose first context is not answered

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    async def join(self, number: int) -> None:
        """Add agents until there are `number`, and wait until all are within their conversations.

        Raises ValueError if an agent fails.
        """
        while len(self.agents) < number:
            self.new += 1
            self.agents.append(asyncio.create_task(self._talk(len(self.agents))))
        while self.new:
            self._check()
            await asyncio.sleep(0.01)

    async def measure(self, seconds: float, most_wait: float) -> list[Outcome]:
        """The turns that are due within the next `seconds`, with times from now on. Turns that are
        not answered `most_wait` seconds later have an error."""
        begun = self.now
        await asyncio.sleep(seconds)
        counted = [x for x in self.outcomes if begun <= x.at < begun + seconds]
        while self.now < begun + seconds + most_wait and not all(x.ended for x in counted):
            await asyncio.sleep(0.01)
        self._check()
        return [_from(begun, x) for x in counted]

    async def leave(self) -> None:
        """End all conversations."""
        for agent in self.agents:
            agent.cancel()
        await asyncio.gather(*self.agents, return_exceptions=True)

    def _check(self) -> None:
        for agent in self.agents:
            if agent.done():
                agent.result()  # raises

    async def _talk(self, number: int) -> None:
        """One agent: conversations without end."""
        settings, rng = self.settings, random.Random(f"{self.settings.seed} agent {number}")
        low, high = math.log(settings.shortest), math.log(0.95 * settings.longest)
        context = self._context(f"{number}", int(math.exp(rng.uniform(low, max(low, high)))))
        turn = 0
        while True:
            if len(context) + settings.most_per_turn > settings.longest:
                context = self._context(f"{number} {turn}", settings.shortest)
            context += self.prompts.units_of(
                f"turn {number} {turn}", length(rng, settings.turn_tokens)
            )
            answer = length(rng, settings.answer_tokens)
            if turn:
                pause = rng.expovariate(1.0) * settings.pause
                outcome = await self._turn(context, answer, pause)
            else:
                async with self.joining:
                    outcome = await self._first_turn(context)
                self.new -= 1
            context += await self._units(outcome)
            turn += 1

    def _context(self, name: str, tokens: int) -> list[int | str]:
        shared = self.settings.shared
        beginning = self.prompts.units_of("shared", shared)
        return beginning + self.prompts.units_of(f"context {name}", tokens - shared)

    async def _first_turn(self, context: list[int | str]) -> Outcome:
        outcome = Outcome(at=self.now, prompt_tokens=len(context))
        prompt = self.prompts.joined(context)
        try:
            await self.client.ask(prompt, FIRST_ANSWER, outcome, self.start)
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        if outcome.error is not None:
            raise ValueError(
                f"a context of {len(context)} tokens was not answered: {outcome.error}"
            )
        return outcome

    async def _turn(self, context: list[int | str], answer: int, pause: float) -> Outcome:
        """One measured turn, after a pause of seconds."""
        outcome = Outcome(at=self.now + pause, prompt_tokens=len(context))
        await asyncio.sleep(pause)
        self.outcomes.append(outcome)
        outcome.sent = self.now
        try:
            await self.client.ask(self.prompts.joined(context), answer, outcome, self.start)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = self.now
        return outcome

    async def _units(self, answer: Outcome) -> list[int | str]:
        """An answer as a part of the context, in the units of prompts.

        The prefix cache has the tokens that the server generated. A text may be other tokens.
        """
        if not self.prompts.are_tokens:
            return [*answer.text.split()]
        if answer.token_ids or not answer.text:
            return [*answer.token_ids]
        try:
            return [*(await self.client.token_ids(answer.text) or ())]
        except (aiohttp.ClientError, OSError):  # the next turn says so
            return []


def _from(start: float, outcome: Outcome) -> Outcome:
    """An outcome with times from a later start on; one that has not ended has an error."""
    moved = replace(
        outcome,
        at=outcome.at - start,
        sent=outcome.sent - start,
        ended=outcome.ended - start,
        events=[x - start for x in outcome.events],
    )
    return moved if outcome.ended else replace(moved, ended=moved.at, error="not answered in time")


def result(
    number: int, outcomes: Sequence[Outcome], goals: Goals, seconds: float
) -> dict[str, Any]:
    """The results of so many agents, by their turns within `seconds`.

    borne: whether SHARE of the turns keep to each goal. A turn without an answer keeps to none.
    requests_per_s, output_tokens_per_s: of turns with an answer. context_tokens: mean of prompts.
    """
    good, number_due = [x for x in outcomes if x.ok], max(1, len(outcomes))
    shares = {
        "first_within": sum(1e3 * x.ttft <= (goals.ttft_ms or inf) for x in good) / number_due,
        "token_within": sum(1e3 * x.tpot <= (goals.tpot_ms or inf) for x in good) / number_due,
    }
    row = (
        summary(inf, outcomes, goals) if outcomes else {"requests": 0, "completed": 0, "errors": {}}
    )
    times = {name: x for name, x in row.items() if name.endswith("_ms")}
    return {
        "agents": number,
        "borne": min(shares.values()) >= SHARE,
        **{name: row[name] for name in ("requests", "completed", "errors")},
        **shares,
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": sum(x.output_tokens for x in good) / seconds,
        "context_tokens": sum(x.prompt_tokens for x in outcomes) / number_due,
        **times,
    }
