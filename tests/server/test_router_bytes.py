"""kvfold route: what passes through it byte for byte, and what it refuses."""

import json
import re
import socket
from dataclasses import fields

import pytest
from yarl import URL

from replicas import Raw, raw, running
from router_cases import metrics, routing

from kvfold.server.limits import Balance, Limits  # isort: skip
from kvfold.server.forwarding import ForwardedRequest  # isort: skip
from kvfold.server.router import create_router  # isort: skip

WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
PATH = b"/v1/completions"


def exchange(url: str, request: bytes) -> bytes:
    """The bytes of an answer to the bytes of a request, which asks to close the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(2**16), b""))


def post(headers: bytes = b"", path: bytes = PATH, method: bytes = b"POST") -> bytes:
    return (
        method + b" " + path + b" HTTP/1.1\r\nHost: router\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: 2\r\n" + headers + b"\r\n{}"
    )


def head_of(message: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The first line and the headers."""
    first, *lines = message.partition(b"\r\n\r\n")[0].split(b"\r\n")
    pairs = [line.partition(b": ") for line in lines]
    return first, [(name.lower(), value) for name, _, value in pairs]


def through(replica: Raw, request: bytes) -> tuple[bytes, bytes]:
    """(what the replica received, what the client was answered)."""
    with running(create_router([replica.url], balance=Balance(check_seconds=60))) as url:
        answer = exchange(url, request)
    return (replica.requests or [b""])[-1], answer


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/models/org%2Fmodel",
        b"/v1/models/org%2fmodel%20x/",
        b"/v1/%C3%A9?x=%2F&x=a+b%20c&y",
        b"/v1/a/../b/./c",
        b"//v1//a;b=c|d",
        b"/%zz?%",
        b"/v1/%E9",
        b"/@127.0.0.1:1/x",
        b"/\\@127.0.0.1:1/?a=b?c@d",
        b"/%2F@127.0.0.1:1/x",
    ],
)
def test_a_target_passes_unchanged(target: bytes) -> None:
    with raw(WELL) as replica:
        received, _ = through(replica, post(path=target))
    assert received.startswith(b"POST " + target + b" HTTP/1.1\r\n")


@pytest.mark.parametrize("path", ["%2F@evil.test:1/x", "@evil.test/", ".evil.test/", "9/", "[::1"])
@pytest.mark.parametrize("replica", ["http://one.test:8000", "http://one.test", "http://[::2]:8/a"])
def test_no_path_changes_the_host(replica: str, path: str) -> None:
    passed = ForwardedRequest(method="GET", path=path, query="", headers=[], body=b"")
    assert passed.url(replica).origin() == URL(replica).origin()


def test_headers_pass_unchanged() -> None:
    """Repeated, beyond ASCII, empty; none is added, and only those of a connection are left out."""
    passed = [
        (b"x-tag", b"one"),
        (b"x-tag", b"two"),
        (b"cookie", b"a=1"),
        (b"cookie", b'b="2"; c=3'),
        (b"x-name", "Zoë, 猫".encode()),
        (b"x-empty", b""),
        (b"date", b"Tue, 15 Nov 1994 08:12:31 GMT"),
    ]
    of_connection = b"TE: trailers\r\nX-Hop: 1\r\nConnection: x-hop\r\nProxy-Connection: close\r\n"
    of_connection += b"Keep-Alive: 5\r\nUpgrade: h2c\r\nExpect: 100-continue\r\n"
    sent = b"".join(name + b": " + value + b"\r\n" for name, value in passed)
    with raw(WELL) as replica:
        received, _ = through(replica, post(sent + of_connection))
    _, headers = head_of(received)
    rewritten = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    assert sorted(x for x in headers if x[0] != b"host") == sorted(passed + rewritten)


def test_an_answers_headers_pass_unchanged() -> None:
    passed = [
        (b"set-cookie", b"a=1; Path=/"),
        (b"set-cookie", b"b=2"),
        (b"x-name", b"Zo\xeb"),
        (b"content-type", b"application/json"),
        (b"x-long", b"a" * 20_000),
    ]
    sent = b"".join(name + b": " + value + b"\r\n" for name, value in passed)
    of_connection = b"Connection: x-hop, close\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n"
    with raw(WELL.replace(b"Connection: close\r\n", sent + of_connection)) as replica:
        _, answer = through(replica, post())
    _, headers = head_of(answer)
    rewritten = (b"date", b"connection", b"content-length")
    assert [x for x in headers if x[0] not in rewritten] == passed
    assert (b"content-length", b"2") in headers and answer.endswith(b"\r\n\r\n{}")


