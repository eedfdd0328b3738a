"""The live page, and what it asks for."""

import re

import pytest

from kvfold.utils.text import packaged
from serving import httpx, serving, small_llm

LONG = {"prompt": "The old house " * 30, "max_tokens": 120, "temperature": 0, "ignore_eos": True}


def test_the_page_is_one_file_that_may_ask_nobody_else() -> None:
    text = packaged("live.html")
    assert not re.findall(r"""(?:src|href)=|https?://|@import|url\(""", text)
    with serving(small_llm(shadow="100%")) as served:
        answer = served.client.get("/")
        assert answer.status_code == 200 and answer.text == text
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy
        served.ask(prompt="a", max_tokens=2)
        metrics = served.client.get("/metrics").text
        for name in re.findall(r'"((?:vllm|kvfold):[\w]+)"', text):
            assert re.search(rf"^{name}[_ {{]", metrics, re.M), name
        assert served.client.get("/requests").json() == {"requests": []}
        assert served.client.get("/requests/5").status_code == 404


@pytest.mark.parametrize("keep", [None, 0.3])
def test_what_is_kept_of_a_request(keep: float | None) -> None:
    """By layer and head, as the pool has it; never more than was computed."""
    evict = {"evict": "kv-compress", "keep_tokens": keep, "page": 4} if keep else {}
    with (
        serving(small_llm(**evict)) as served,
        served.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        with httpx.Client(base_url=served.url, timeout=60) as other:
            (listed,) = other.get("/requests").json()["requests"]
            found = other.get(f"/requests/{listed['id']}").json()
        assert found["status"] == "running" and found["prompt"] == listed["prompt"] > 60
        geometry = served.llm.runner.pool.layout.spec.geometry
        rows = found["rows"]
        assert (len(rows), len(rows[0])) == (geometry.num_layers, geometry.num_kv_heads)
        flat = [x for layer in rows for x in layer]
        if keep is None:
            assert len(set(flat)) == 1 and flat[0] - found["computed"] in (0, 1)  # mid-step
        else:
            assert max(flat) <= found["computed"] and len(set(flat)) > 1
            assert found["kept"] < 0.75 * found["computed"]
        list(lines)


def test_the_page_opens_without_a_key_and_what_it_asks_does_not() -> None:
    with serving(small_llm(), api_key="sesame") as served:
        assert served.client.get("/").status_code == 200
        for path in ("/requests", "/requests/1", "/metrics"):
            assert served.client.get(path).status_code == 401
        header = {"Authorization": "Bearer sesame"}
        assert served.client.get("/requests", headers=header).status_code == 200
