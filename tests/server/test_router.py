"""kvfold route: who is asked, what is asked again, and what a lost replica takes with it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from replicas import Stub, stub

import httpx  # isort: skip
from kvfold.server.limits import Balance  # isort: skip
from kvfold.server.replicas import Replicas  # isort: skip
from router_cases import STREAM, WHOLE, metrics, routing, text_of, until

PATH = "/v1/completions"


@contextmanager
def three(**how: Any) -> Iterator[list[Stub]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stub(name, **how)) for name in ("one", "two", "three")]


def test_who_is_asked_next() -> None:
    shortest = Replicas(["http://a", "http://b/v1/", "http://c"], Balance())
    a, b, c = shortest.all
    assert b.url == "http://b"
    a.num_open, b.num_open = 2, 1
    assert shortest.pick(()) is c
    c.set_health("lost")
    assert shortest.pick(()) is b and shortest.pick([b]) is a and shortest.pick([a, b]) is None
    b.num_open, a.num_sent = 2, 5  # of equal queues, whoever was asked less
    assert shortest.pick(()) is b
    turns = Replicas(["http://a", "http://b", "http://c"], Balance(pick="round-robin"))
    turns.all[0].num_open = 9
    assert [turns.pick(()) for _ in range(4)] == [*turns.all, turns.all[0]]


def test_a_look_that_began_before_a_loss_does_not_undo_it() -> None:
    async def watch() -> str | None:
        replicas = Replicas(["http://a"], Balance(check_seconds=60))
        (replica,) = replicas.all

        async def look(*_: Any) -> None:  # it is healthy, and dies before that is read
            replica.num_lost += 1
            replica.set_health("lost")

        replicas._check_health = look
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replicas.watch(None), 0.05)
        return replica.error

    assert asyncio.run(watch()) == "lost"


def test_what_goes_through_comes_through() -> None:
    with three() as stubs, routing(*stubs, pick="round-robin") as client:
        header = {"Authorization": "Bearer k", "X-Request-Id": "7"}
        found = [client.post(PATH, json=WHOLE, headers=header).json()["by"] for _ in range(3)]
        assert found == ["one", "two", "three"]
        assert stubs[0].asked == [WHOLE]
        assert stubs[0].headers[0]["authorization"] == "Bearer k"
        assert stubs[0].headers[0]["x-request-id"] == "7"
        with client.stream("POST", PATH, json=STREAM) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = list(answer.iter_lines())
        assert text_of(lines) == "0 1 2 3 " and "data: [DONE]" in lines
        assert client.get("/v1/models").json()["data"][0]["id"] == "stub"
        assert client.get("/v1/nothing").status_code == 404
        assert client.post(PATH, content=b"x" * 30_000).status_code == 413
        assert sum(metrics(client, "requests").values()) == 6
        assert set(metrics(client, "open_requests").values()) == {0}


def test_a_queue_grows_where_it_is_shortest() -> None:
    with three(how="slow") as stubs, routing(*stubs) as client, ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(client.post, PATH, json=STREAM) for _ in range(6)]
        until(lambda: [x.open for x in stubs] == [2, 2, 2])
        for x in stubs:
            x.go.set()
        assert all("[DONE]" in call.result().text for call in calls)
        until(lambda: set(metrics(client, "open_requests").values()) == {0})


@pytest.mark.parametrize("body", [WHOLE, STREAM])
def test_what_has_not_begun_is_asked_again(body: dict[str, Any]) -> None:
    with three() as stubs, routing(*stubs, pick="round-robin", check_seconds=60) as client:
        stubs[0].how = "dead"
        answer = client.post(PATH, json=body)
        assert answer.status_code == 200 and [len(x.asked) for x in stubs] == [1, 1, 0]
        assert ("whole" in answer.text) or text_of(answer.text.splitlines()) == "0 1 2 3 "
        lost = metrics(client, "lost_requests")
        assert lost[stubs[0].url] == 1 and sum(lost.values()) == 1
        assert metrics(client, "retries") == {"": 1}
        assert metrics(client, "healthy")[stubs[0].url] == 0
        assert [client.post(PATH, json=WHOLE).json()["by"] for _ in range(3)].count("one") == 0


def test_what_has_begun_is_not_asked_again() -> None:
    with three() as stubs, routing(*stubs, pick="round-robin") as client:
        stubs[0].how = "cut"
        lines = client.post(PATH, json=STREAM).text.splitlines()
        assert text_of(lines) == "0 1 "
        *_, error, _, done = [x for x in lines if x.strip() or x == ""][:-1]
        assert json.loads(error[6:])["error"]["code"] == "replica_lost"
        assert done == "data: [DONE]" and [len(x.asked) for x in stubs] == [1, 0, 0]
        until(lambda: metrics(client, "healthy")[stubs[0].url] == 1)


def test_a_full_replica_sends_on_and_all_full_says_so() -> None:
    with three() as stubs, routing(*stubs, pick="round-robin") as client:
        stubs[0].how = "full"
        assert client.post(PATH, json=WHOLE).json()["by"] == "two"
        for x in stubs:
            x.how = "full"
        answer = client.post(PATH, json=WHOLE)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        assert metrics(client, "healthy") == dict.fromkeys([x.url for x in stubs], 1)


def test_no_replica_is_well_and_they_come_back() -> None:
    with stub() as one, routing(one, "http://127.0.0.1:1", check_seconds=0.05) as client:
        until(lambda: sum(metrics(client, "healthy").values()) == 1)
        assert client.get("/health").json()["replicas"][one.url] == "ok"
        one.healthy = False
        until(lambda: client.get("/health").status_code == 503)
        answer = client.post(PATH, json=WHOLE)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "no_replica" and not one.asked
        one.healthy = True
        until(lambda: client.get("/health").status_code == 200)
        assert client.post(PATH, json=WHOLE).json()["by"] == "one"


def test_who_leaves_leaves_the_replica() -> None:
    brief = httpx.Timeout(60, read=0.2)
    with stub(how="slow") as one, routing(one) as client:
        for body in (WHOLE, STREAM):
            one.how = "slow"
            with pytest.raises(httpx.ReadTimeout):
                client.post(PATH, json=body | {"stream": True}, timeout=brief)
            until(lambda: one.open == 0)
            until(lambda: set(metrics(client, "open_requests").values()) == {0})


def replica() -> subprocess.Popen[str]:
    call = [sys.executable, "-m", "kvfold", "serve", "reference:gqa", "--device", "cpu"]
    call += ["--port", "0", "--max-tokens", "256", "--kv-bytes", str(2**23)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "KVFOLD_COMPILE": "off"}
    return subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=env)


def served_at(process: subprocess.Popen[str]) -> str:
    return next(x for x in process.stderr if x.startswith("serving at ")).split()[-1]


@pytest.mark.slow
def test_kill_9_of_a_replica_loses_only_streams_in_flight() -> None:
    """Two servers, eight streams that have begun: the four of the killed one end with an error, the
    others as they would alone, and whoever asks then is answered."""
    body = {"prompt": "The old house", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    processes = [replica(), replica()]
    try:
        urls = [served_at(x) for x in processes]
        with routing(*urls, check_seconds=0.1) as client, ThreadPoolExecutor(12) as pool:
            wanted = client.post(PATH, json=body).json()["choices"][0]["text"]
            begun = threading.Barrier(9, timeout=60)

            def read(_: int) -> list[str]:
                with client.stream("POST", PATH, json=body | {"stream": True}) as answer:
                    lines = answer.iter_lines()
                    first = next(lines)
                    begun.wait()
                    return [first, *lines]

            streams = [pool.submit(read, i) for i in range(8)]
            begun.wait()
            processes[0].send_signal(signal.SIGKILL)
            after = [pool.submit(client.post, PATH, json=body) for _ in range(4)]
            texts = [x.result().json()["choices"][0]["text"] for x in after]
            assert texts == [wanted] * 4
            ends = [x.result() for x in streams]
            broken = [x for x in ends if any("replica_lost" in line for line in x)]
            whole = [x for x in ends if x not in broken]
            assert len(broken) == len(whole) == 4
            assert [text_of(x) for x in whole] == [wanted] * 4
            assert all(wanted.startswith(text_of(x)) for x in broken)
            assert client.get("/health").status_code == 200
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stderr.close()
