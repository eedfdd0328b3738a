"""A real server in a thread of this process, and what asks it. Skips where the extra is missing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

for package in ("fastapi", "uvicorn", "prometheus_client", "msgspec", "httpx"):
    pytest.importorskip(package, reason='needs pip install "kvfold[server]" and httpx')

import httpx
import uvicorn
from prometheus_client.parser import (
    text_string_to_metric_families as text_string_to_metric_families,
)

from kvfold import LLM, AsyncLLM
from kvfold.server.app import create_app
from kvfold.server.limits import Limits
from kvfold.server.metrics import HISTOGRAMS as HISTOGRAMS
from kvfold.server.run import bind, server_of

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SMALL = {"device": "cpu", "max_sequences": 4, "max_tokens": 256, "kv_bytes": 2**22}


def small_llm(**settings: Any) -> LLM:
    found = LLM("reference:gqa", **{**SMALL, **settings})
    found.tokenizer.chat_template = TEMPLATE
    return found


@dataclass
class Served:
    """Where a server is, and what it serves as `small`."""

    llm: LLM
    url: str
    client: httpx.Client
    server: uvicorn.Server

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": "small"} | body)

    def ask(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, status: int, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


@contextmanager
def serving(llm: LLM, *, clean: bool = True, **settings: Any) -> Iterator[Served]:
    """clean: nothing may be left when it has ended. log: is told a line for each request."""
    limits, log = settings.pop("limits", Limits()), settings.pop("log", None)
    app = create_app(AsyncLLM(llm), "small", limits=limits, **settings)
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    server = server_of(app, limits, ready.set, log)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        assert ready.wait(120)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Served(llm, url, client, server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
    if clean:
        llm.runner.pool.check_integrity()
        assert llm.runner.pool.used_bytes == 0 and not llm.engine.has_work