def test_no_clients_cookie_reaches_another_client() -> None:
    answer = WELL.replace(b"\r\n\r\n", b"\r\nSet-Cookie: who=first; Path=/\r\n\r\n")
    with raw(answer) as replica:
        by_name = replica.url.replace("127.0.0.1", "localhost")  # cookies need a name
        with running(create_router([by_name])) as url:
            for _ in range(2):
                assert b"who=first" in exchange(url, post())
    assert len(replica.requests) == 2 and not any(b"cookie" in x.lower() for x in replica.requests)


@pytest.mark.parametrize(
    ("request_bytes", "said"),
    [
        (post(b"X-Name: a\x01b\r\n"), "x-name"),
        (post(b"X-Name: a\x7fb\r\n"), "x-name"),
        (post(b"X-Name: Zo\xeb\r\n"), "x-name"),
        (post(path=b"/v1/a#b"), "#"),
        (post(path=b"%2F"), "begin with /"),
        (post(path=b"%2F@127.0.0.1:1/x"), "begin with /"),
        (post(path=b"%2F9999"), "begin with /"),
        (post(path=b"%2F[::1"), "begin with /"),
        (post(path=b"%2F.127.0.0.1.nip.io/"), "begin with /"),
    ],
)
def test_what_cannot_pass_is_refused(request_bytes: bytes, said: str) -> None:
    with raw(WELL) as replica, routing(replica.url, check_seconds=60) as client:
        answer = exchange(str(client.base_url).rstrip("/"), request_bytes)
        assert answer.startswith(b"HTTP/1.1 400 ") and not replica.requests
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert said in error["message"] and error["type"] == "invalid_request_error"
        assert metrics(client, "healthy") == {replica.url: 1}
        assert metrics(client, "lost_requests") == {replica.url: 0}


@pytest.mark.parametrize("method", [b"GET", b"DELETE", b"OPTIONS"])
def test_a_request_without_a_body_stays_one(method: bytes) -> None:
    bare = method + b" /v1/models HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n"
    with raw(WELL) as replica:
        received, answer = through(replica, bare)
    assert received.startswith(method + b" ") and answer.startswith(b"HTTP/1.1 200")
    assert {name for name, _ in head_of(received)[1]} <= {b"host", b"content-length"}


def test_an_answer_to_head_keeps_its_length() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 321\r\nX-A: 1\r\nConnection: close\r\n\r\n"
    bare = b"HEAD /v1/models HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n"
    with raw(answer) as replica:
        received, told = through(replica, bare)
    assert received.startswith(b"HEAD ")
    assert (b"content-length", b"321") in head_of(told)[1] and told.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_head_is_answered_where_get_is(path: str) -> None:
    with raw(WELL) as replica, routing(replica.url) as client:
        assert client.head(path).status_code == 200
        assert not replica.requests


def test_a_method_that_no_replica_knows_is_refused_in_json() -> None:
    with raw(WELL) as replica, routing(replica.url) as client:
        answer = client.request("BREW", "/v1/models")
        assert answer.status_code == 405 and answer.json()["error"]["message"]


# Answers that end early --------------------------------------------------------------------------


def chunked(*pieces: bytes) -> bytes:
    sizes = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return EVENTS + b"Transfer-Encoding: chunked\r\n\r\n" + sizes + b"0\r\n\r\n"


def until_closed(*pieces: bytes) -> bytes:
    return EVENTS + b"Connection: close\r\n\r\n" + b"".join(pieces)


