"""What tests of router share with others."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvfold.server.limits import Balance, Limits
from kvfold.server.router import create_router
from replicas import Stub, running

WHOLE = {"prompt": "a", "max_tokens": 4}


STREAM = WHOLE | {"stream": True}


@contextmanager
def routing(*stubs: Stub | str, **balance: Any) -> Iterator[httpx.Client]:
    urls = [x if isinstance(x, str) else x.url for x in stubs]
    app = create_router(urls, balance=Balance(**balance), limits=Limits(max_body=20_000))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def until(true: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def metrics(client: httpx.Client, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = next(x for x in families if x.name == f"kvfold_router:{name}").samples
    return {x.labels.get("replica", ""): x.value for x in samples}


def text_of(lines: list[str]) -> str:
    chunks = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    return "".join(x["choices"][0]["text"] for x in chunks if x.get("choices"))
