"""No request holds the others: each known bad one is sent beside a stream, whose worst gap is
bounded; so are memory, connections and log lines."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvfold.engine.api import grammar
from kvfold.server.limits import Limits
from memory import resident
from serving import Served, httpx, serving, small_llm

from kvfold.server.connections import LINES, RateLimit  # isort: skip

WORST = 1.0  # seconds between two chunks of a stream
SIZE = 8 * 2**20  # bytes of a body, as many as a server takes by default
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SLOW_REGEX = "((.{0,50}){0,50}){0,50}"
SLOW_SCHEMA = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer"} for i in range(300)},
    "minProperties": 100,
}
TEXT = "The old house stood by the sea and nobody went there any more. "


def filled(begin: str, item: str, end: str) -> bytes:
    """As many items as a body may hold."""
    count = (SIZE - len(begin) - len(end)) // (len(item) + 1)
    return (begin + ",".join([item] * count) + end).encode()


PROMPT, USER = '{"prompt":[', '{"messages":[{"role":"user","content":'
BODIES = {
    "dicts": (COMPLETIONS, filled(PROMPT, "{}", "]}")),
    "empty lists": (COMPLETIONS, filled(PROMPT, "[]", "]}")),
    "lists": (COMPLETIONS, filled(PROMPT, "[1]", "]}")),
    "strings": (COMPLETIONS, filled(PROMPT, '""', "]}")),
    "ids": (COMPLETIONS, filled(PROMPT, "1", "]}")),
    "wrong ids": (COMPLETIONS, filled('{"prompt":"a","stop_token_ids":[', '"a"', "]}")),
    "stops": (COMPLETIONS, filled('{"prompt":"a","stop":[', "{}", "]}")),
    "biases": (COMPLETIONS, filled('{"prompt":"a","logit_bias":{', '"1":{}', "}}")),
    "allowed ids": (COMPLETIONS, filled('{"prompt":"a","allowed_token_ids":[', "1", "]}")),
    "bad words": (COMPLETIONS, filled('{"prompt":"a","bad_words":[', '"aa"', "]}")),
    "tools": (CHAT, filled(USER + '"a"}],"tools":[', "{}", "]}")),
    "calls": (
        CHAT,
        filled(
            USER + '"a"},{"role":"assistant","tool_calls":[', '{"function":{"name":"f"}}', "]}]}"
        ),
    ),
    "refused field": (COMPLETIONS, filled('{"prompt":"a","tools":[', "{}", "]}")),
    "schema": (
        COMPLETIONS,
        filled(
            '{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":{"x":[',
            "{}",
            "]}}}}",
        ),
    ),
    "wrong messages": (CHAT, filled('{"messages":[', '{"role":5}', "]}")),
    "messages": (CHAT, filled('{"messages":[', '{"role":"user","content":"a"}', "]}")),
    "parts": (CHAT, filled(USER + "[", '{"type":"text","text":"a"}', "]}]}")),
    "variables": (CHAT, filled(USER + '"a"}],"chat_template_kwargs":{"x":[', "{}", "]}}")),
    "text": (COMPLETIONS, json.dumps({"prompt": TEXT * (SIZE // len(TEXT) - 1)}).encode()),
    "text of a chat": (CHAT, (USER + f'"{TEXT * (SIZE // len(TEXT) - 2)}"' + "}]}").encode()),
    "detokenize": ("/detokenize", filled('{"tokens":[', "1", "]}")),
    "nested": (COMPLETIONS, b'{"prompt":' + b"[" * (SIZE - 20)),
    "nested elsewhere": (COMPLETIONS, b'{"prompt":"a","x":' + b"[" * (SIZE - 20)),
}
LARGE = ("lists", "text")  # the heaviest of their kinds, which `make test` sends


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(small_llm(max_tokens=1024, kv_bytes=2**24)) as served:
        yield served


class Beside:
    """A stream that goes on, and the longest that it stood still."""

    def __init__(self, served: Served) -> None:
        self.gap, self.chunks, self._ended = 0.0, 0, False
        self._served, self._thread = served, threading.Thread(target=self._read)

    def _read(self) -> None:
        body = {"prompt": "The old", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._served.url, timeout=60) as client:
            while not self._ended:
                last = time.monotonic()
                with client.stream("POST", COMPLETIONS, json=body) as answer:
                    for line in answer.iter_lines():
                        now = time.monotonic()
                        self.gap = max(self.gap, now - last)
                        self.chunks, last = self.chunks + bool(line), now
                        if self._ended:
                            return

    def wait(self, chunks: int) -> None:
        wanted = self.chunks + chunks
        while self.chunks < wanted and self._thread.is_alive():
            time.sleep(0.01)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is inside keeps nobody waiting: where this machine is busy, as long as alone."""
        self._thread.start()
        try:
            self.wait(30)
            quiet, self.gap = self.gap, 0.0
            yield
            self.wait(5)
        finally:
            self._ended = True
            self._thread.join()
        assert self.gap < max(WORST, 5 * quiet), f"{self.gap:.2f} s; alone {quiet:.2f} s"


