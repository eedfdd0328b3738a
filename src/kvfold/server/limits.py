"""What a server lets its clients do, and how a router spreads them. Imports no server."""

from dataclasses import dataclass
from typing import Literal

from kvfold.config import check, setting

Pick = Literal["shortest", "round-robin"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of requests, of their number and of time. Raises ValueError."""

    max_queue: int = setting(
        256, "Choices that wait beside those that run; more get a 429.", least=0
    )
    max_choices: int = setting(64, "Choices of a request: its prompts times n.", least=1)
    max_body: int = setting(8 * 2**20, "Bytes of a request.", least=1024)
    max_stops: int = setting(16, "Stop strings of a request, of 1024 characters at most.", least=0)
    max_logprobs: int = setting(20, "Likeliest tokens reported beside each.", least=0)
    request_seconds: float = setting(600, "Most time for a request's answer.", above=0)
    max_connections: int = setting(
        1024, "Open at once; fewer where the system allows fewer descriptors.", least=1
    )
    max_bodies: int = setting(
        128 * 2**20, "Bytes of all requests that are being sent; more get a 503.", least=1024
    )
    head_seconds: float = setting(
        10, "Most time to send the head of a request, and for a connection without one.", above=0
    )
    body_seconds: float = setting(30, "Most time to send a request.", above=0)
    send_seconds: float = setting(
        30, "Most time that a client may leave what it is sent unread.", above=0
    )
    drain_seconds: int = setting(
        30, "After SIGTERM, most time for what is open to be answered.", least=0
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How requests are spread. Raises SettingError."""

    pick: Pick = setting(
        "shortest", "Who is asked: whoever has the fewest requests from here, or each in turn."
    )
    check_seconds: float = setting(1.0, "Between two looks at a replica's /health.", above=0)
    retries: int = setting(
        2, "Other replicas that are asked where one is lost before its answer begins.", least=0
    )

    def __post_init__(self) -> None:
        check(self)
