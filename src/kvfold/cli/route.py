"""kvfold route: one address that forwards requests to several servers."""

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
    tuple[str, ...],
    Parameter(help="URLs of the servers, such as http://127.0.0.1:8000.", negative=""),
]


@Parameter(name="*", group="Address and limits")
@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where the router listens, and its limits."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all networks.")
    port: int = setting(8080, "Port to listen on; 0 for any free port.", least=0, most=65535)
    request_seconds: float = setting(
        Limits.request_seconds, "Longest time that a server may send nothing.", above=0
    )
    max_body: int = setting(
        Limits.max_body, "Most bytes of a request; the servers may accept fewer.", least=1024
    )
    max_bodies: int = setting(
        Limits.max_bodies, "Most bytes of all requests that are being received.", least=1024
    )
    max_connections: int = setting(
        Limits.max_connections,
        "Most clients connected at once; fewer if the system allows fewer file descriptors.",
        least=1,
    )
    head_seconds: float = setting(
        Limits.head_seconds, "Longest time for a client to send headers, or to be idle.", above=0
    )
    body_seconds: float = setting(
        Limits.body_seconds, "Longest time for a client to send a request.", above=0
    )
    send_seconds: float = setting(
        Limits.send_seconds, "Longest time for a client to leave an answer unread.", above=0
    )
    drain_seconds: int = setting(
        Limits.drain_seconds, "Longest time to finish open requests after SIGTERM.", least=0
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def limits(self) -> Limits:
        names = {x.name for x in dataclasses.fields(Limits)}
        return Limits(**{k: v for k, v in dataclasses.asdict(self).items() if k in names})


@Parameter(name="*", group="Balance")
@dataclass(frozen=True, kw_only=True)
@flags_of(Balance)
class BalanceFlags:
    """Flags of `Balance`."""

    @property
    def balance(self) -> Balance:
        return Balance(**dataclasses.asdict(self))

    def __post_init__(self) -> None:
        self.balance  # noqa: B018


LISTEN, BALANCE = Listen(), BalanceFlags()


def route(urls: Urls, /, *, listen: Listen = LISTEN, balance: BalanceFlags = BALANCE) -> None:
    """Distribute requests over several servers of the same model.

    If a server fails before an answer begins, the request goes to another server; later, the answer
    ends with an error. API keys are passed on unchanged. /health and /metrics are the router's own.
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
    app = create_router(urls, balance=balance.balance, limits=listen.limits)
    run(app, listener, listen.limits)