def posted(served: Served, path: str, body: bytes) -> httpx.Response:
    header = {"content-type": "application/json"}
    return served.client.post(path, content=body, headers=header)


@pytest.mark.parametrize(
    "name", [x if x in LARGE else pytest.param(x, marks=pytest.mark.slow) for x in BODIES]
)
def test_a_large_wrong_body_keeps_nobody_waiting(small: Served, name: str) -> None:
    before = resident()
    with Beside(small).measured():
        answer = posted(small, *BODIES[name])
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 1000 and answer.json()["error"]["message"]
    grown = resident() - before
    assert grown < 2**27, f"{grown / 2**20:.0f} MiB more"


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"regex": SLOW_REGEX}},
        {"structured_outputs": {"regex": f"z{SLOW_REGEX}"}, "logit_bias": {"90": 100}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SLOW_SCHEMA}}},
    ],
)
def test_a_slow_grammar_ends_its_request_alone(small: Served, monkeypatch, asked) -> None:
    pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 2.0)
    assert small.ask(prompt="a", structured_outputs={"regex": "[0-9]{3}"})  # loads xgrammar
    with Beside(small).measured():
        error = small.refused(400, prompt="a", max_tokens=60, **asked)
        assert "too much memory" in error["message"] and error["param"] in asked
        beside = small.ask(prompt="a", structured_outputs={"regex": "[0-9]{4}"})
    assert beside["choices"][0]["text"].isdigit()
    monkeypatch.setattr(grammar, "GrammarProcess", None)  # it is known, and not compiled again
    assert small.refused(400, prompt="a", **asked)["message"] == error["message"]


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", SLOW_REGEX), ("json_schema", json.dumps(SLOW_SCHEMA))]
)
def test_a_slow_grammars_process_ends_by_itself(small: Served, kind: str, text: str) -> None:
    """Also where nobody waits for it any more, nor closes it."""
    pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    (token,) = small.llm.tokenizer.convert_tokens_to_ids(["a"])
    with small.llm.grammars._fork() as talk:
        talk.send((kind, text, 2.0, 0.2))
        with pytest.raises((EOFError, ConnectionError)):
            for _ in range(60):
                assert talk.poll(10)
                talk.recv()
                talk.send(([(0, (token,))], ()))


