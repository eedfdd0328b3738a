"""Replicas behind one address: which are alive, and which is asked next."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvfold.server.limits import Balance

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """A server. open: requests that it has from here; asked, lost: requests that were sent, and
    those that it did not answer to the end; why: it is not healthy."""

    url: str
    open: int = 0
    asked: int = 0
    lost: int = 0
    why: str | None = None

    @property
    def healthy(self) -> bool:
        return self.why is None

    def turn(self, why: str | None) -> None:
        """What a look, or a request, said of its health."""
        if why != self.why and (why is None or self.why is None):
            logger.warning("replica %s is %s", self.url, "back" if why is None else f"lost: {why}")
        self.why = why


class Replicas(Collector):
    """All of them, in the event loop that looks at them. Prometheus can collect it."""

    def __init__(self, urls: Sequence[str], balance: Balance) -> None:
        self.all = [Replica(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self.balance, self.retries = balance, 0
        self._last = -1  # whose turn it was

    def pick(self, but: Collection[Replica]) -> Replica | None:
        """Whom to ask next: a healthy one that is not in `but`. None: there is none.

        Queues of the same length take turns, by what was asked of them."""
        able = [x for x in self.all if x.healthy and x not in but]
        if not able:
            return None
        if self.balance.pick == "shortest":
            return min(able, key=lambda x: (x.open, x.asked))
        last, size = self._last, len(self.all)
        found = min(able, key=lambda x: (self.all.index(x) - last - 1) % size)
        self._last = self.all.index(found)
        return found

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Look at every replica, again and again."""
        await asyncio.gather(*(self._watch(replica, session) for replica in self.all))

    async def _watch(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        while True:
            lost = replica.lost
            why = await self._look(replica, session)
            if replica.lost == lost:  # else a request knows something newer
                replica.turn(why)
            await asyncio.sleep(self.balance.check_seconds)

    async def _look(self, replica: Replica, session: aiohttp.ClientSession) -> str | None:
        """Why it is not healthy."""
        timeout = aiohttp.ClientTimeout(total=max(5.0, self.balance.check_seconds))
        try:
            async with session.get(f"{replica.url}/health", timeout=timeout) as answer:
                return None if answer.status == 200 else f"/health says {answer.status}"
        except (aiohttp.ClientError, OSError) as error:
            return reason(error)

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("healthy", "Whether it answers.", lambda x: float(x.healthy)),
            ("open_requests", "That it has from here.", lambda x: x.open),
        ):
            gauge = GaugeMetricFamily(f"kvfold_router:{name}", text, labels=["replica"])
            for replica in self.all:
                gauge.add_metric([replica.url], value(replica))
            yield gauge
        for name, text, value in (
            ("requests", "Sent to it.", lambda x: x.asked),
            ("lost_requests", "That it did not answer to the end.", lambda x: x.lost),
        ):
            counter = CounterMetricFamily(f"kvfold_router:{name}", text, labels=["replica"])
            for replica in self.all:
                counter.add_metric([replica.url], value(replica))
            yield counter
        text = "Requests sent once more, to another replica."
        retries = CounterMetricFamily("kvfold_router:retries", text)
        retries.add_metric([], self.retries)
        yield retries


@contextlib.asynccontextmanager
async def watching(replicas: Replicas, session: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Looks at replicas inside the block."""
    task = asyncio.create_task(replicas.watch(session))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
