"""kvfold route: one address before several servers."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from kvfold.cli.options import flags_of
from kvfold.config import check, setting
from kvfold.server import check_installed
from kvfold.server.limits import Balance, Limits

Urls = Annotated[
    tuple[str, ...], Parameter(help="Of the servers, such as http://127.0.0.1:8000.", negative="")
]


@Parameter(name="*", group="Address and limits")
@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where the router is, what it takes, and how long it waits."""

    host: str = setting("127.0.0.1", "Address to listen at; 0.0.0.0 is every network's.")
    port: int = setting(8080, "Port; 0 takes any.", least=0, most=65535)
    request_seconds: float = setting(
        Limits.request_seconds, "Most time that a replica may be silent.", above=0
    )
    max_body: int = setting(
        Limits.max_body, "Bytes of a request; a replica may take fewer.", least=1024
    )
    max_bodies: int = setting(
        Limits.max_bodies, "Bytes of all requests that are being sent.", least=1024
    )
    max_connections: int = setting(
        Limits.max_connections,
        "Clients connected at once; fewer where the system allows fewer descriptors.",
        least=1,
    )
    head_seconds: float = setting(
        Limits.head_seconds, "Most time to send a request's head, or to be idle.", above=0
    )
    body_seconds: float = setting(Limits.body_seconds, "Most time to send a request.", above=0)
    send_seconds: float = setting(
        Limits.send_seconds, "Most time that a client may leave what it is sent unread.", above=0
    )
    drain_seconds: int = setting(
        Limits.drain_seconds, "After SIGTERM, most time for what is open.", least=0
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def limits(self) -> Limits:
        named = {x.name for x in dataclasses.fields(Limits)}
        return Limits(**{k: v for k, v in dataclasses.asdict(self).items() if k in named})


@Parameter(name="*", group="Balance")
@dataclass(frozen=True, kw_only=True)
@flags_of(Balance)
class Spread:
    """`Balance`."""

    @property
    def balance(self) -> Balance:
        return Balance(**dataclasses.asdict(self))

    def __post_init__(self) -> None:
        self.balance  # noqa: B018


LISTEN, SPREAD = Listen(), Spread()


def route(urls: Urls, /, *, listen: Listen = LISTEN, spread: Spread = SPREAD) -> None:
    """Spread requests over several servers that serve the same model.

    A request whose server is lost before its answer begins goes to another; one that has begun ends
    with an error. Keys and all else pass as they came; /health and /metrics are the router's.
    """
    check_installed("aiohttp")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL; give one such as http://127.0.0.1:8000")
        if parts.username is not None:
            raise ValueError(
                f"the URL of {parts.hostname} has a name or password, which /health and /metrics "
                "would show: leave it out; clients send their keys themselves"
            )
    if len(set(urls)) < len(urls):
        raise ValueError(f"{', '.join(urls)}: give each server once")
    from kvfold.server.router import create_router
    from kvfold.server.run import bind, run

    listener = bind(listen.host, listen.port)
    app = create_router(urls, balance=spread.balance, limits=listen.limits)
    run(app, listener, listen.limits)
