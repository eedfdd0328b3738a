"""What a server refuses, and how it ends: keys, limits, faults, disconnects, signals."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from kvfold import AsyncLLM, SamplingParams
from kvfold.engine.api import grammar
from kvfold.engine.api.async_llm import EngineFault
from kvfold.server.limits import Limits
from memory import resident
from serving import Served, httpx, serving, small_llm

from fastapi import FastAPI  # isort: skip
from kvfold.server.run import bind, run  # isort: skip

CHAT = "/v1/chat/completions"
JSON = {"response_format": {"type": "json_object"}}
ASKED = [{"role": "user", "content": "Hello"}]
LIMITS = Limits(max_queue=2, max_choices=6, max_body=20_000, max_stops=2, max_logprobs=3)
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
LONG = {"prompt": "The old house", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(small_llm(), limits=LIMITS) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {}, "prompt", "required"),
        ("/v1/completions", {"prompt": []}, "prompt", "at least 1 prompt"),
        ("/v1/completions", {"prompt": [9999]}, None, "token ids must be in"),
        ("/v1/completions", {"prompt": "a " * 3000}, "max_tokens", "the prompt has"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens", ">= 1"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "9"}, "max_tokens", "`int |"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature", "at least 0"),
        ("/v1/completions", {"prompt": "a", "top_p": 2}, "top_p", "in (0"),
        ("/v1/completions", {"prompt": "a", "n": 7}, "n", "at most 6"),
        ("/v1/completions", {"prompt": ["a"] * 4, "n": 2}, "prompt", "at most 6 choices"),
        ("/v1/completions", {"prompt": "a", "stop": ["a", "b", "c"]}, "stop", "at most 2"),
        ("/v1/completions", {"prompt": "a", "stop": "a" * 2000}, "stop", "1024 characters"),
        ("/v1/completions", {"prompt": "a", "logprobs": 4}, "logprobs", "at most 3"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 200}}, "logit_bias", "-100..100"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, None, "token ids must"),
        ("/v1/completions", {"prompt": "a", "keep_tokens": 0.5}, None, "evicts nothing"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ("/v1/completions", {"prompt": "a", "temperature": 2.5}, "temperature", "at most 2"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["a" * 999] * 17}, "bad_words", "16384"),
        ("/v1/completions", {"prompt": [[5]] * 7}, "prompt", "at most 6 prompts"),
        ("/v1/completions", {"prompt": [["a"]]}, "prompt", "`int`"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 2, "allowed_token_ids": [0]},
         "allowed_token_ids", "leave no token"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [5], "bad_words": ["%"]},
         "allowed_token_ids", "bad_words"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "'image_url'"),
        (CHAT, {"messages": ASKED, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "send one of them"),
        (CHAT, {"messages": ASKED, "chat_template_kwargs": {"messages": []}}, None, "no variable"),
        (CHAT, {"messages": ASKED, "chat_template_kwargs": {"self": 1}}, None, "no variable"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "narrator", "content": "a"}]}, None, "must be"),
        (CHAT, {"messages": ASKED, "tools": [{}]}, "tools", "missing required field"),
        (CHAT, {"messages": ASKED, "top_logprobs": 1}, "top_logprobs", "logprobs=true"),
        (CHAT, {"messages": ASKED, "chat_template_kwargs": {"chat_template": "x"}}, None, "no var"),
        (CHAT, {"messages": ASKED, "response_format": {"type": 5}}, "response_format", "json"),
        (CHAT, {"messages": ASKED, "allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        (CHAT, {"messages": ASKED, "bad_words": [""]}, "bad_words", "not empty"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served(small: Served, path, body, param, words) -> None:
    error = small.refused(400, path, **body)
    assert words in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_more_tokens_than_a_sequence_has_room_for_are_refused(
    small: Served, path: str, name: str, stream: bool
) -> None:
    """As vLLM does; what fits is served to the last token, and without a number there is no
    error."""
    long = [{"role": "user", "content": "Hello" + " a" * 225}]  # little is left to generate
    asked = {"prompt": [5] * 240} if path != CHAT else {"messages": long}
    asked |= {"ignore_eos": True, "temperature": 0}
    most = 17 if path != CHAT else small.ask(path, **asked)["usage"]["completion_tokens"]
    prompt = 257 - most
    error = small.refused(400, path, **asked, **{name: most + 1}, stream=stream)
    assert error["param"] == "max_tokens" and error["message"] == (
        f"max_tokens: {most + 1} tokens do not fit: this server's maximum context length is 256"
        f" tokens, and the prompt has {prompt}: ask for at most {most}, shorten the prompt, or"
        " leave max_tokens out"
    )
    found = small.ask(path, **asked, **{name: most})
    assert found["usage"]["completion_tokens"] == most
    assert found["usage"]["prompt_tokens"] == prompt


def test_a_prompt_that_fills_the_context_needs_no_number(small: Served) -> None:
    found = small.ask(prompt=[5] * 250, ignore_eos=True, temperature=0)
    assert found["usage"]["completion_tokens"] == 7  # of the 16 that completions have by default


HALF = "a\ud800"  # JSON can hold half a character, which no tokenizer reads


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": HALF}),
        ("/v1/completions", {"prompt": ["a", HALF], "stream": True}),
        ("/v1/completions", {"prompt": HALF, "echo": True}),
        ("/v1/completions", {"prompt": "a", "bad_words": [HALF]}),
        ("/v1/completions", {"prompt": "a", "cache_salt": HALF}),
        ("/tokenize", {"prompt": HALF}),
        (CHAT, {"messages": [{"role": "user", "content": HALF}]}),
        (CHAT, {"messages": [{"role": HALF, "content": "a"}]}),
        (CHAT, {"messages": ASKED, "chat_template_kwargs": {"x": HALF}}),
        (CHAT, {"messages": ASKED, "chat_template_kwargs": {HALF: 1}}),
        (CHAT, {"messages": ASKED, "chat_template_kwargs": {"x": [{"y": HALF}]}}),
        (CHAT, {"messages": ASKED, "user": HALF}),
    ],
)
def test_half_a_character_is_refused(small: Served, path, body) -> None:
    header = {"content-type": "application/json"}
    answer = small.client.post(path, content=json.dumps(body), headers=header)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "invalid_json" and "not JSON" in error["message"]
    assert not small.llm.engine.has_work


def test_without_the_extra_no_text_keeps_to_a_schema(small: Served, monkeypatch) -> None:
    monkeypatch.setattr(grammar, "find_spec", lambda _: None)
    error = small.refused(400, CHAT, messages=ASKED, **JSON)
    assert 'pip install "kvfold[structured]"' in error["message"]
    assert error["param"] == "response_format"


@pytest.mark.parametrize(
    ("content", "status"),
    [(x, 400) for x in (b"{", b"\xff\xfe", b"[" * 9000, b"[]", b"")] + [(b"a" * 20_001, 413)],
)
def test_a_body_that_is_none(small: Served, content: bytes, status: int) -> None:
    header = {"content-type": "application/json"}
    answer = small.client.post("/v1/completions", content=content, headers=header)
    assert answer.status_code == status and answer.json()["error"]["message"]
    parts = (content[i : i + 5000] for i in range(0, len(content), 5000))  # of no known length
    again = small.client.post("/v1/completions", content=parts, headers=header)
    assert again.status_code == status
    assert small.client.get("/health").status_code == 200


TOO_LONG = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30000\r\n"


def test_who_still_sends_too_much_reads_that_it_is(small: Served) -> None:
    """Nothing is read before all is sent, which takes longer than an answer."""
    place = (small.client.base_url.host, small.client.base_url.port)
    with socket.create_connection(place, timeout=60) as client:
        client.sendall(TOO_LONG + b"\r\n")
        for _ in range(3):
            time.sleep(0.1)
            client.sendall(b"x" * 10_000)
        assert client.recv(2**16).startswith(b"HTTP/1.1 413 ")


def test_who_asks_before_it_sends_is_told_at_once(small: Served) -> None:
    place = (small.client.base_url.host, small.client.base_url.port)
    with socket.create_connection(place, timeout=60) as client:
        client.sendall(TOO_LONG + b"Expect: 100-continue\r\n\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 413 ")


def test_another_model_or_path_is_not_found(small: Served) -> None:
    assert small.refused(404, model="large", prompt="a")["code"] == "model_not_found"
    small.refused(404, "/v1/nothing")
    assert small.client.get("/v1/completions").json()["error"]["message"] == "Method Not Allowed"


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def idle(served: Served) -> None:
    """Until nothing is open; a step at a time."""
    until(lambda: not served.llm.engine.has_work)


@pytest.fixture
def ends(small: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why requests ended, as the engine sees it."""
    found: list[str] = []
    scheduler = small.llm.engine.scheduler
    finish = scheduler.finish

    def record(request, reason, error=None) -> None:
        if request.finish_reason is None:
            found.append(reason)
        finish(request, reason, error)

    monkeypatch.setattr(scheduler, "finish", record)
    return found


