"""The router's replicas: health checks, and which one gets the next request."""

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
    """A server behind the router.

    num_open: requests that it has from this router now.
    num_sent, num_lost: requests sent to it, and those that it did not answer completely.
    error: why it is not healthy; None: it is.
    """

    url: str
    num_open: int = 0
    num_sent: int = 0
    num_lost: int = 0
    error: str | None = None

    @property
    def healthy(self) -> bool:
        return self.error is None

    def set_health(self, error: str | None) -> None:
        """Record the result of a health check or of a request. error: None if it succeeded."""
        if error != self.error and (error is None or self.error is None):
            logger.warning(
                "replica %s is %s", self.url, "back" if error is None else f"lost: {error}"
            )
        self.error = error


class Replicas(Collector):
    """All replicas of a router; used from its event loop only. A collector for Prometheus."""

    def __init__(self, urls: Sequence[str], balance: Balance) -> None:
        self.all = [Replica(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self.balance, self.retries = balance, 0
        self._last = -1  # index of the replica picked last (round-robin)

    def pick(self, excluded: Collection[Replica]) -> Replica | None:
        """A healthy replica for the next request, not in `excluded`; None if there is none.

        Of equally loaded replicas, the one that has been sent the fewest requests.
        """
        healthy = [x for x in self.all if x.healthy and x not in excluded]
        if not healthy:
            return None
        if self.balance.pick == "shortest":
            return min(healthy, key=lambda x: (x.num_open, x.num_sent))
        last, size = self._last, len(self.all)
        replica = min(healthy, key=lambda x: (self.all.index(x) - last - 1) % size)
        self._last = self.all.index(replica)
        return replica

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Check the health of all replicas at intervals, without end."""
        await asyncio.gather(*(self._watch(replica, session) for replica in self.all))

    async def _watch(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        while True:
            num_lost = replica.num_lost
            error = await self._check_health(replica, session)
            if replica.num_lost == num_lost:  # otherwise a request has failed in the meantime
                replica.set_health(error)
            await asyncio.sleep(self.balance.check_seconds)

    async def _check_health(self, replica: Replica, session: aiohttp.ClientSession) -> str | None:
        """The result of /health: None, or what is wrong."""
        timeout = aiohttp.ClientTimeout(total=max(5.0, self.balance.check_seconds))
        try:
            async with session.get(f"{replica.url}/health", timeout=timeout) as answer:
                return None if answer.status == 200 else f"/health says {answer.status}"
        except (aiohttp.ClientError, OSError) as error:
            return reason(error)

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("healthy", "Whether the replica is healthy.", lambda x: float(x.healthy)),
            ("open_requests", "Open requests at the replica.", lambda x: x.num_open),
        ):
            gauge = GaugeMetricFamily(f"kvfold_router:{name}", text, labels=["replica"])
            for replica in self.all:
                gauge.add_metric([replica.url], value(replica))
            yield gauge
        for name, text, value in (
            ("requests", "Requests sent to the replica.", lambda x: x.num_sent),
            ("lost_requests", "Requests not answered completely.", lambda x: x.num_lost),
        ):
            counter = CounterMetricFamily(f"kvfold_router:{name}", text, labels=["replica"])
            for replica in self.all:
                counter.add_metric([replica.url], value(replica))
            yield counter
        text = "Requests sent again to another replica."
        retries = CounterMetricFamily("kvfold_router:retries", text)
        retries.add_metric([], self.retries)
        yield retries


@contextlib.asynccontextmanager
async def watching(replicas: Replicas, session: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Context manager: check the replicas' health while inside."""
    task = asyncio.create_task(replicas.watch(session))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
