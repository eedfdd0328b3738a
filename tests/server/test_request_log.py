"""A server's line for each request, and what it says when it is told to stop."""

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving import httpx, serving, small_llm

from kvfold.server.limits import Limits  # isort: skip
from kvfold.server.run import stopping  # isort: skip

LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (?P<id>\S+) in=(?P<tokens_in>\S+) cached=(?P<cached>\S+)"
    r" out=(?P<out>\S+) first=(?P<first>\S+) total=(?P<total>[\d.]+)s status=(?P<status>\d+)"
)
PROMPT = "The old house stood on the hill, and nobody had lived in it for many years. " * 4


@pytest.fixture(scope="module")
def served():
    lines: list[str] = []
    with serving(small_llm(), limits=Limits(max_queue=0), log=lines.append) as server:
        server.lines = lines
        yield server


def logged(served, count: int = 1) -> list[dict[str, str]]:
    """The lines since the last call, by field."""
    for _ in range(500):
        if len(served.lines) >= count:
            break
        threading.Event().wait(0.02)
    found, served.lines[:] = list(served.lines), []
    assert len(found) == count
    return [LINE.fullmatch(line).groupdict() for line in found]


def test_a_line_says_tokens_seconds_and_status(served) -> None:
    for _ in range(2):
        answer = served.ask(prompt=PROMPT, max_tokens=7, ignore_eos=True, n=2)
    first, second = logged(served, 2)
    usage = answer["usage"]
    assert second["id"] == answer["id"] and second["status"] == "200"
    assert int(second["tokens_in"]) == usage["prompt_tokens"]
    assert int(second["out"]) == usage["completion_tokens"] == 14
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert int(second["cached"]) == cached > 0 and int(first["out"]) == 14
    assert 0 < float(second["first"].removesuffix("s")) <= float(second["total"])


def test_a_stream_has_its_line_when_it_ends(served) -> None:
    ask = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True, "stream": True}
    assert served.post(**ask).status_code == 200
    (line,) = logged(served)
    assert line["out"] == "5" and line["status"] == "200" and line["first"] != "-"


def test_a_chat_and_a_refusal_have_lines_and_what_machines_ask_has_none(served) -> None:
    served.ask("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
    served.refused(400, prompt="Once", max_tokens=-1)
    served.refused(404, prompt="Once", model="other")
    for path in ("/health", "/metrics", "/v1/models"):
        assert served.client.get(path).status_code == 200
    chat, negative, other = logged(served, 3)
    assert chat["id"].startswith("chatcmpl-") and chat["out"] == "1"
    assert (negative["status"], other["status"]) == ("400", "404")
    assert negative["id"] == negative["out"] == negative["first"] == "-"


def test_a_client_that_leaves_is_told_apart(served) -> None:
    ask = {"model": "small", "prompt": "Once", "max_tokens": 200, "ignore_eos": True}
    with served.client.stream("POST", "/v1/completions", json=ask | {"stream": True}) as answer:
        next(answer.iter_lines())
    (line,) = logged(served)
    assert line["status"] == "499" and int(line["out"]) < 200


def test_what_a_server_does_not_get_to_has_a_503() -> None:
    lines: list[str] = []
    ask = {"prompt": "Once", "max_tokens": 100}
    with (
        ThreadPoolExecutor(2) as pool,
        serving(small_llm(), limits=Limits(drain_seconds=0), log=lines.append) as served,
        served.llm.engine.lock.hold(),  # nothing is answered
    ):
        calls = [pool.submit(served.post, **ask, stream=stream) for stream in (False, True)]
        while len(served.llm.engine.lock._calls) < 2:
            threading.Event().wait(0.02)
        served.server.should_exit = True
        assert {call.result(30).status_code for call in calls} == {200, 503}
    assert [LINE.fullmatch(line)["status"] for line in lines] == ["503", "503"]


def test_what_is_said_when_a_signal_comes() -> None:
    again = ", Ctrl-C again to stop now"
    assert stopping(2, signal.SIGINT) == f"stopping: waiting for 2 requests{again}"
    assert stopping(1, signal.SIGINT) == f"stopping: waiting for 1 request{again}"
    assert stopping(1, signal.SIGTERM) == "stopping: waiting for 1 request"
    assert stopping(0, signal.SIGINT) == "stopping"


def test_a_second_interrupt_stops_now_without_a_traceback() -> None:
    call = [sys.executable, "-m", "kvfold", "serve", "reference:gqa", "--device", "cpu"]
    call += ["--port", "0", "--max-tokens", "4096", "--kv-bytes", str(2**26)]
    process = subprocess.Popen(
        call,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        url = next(x for x in process.stderr if x.startswith("serving at ")).split()[-1]
        ask = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=ask, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            said = process.stderr.readline()
            assert said == "stopping: waiting for 1 request, Ctrl-C again to stop now\n"
            next(lines)  # it goes on
            process.send_signal(signal.SIGINT)
            assert "shutting_down" in "".join(lines)
        rest = process.stderr.read().splitlines()
        assert process.wait(30) == 130
        assert LINE.fullmatch(rest[0])["status"] == "503" and rest[1:] == ["stopped"]
    finally:
        process.kill()
        process.wait()