@pytest.mark.parametrize("form", [chunked, until_closed])
@pytest.mark.parametrize(
    ("pieces", "passed"),
    [
        ((TOKEN, TOKEN), TOKEN * 2),
        ((TOKEN, TOKEN[:9]), TOKEN),
        ((TOKEN[:9], TOKEN[9:-1], b"\n" + TOKEN[:-1]), TOKEN),
        ((TOKEN, b"data: [DON"), TOKEN),
        ((TOKEN, TOKEN.replace(b"a", b"data: [DONE]")), None),
        ((TOKEN.replace(b"\n", b"\r\n"), b"data: {"), TOKEN.replace(b"\n", b"\r\n")),
    ],
)
def test_a_stream_without_its_last_event_is_lost(form, pieces, passed) -> None:
    """Whole events of it are passed on, then an error; no half event."""
    passed = b"".join(pieces) if passed is None else passed
    with raw(form(*pieces)) as replica, routing(replica.url, check_seconds=60) as client:
        answer = client.post(PATH.decode(), json={}).content
        assert answer.startswith(passed)
        error, done = re.fullmatch(rb"data: (.*)\n\n(.*)\n\n", answer[len(passed) :]).groups()
        assert json.loads(error)["error"]["code"] == "replica_lost" and done == b"data: [DONE]"
        assert metrics(client, "lost_requests") == {replica.url: 1}
        assert metrics(client, "healthy") == {replica.url: 1}, "it answers, so others may ask"


@pytest.mark.parametrize("form", [chunked, until_closed])
@pytest.mark.parametrize(
    "pieces",
    [
        (TOKEN, DONE),
        (TOKEN, DONE[:-1]),
        (TOKEN, DONE.rstrip()),
        (TOKEN, b"data:[DONE]\n\n"),
        (TOKEN[:5], TOKEN[5:] + DONE[:8], DONE[8:]),
        (b": ping\n\n", TOKEN.replace(b"\n", b"\r\n"), DONE.replace(b"\n", b"\r\n")),
        (TOKEN * 5000, DONE),
        (DONE,),
    ],
)
def test_a_whole_stream_passes_unchanged(form, pieces) -> None:
    with raw(form(*pieces)) as replica, routing(replica.url) as client:
        assert client.post(PATH.decode(), json={}).content == b"".join(pieces)
        assert metrics(client, "lost_requests") == {replica.url: 0}


def test_other_streams_end_as_they_like() -> None:
    """Only OpenAI's completions are known to end with [DONE]."""
    for pieces in ((TOKEN,), (TOKEN, b"event: last"), ()):
        with raw(until_closed(*pieces)) as replica, routing(replica.url) as client:
            assert client.post("/v1/responses", json={}).content == b"".join(pieces)


@pytest.mark.parametrize(
    "broken",
    [
        chunked(),
        until_closed(),
        chunked(TOKEN[:9]),
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"choices": [',
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"choi',
        b"HTTP/1.1 200 OK\r\nX-A: a\x0bb\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX-A: a\x0cb\r\nContent-Type: text/event-stream\r\n\r\n" + DONE,
        b"HTTP/1.1 200 OK\r\nX-A: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 101 Go\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_an_answer_that_has_not_begun_is_asked_for_again(broken: bytes) -> None:
    with (
        raw(broken) as first,
        raw(chunked(TOKEN, DONE)) as second,
        routing(first.url, second.url, pick="round-robin", check_seconds=60) as client,
    ):
        answer = client.post(PATH.decode(), json={})
        assert answer.content == TOKEN + DONE
        assert metrics(client, "lost_requests")[first.url] == 1


def test_a_router_can_be_given_every_limit_that_it_keeps() -> None:
    """By default it takes what its replicas take."""
    from kvfold.cli.route import Listen

    assert Listen().limits == Limits()
    of_engine = {"max_queue", "max_choices", "max_stops", "max_logprobs"}
    limits = {x.name for x in fields(Limits)} - of_engine
    assert limits == {x.name for x in fields(Listen)} - {"host", "port"}
    doubled = {name: 2 * getattr(Limits, name) for name in limits}
    assert Listen(**doubled).limits == Limits(**doubled)


def test_large_bodies_pass_unchanged() -> None:
    large = bytes(range(256)) * 2**16  # 16 MiB
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(large) + large
    with raw(answer) as replica:
        head = b"POST /v1/files HTTP/1.1\r\nHost: router\r\nConnection: close\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(large) + large
        app = create_router([replica.url], limits=Limits(max_body=len(large)))
        with running(app) as url:
            told = exchange(url, request)
    assert told.partition(b"\r\n\r\n")[2] == large
    assert replica.requests[0].partition(b"\r\n\r\n")[2] == large