def test_a_full_queue_says_when_to_come_again(small: Served, ends: list[str]) -> None:
    body = LONG | {"n": 6, "stream": True}
    with (
        small.llm.engine.lock.hold(),  # so that none of them ends meanwhile
        small.client.stream("POST", "/v1/completions", json=body),
    ):
        answer = small.post(prompt="a")
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
    idle(small)
    assert ends == ["cancelled"] * 6
    assert small.ask(prompt="a", max_tokens=1)


def test_who_leaves_is_cancelled(small: Served, ends: list[str]) -> None:
    body = json.dumps(LONG | {"n": 6}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    place = (small.client.base_url.host, small.client.base_url.port)
    turn = small.llm.engine.lock
    with turn.hold():  # so that none of them ends meanwhile
        with socket.create_connection(place) as client:
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: len(turn._calls) == 6)
        until(lambda: len(turn._calls) == 12)  # each is to be added, and to be cancelled
    idle(small)
    assert ends == ["cancelled"] * 6


def test_a_key_is_asked_for() -> None:
    with serving(small_llm(), api_key="sésame") as served:
        for header in ({}, {"Authorization": "Bearer sesame"}, {"Authorization": "Basic sésame"}):
            given = {name: value.encode() for name, value in header.items()}
            answer = served.client.get("/v1/models", headers=given)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer sésame".encode()}
        assert served.client.get("/v1/models", headers=right).status_code == 200
        assert served.client.get("/health").status_code == 200


