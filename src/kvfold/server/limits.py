"""Settings of `kvfold serve` and `kvfold route`: limits per client, and load balancing. Imports no
web framework."""

from dataclasses import dataclass
from typing import Literal

from kvfold.config import check, setting

Pick = Literal["shortest", "round-robin"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on the number, size and duration of requests. Raises ValueError."""

    max_queue: int = setting(
        256, "Choices that may wait while others run; further ones get a 429.", least=0
    )
    max_choices: int = setting(64, "Choices of one request: its prompts times n.", least=1)
    max_body: int = setting(8 * 2**20, "Bytes of a request body.", least=1024)
    max_stops: int = setting(
        16, "Stop strings of a request, of at most 1024 characters each.", least=0
    )
    max_logprobs: int = setting(20, "Alternatives that logprobs reports per token.", least=0)
    request_seconds: float = setting(600, "Seconds until a request is answered in full.", above=0)
    max_connections: int = setting(
        1024, "Open connections; fewer if the system allows fewer file descriptors.", least=1
    )
    max_bodies: int = setting(
        128 * 2**20, "Bytes of all request bodies being received; more get a 503.", least=1024
    )
    head_seconds: float = setting(
        10, "Seconds to send a request's headers, and for a connection to be idle.", above=0
    )
    body_seconds: float = setting(30, "Seconds to send a request body.", above=0)
    send_seconds: float = setting(
        30, "Seconds that a client may leave its response unread.", above=0
    )
    drain_seconds: int = setting(30, "Seconds after SIGTERM to answer open requests.", least=0)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How the router spreads requests over replicas. Raises SettingError."""

    pick: Pick = setting(
        "shortest",
        "Which replica gets a request: the one with the fewest open requests, or each in turn.",
    )
    check_seconds: float = setting(
        1.0, "Seconds between two checks of a replica's /health.", above=0
    )
    retries: int = setting(
        2, "Other replicas to try if one is lost before its response begins.", least=0
    )

    def __post_init__(self) -> None:
        check(self)
