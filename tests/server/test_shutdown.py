"""What clients read of a server that ends before it has answered them."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from replicas import Stub, running, stub
from router_cases import STREAM, WHOLE, routing, text_of, until
from serving import httpx, serving, small_llm

from starlette.applications import Starlette  # isort: skip
from starlette.responses import Response, StreamingResponse  # isort: skip
from starlette.routing import Route  # isort: skip
from kvfold.server.limits import Limits  # isort: skip
from kvfold.server.router import create_router  # isort: skip
from kvfold.server.run import say  # isort: skip

PATH = "/v1/completions"
CODE = "shutting_down"


def assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert error["code"] == CODE and error["type"] == "server_error"


def assert_ends_with_error(lines: list[str]) -> None:
    *_, error, done = [line for line in lines if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == CODE
    assert done == "data: [DONE]"


def assert_log_is_short(capfd: pytest.CaptureFixture[str], requests: int) -> None:
    log = capfd.readouterr().err
    assert "Traceback" not in log and len(log.splitlines()) <= 1 + requests, log


def test_what_a_server_does_not_get_to_is_told_at_the_end_of_its_drain(capfd) -> None:
    body = {"prompt": "The old house", "max_tokens": 100, "ignore_eos": True}
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(8) as pool,
        serving(small_llm(), limits=Limits(drain_seconds=1)) as served,
    ):
        stack.enter_context(served.llm.engine.lock.hold())  # nothing is answered
        whole = [pool.submit(served.post, **body) for _ in range(2)]
        chats = [
            pool.submit(served.post, "/v1/chat/completions", messages=[ASKED], **options)
            for options in ({"max_tokens": 9}, {"max_tokens": 9, "stream": True})
        ]
        streams = [pool.submit(served.post, **body, stream=True) for _ in range(2)]
        until(lambda: len(served.llm.engine.lock._calls) == 6)
        served.server.should_exit = True
        for call in (*whole, chats[0]):
            assert_refused(call.result(30))
        for call in (*streams, chats[1]):
            assert call.result(30).status_code == 200
            assert_ends_with_error(call.result().text.splitlines())
        stack.close()
    assert_log_is_short(capfd, 0)


ASKED = {"role": "user", "content": "Hello"}


@contextmanager
def ending_stub() -> Iterator[tuple[Stub, ExitStack]]:
    """A replica that answers nobody, and what ends it."""
    replica = Stub("ending", how="slow")
    with ExitStack() as stack:
        replica.url = stack.enter_context(running(replica.app))
        yield replica, stack


def test_a_router_asks_another_replica_for_what_an_ending_one_leaves(capfd) -> None:
    """Whole answers, and streams that have no token yet; nothing is lost."""
    with (
        ending_stub() as (first, end_of_first),
        stub("second") as second,
        routing(first.url, second.url, pick="round-robin", check_seconds=60) as client,
        ThreadPoolExecutor(12) as pool,
    ):
        calls = []
        for count, body in enumerate((WHOLE, WHOLE, STREAM, STREAM) * 2, 1):  # each kind to both
            calls.append(pool.submit(client.post, PATH, json=body))
            until(lambda n=count: len(first.asked) + len(second.asked) == n)
        assert len(first.asked) == 4
        end_of_first.close()
        whole, streams = calls[:2] + calls[4:6], calls[2:4] + calls[6:]
        assert [x.result(30).json()["by"] for x in whole] == ["second"] * 4
        assert [text_of(x.result(30).text.splitlines()) for x in streams] == ["0 1 2 3 "] * 4
        assert len(second.asked) == 8
    assert_log_is_short(capfd, 0)


def test_a_router_passes_on_that_its_only_replica_ends() -> None:
    with (
        ending_stub() as (first, end),
        routing(first.url, check_seconds=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(client.post, PATH, json=STREAM)
        until(lambda: len(first.asked) == 1)
        end.close()
        assert_ends_with_error(call.result(30).text.splitlines())


def test_a_router_that_ends_says_so_too(capfd) -> None:
    with stub(how="slow") as replica, ThreadPoolExecutor(2) as pool, ExitStack() as router:
        url = router.enter_context(running(create_router([replica.url])))
        calls = [pool.submit(httpx.post, url + PATH, json=x, timeout=60) for x in (WHOLE, STREAM)]
        until(lambda: len(replica.asked) == 2)
        router.close()
        for call in calls:  # a stream has not begun before its first event
            assert_refused(call.result(30))
        replica.go.set()
    assert_log_is_short(capfd, 0)


def test_who_reads_nothing_does_not_hold_the_end(capfd) -> None:
    """The last words wait a second for a client."""

    async def endless(*_: object) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"data: {}\n\n" * 10_000
                await asyncio.sleep(0)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    with ExitStack() as server:
        url = server.enter_context(running(Starlette(routes=[Route("/", endless)])))
        with httpx.stream("GET", url) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            began = time.monotonic()
            server.close()
            assert time.monotonic() - began < 10
    assert_log_is_short(capfd, 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is full")
def test_a_log_that_cannot_be_written_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, or into a pipe that nobody reads."""
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    with pytest.raises(OSError, match="No space left"):
        print("a line", file=sys.stderr)
    say("a line")
    with suppress(OSError):
        full.close()