def test_a_late_answer_is_an_error() -> None:
    with serving(small_llm(), limits=Limits(request_seconds=0.02)) as served:
        assert served.refused(504, **LONG)["code"] == "timeout"
        with served.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as a:
            *_, error, done = [line for line in a.iter_lines() if line]
        assert '"code":"timeout"' in error and done == "data: [DONE]"
        idle(served)


def test_an_engine_fault_turns_health_red_and_ends_streams() -> None:
    with serving(small_llm(), clean=False) as served:
        with served.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as a:
            lines = a.iter_lines()
            next(lines)

            def fail() -> None:
                raise AssertionError("pages do not add up")

            served.llm.engine.scheduler.schedule = fail
            *_, error, done = [line for line in lines if line]
        assert "pages do not add up" in error and done == "data: [DONE]"
        answer = served.client.get("/health")
        assert answer.status_code == 503 and "pages do not add up" in answer.text
        assert served.refused(503, prompt="a")["code"] == "engine_fault"


def test_async_llm_serves_an_event_loop() -> None:
    llm = small_llm()
    wanted = SamplingParams(max_new_tokens=8)
    prompts = ["The old house", "A ship", "In the middle of the sea"]

    async def main() -> None:
        async with AsyncLLM(llm) as served:
            together = await asyncio.gather(*(served.generate(x, wanted) for x in prompts))
            assert together == llm.generate(prompts, wanted)
            text = ""
            async with await served.stream(prompts[0], wanted) as outputs:
                async for output in outputs:
                    text += output.text
            assert text == together[0].text
            task = asyncio.ensure_future(
                served.generate("a", SamplingParams(max_new_tokens=200, ignore_eos=True))
            )
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(ValueError, match="token ids must be in"):
                await served.generate([99999])
        request, _ = llm.request("a", None, None)
        with pytest.raises(EngineFault, match="closed"):
            served.driver.submit(request, None)
        for params in (wanted, SamplingParams(regex="a+")):
            with pytest.raises(EngineFault, match="closed"):
                await served.generate("a", params)

    asyncio.run(main())
    assert llm.runner.pool.used_bytes == 0