def test_a_mask_that_comes_too_late_ends_a_stream_with_the_clients_error(
    small: Served, monkeypatch
) -> None:
    pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    asked = {"prompt": "a", "max_tokens": 200, "structured_outputs": {"regex": "[0-9]{150}"}}
    with small.client.stream("POST", COMPLETIONS, json=asked | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        (process,) = (x for key, x in small.llm.grammars._in_use.items() if "150" in key[1])
        with process._lock:
            process._end("takes too long")  # as its deadline does
        *_, error, done = [line for line in lines if line]
    assert "takes too long" in error and "invalid_request_error" in error
    assert done == "data: [DONE]"
    assert small.ask(prompt="a", max_tokens=2)["choices"]


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def connected(served: Served) -> socket.socket:
    client = socket.create_connection(
        (served.client.base_url.host, served.client.base_url.port), timeout=60
    )
    client.sendall(HEAD)
    return client


def test_heads_that_do_not_end_give_way_and_are_closed() -> None:
    with serving(small_llm(), limits=Limits(max_connections=8, head_seconds=2.0)) as served:
        clients = [connected(served) for _ in range(40)]
        assert served.ask(prompt="a", max_tokens=2)["choices"]  # the oldest one gave way
        last = clients[-1]
        last.sendall(b"\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):  # head and body may come apart
            part = last.recv(2**16)
            assert part, answer
            answer += part
        assert answer.startswith(b"HTTP/1.1 200 ")
        last.sendall(HEAD)
        for client in clients:  # after head_seconds, behind an answer too
            with suppress(ConnectionError):
                assert client.recv(2**16) == b""
            client.close()
        assert len(served.server.server_state.connections) <= 1


def test_bodies_that_are_being_sent_have_a_bound() -> None:
    limits = Limits(max_body=20_000, max_bodies=30_000)
    with serving(small_llm(), limits=limits) as served:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n"
        place = (served.client.base_url.host, served.client.base_url.port)
        clients = [socket.create_connection(place, timeout=60) for _ in range(2)]
        for client in clients:
            client.sendall(head + b"x" * 19_000)
        answers = []
        for client in clients:
            client.settimeout(2)
            try:
                answers.append(client.recv(2**16)[:12])
            except TimeoutError:
                answers.append(b"")
            client.close()
        assert sorted(answers) == [b"", b"HTTP/1.1 503"]
        body = json.dumps({"prompt": "a" * 50, "max_tokens": 2, "user": "y" * 18_000}).encode()
        for _ in range(5):  # nothing is counted that has gone
            assert posted(served, COMPLETIONS, body).status_code == 200
            assert posted(served, "/nowhere", body).status_code == 404


def test_prompts_that_are_read_leave_a_stream_its_steps(small: Served) -> None:
    """Good ones of 1,000 tokens: a step reads as many of their tokens as it has time for."""
    prompts = [[3 + (7 * i + j) % 3000 for j in range(1000)] for i in range(6)]
    body = {"prompt": prompts, "max_tokens": 1}
    with Beside(small).measured():
        answer = small.client.post(COMPLETIONS, json=body, timeout=600)
    assert len(answer.json()["choices"]) == 6


def test_a_grammar_is_compiled_no_longer_than_its_client_waits(small: Served, monkeypatch) -> None:
    pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 300.0)
    assert small.ask(prompt="a", structured_outputs={"regex": "[0-9]{3}"})  # loads xgrammar
    sockets = []

    def fork(grammars: grammar.Grammars) -> grammar.Connection:
        talk = forked(grammars)
        sockets.append(talk)
        return talk

    forked = grammar.Grammars._fork
    monkeypatch.setattr(grammar.Grammars, "_fork", fork)
    before = grammar_processes()
    assert before, "the process that forks others is not counted"
    schema = {"type": "json_schema", "json_schema": {"schema": SLOW_SCHEMA | {"title": "left"}}}
    for stream in (False, True):
        with pytest.raises(httpx.TimeoutException):
            body = {"prompt": "a", "response_format": schema, "stream": stream}
            small.client.post(COMPLETIONS, json=body, timeout=2)
    assert sockets
    end = time.monotonic() + 60
    while not all(x.closed for x in sockets) or grammar_processes() - before:
        assert time.monotonic() < end, "a grammar is compiled for nobody"
        time.sleep(0.05)


def grammar_processes() -> set[int]:
    """Of grammars, started by this worker of pytest-xdist, that are no zombies."""
    found, names = set(), ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID")
    started_here = {f"{x}={os.environ[x]}".encode() for x in names if x in os.environ}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            is_grammar = b"kvfold.engine.api.grammar_process" in (folder / "cmdline").read_bytes()
            if is_grammar and started_here <= {*(folder / "environ").read_bytes().split(b"\0")}:
                found |= {int(folder.name)} - ({int(folder.name)} if state == "Z" else set())
    return found


def test_log_lines_of_a_kind_are_few(monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = RateLimit()

    def line(message: str) -> logging.LogRecord:
        return logging.LogRecord("asyncio", logging.ERROR, "", 1, message, None, None)

    assert sum(limit.filter(line("no descriptor")) for _ in range(500)) == LINES
    assert limit.filter(line("another one"))
    now[0] += 61
    record = line("no descriptor")
    assert limit.filter(record) and record.getMessage().endswith(
        "(490 earlier lines were left out)"
    )


def test_prompt_logprobs_of_an_answer_have_a_bound(small: Served, monkeypatch) -> None:
    monkeypatch.setattr("kvfold.server.service.MAX_PROMPT_LOGPROBS", 20)
    error = small.refused(400, prompt=["a b c"] * 3, prompt_logprobs=5)
    assert error["param"] == "prompt_logprobs" and "at most 20" in error["message"]
    assert not small.llm.engine.has_work


def test_a_server_ends_while_a_grammar_is_compiled(monkeypatch) -> None:
    pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    schema = {"response_format": {"type": "json_schema", "json_schema": {"schema": SLOW_SCHEMA}}}
    with serving(small_llm(), limits=Limits(drain_seconds=1)) as served:
        assert served.ask(prompt="a", structured_outputs={"regex": "[0-9]"})  # loads xgrammar
        monkeypatch.setattr(grammar, "COMPILE_SECONDS", 60.0)
        with pytest.raises(httpx.TimeoutException):
            served.client.post(COMPLETIONS, json={"prompt": "a", **schema}, timeout=1)
    # `serving` waits 30 s for its end