class Crowd:
    """Clients that ask, leave and err, each on its own; greedy answers are compared."""

    def __init__(self, served: Served, seconds: float, before: "Crowd | None" = None) -> None:
        self.served, self.until = served, time.monotonic() + seconds
        texts = ("The old house", "A ship", "In the middle of the sea", "Once, when the wind")
        # Beginnings of two pages and more, asked for by Zipf's law.
        begin = [
            f"{text} {i} " + "stood by the sea and waited. " * 9 for text in texts for i in "ab"
        ]
        self.prompts = [f"{text}{end}" for text in begin for end in ("Then", "But no one")]
        self.weights = [1 / (1 + number // 2) for number in range(len(self.prompts))]
        params = SamplingParams(max_new_tokens=24)
        self.wanted = before.wanted if before else {}
        for alone in self.prompts if not before else ():
            self.wanted[alone] = served.llm.generate(alone, params)[0].text
        self.counts = dict.fromkeys(("whole", "stream", "leave", "bad", "full"), 0)

    async def run(self, clients: int) -> None:
        async with httpx.AsyncClient(
            base_url=self.served.url, timeout=60, limits=httpx.Limits(max_connections=None)
        ) as client:
            await asyncio.gather(*(self.client(client, random.Random(i)) for i in range(clients)))

    async def client(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while time.monotonic() < self.until or not self.counts["whole"]:
            kind = rng.choices(("whole", "stream", "leave", "bad"), (5, 5, 3, 2))[0]
            (prompt,) = rng.choices(self.prompts, self.weights)
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
            kind = await getattr(self, kind)(client, body, self.wanted[prompt], rng) or kind
            self.counts[kind] += 1

    async def whole(self, client, body, wanted, rng) -> str | None:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 429:
            return "full"
        assert answer.json()["choices"][0]["text"] == wanted
        return None

    async def stream(self, client, body, wanted, rng, leave: float = 0) -> str | None:
        call = client.stream("POST", "/v1/completions", json=body | {"stream": True})
        text = ""
        async with call as answer:
            if answer.status_code == 429:
                return "full"
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                if rng.random() < leave:
                    assert wanted.startswith(text)
                    return None
        assert text == wanted
        return None

    async def leave(self, client, body, wanted, rng) -> str | None:
        return await self.stream(client, body, wanted, rng, leave=0.2)

    async def bad(self, client, body, wanted, rng) -> None:
        wrong = rng.choice([{"prompt": 5}, {"n": -1}, {"stop": [""]}, {"temperature": -1}])
        assert (await client.post("/v1/completions", json=body | wrong)).status_code == 400


@pytest.mark.parametrize(
    ("seconds", "clients", "caching"),
    [
        (2, 24, True),
        pytest.param(900, 64, True, marks=[pytest.mark.soak, pytest.mark.slow]),
        pytest.param(900, 64, False, marks=[pytest.mark.soak, pytest.mark.slow]),
    ],
)
def test_nothing_is_lost_in_a_crowd_of_clients(seconds: int, clients: int, caching: bool) -> None:
    """Pages, answers, health and memory: `serving` checks that no page is left. Prefixes of all
    prompts together do not fit the pool, and all clients not the queue."""
    llm = small_llm(max_sequences=clients // 4, prefix_caching=caching, kv_bytes=2**17 * clients)
    with serving(llm, limits=Limits(max_queue=clients * 5 // 8)) as served:
        first = Crowd(served, seconds / 2)  # of what is kept for good, all is there after it
        asyncio.run(first.run(clients))
        idle(served)
        before = resident()
        crowd = Crowd(served, seconds / 2, first)
        asyncio.run(crowd.run(clients))
        idle(served)
        grown = resident() - before
        assert grown < 2**25, f"{grown / 2**20:.1f} MiB more than before {crowd.counts}"
        assert served.client.get("/health").status_code == 200
    scheduler = llm.engine.scheduler
    prefixes = scheduler.prefix_cache
    hits = prefixes.num_hits / max(1, prefixes.num_queries)
    print(f"{crowd.counts}, {hits:.0%} of prompts cached, {scheduler.num_preemptions} pre-empted, ")
    print(f"{grown / 2**20:.1f} MiB more")
    assert all(crowd.counts[kind] for kind in ("whole", "stream", "leave", "bad")), crowd.counts
    assert (hits > 0.1) == caching


def test_the_address_is_told_once_clients_can_connect(capsys, monkeypatch) -> None:
    # Limits would stay on pytest's handlers, which later tests read.
    monkeypatch.setattr("kvfold.server.run.limit_logs", lambda: None)
    said = []

    async def end() -> None:
        while not (line := capsys.readouterr().err):
            await asyncio.sleep(0.01)
        said.append(line)
        signal.raise_signal(signal.SIGINT)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        said.append(capsys.readouterr().err)
        ending = asyncio.create_task(end())
        yield
        await ending

    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # unlike in the background
    try:
        run(FastAPI(lifespan=lifespan), listener, LIMITS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == ["", f"serving at {url}\n"]
    assert capsys.readouterr().err == "stopping\nstopped\n"


def test_sigterm_answers_what_is_open() -> None:
    """A stream that was begun goes on to its end, and the process ends with 0."""
    call = [sys.executable, "-m", "kvfold", "serve", "reference:gqa", "--device", "cpu"]
    call += ["--port", "0", "--max-tokens", "256", "--kv-bytes", str(2**22)]
    process = subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        line = next(x for x in process.stderr if x.startswith("serving at "))
        url = line.split()[-1]
        with httpx.Client(timeout=60) as client:
            body = LONG | {"stream": True}
            with client.stream("POST", f"{url}/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                *_, last, done = [line for line in lines if line]
        assert '"finish_reason":"length"' in last and done == "data: [DONE]"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
