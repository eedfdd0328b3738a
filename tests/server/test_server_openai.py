"""OpenAI's own client against the server."""

from collections.abc import Iterator

import pytest

openai = pytest.importorskip("openai", reason="the openai package is not installed")
from serving import Served, serving, small_llm  # noqa: E402

ASKED = [{"role": "user", "content": "Who went to sea?"}]


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    llm = small_llm(evict="kv-compress", keep_tokens=1.0, page=8, max_tokens=512, kv_bytes=2**23)
    with serving(llm, api_key="secret") as served:
        yield served


@pytest.fixture(scope="module")
def client(small: Served) -> Iterator["openai.OpenAI"]:
    url = f"{small.url}/v1"
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as found:
        yield found


def test_chats_whole_and_streamed(client) -> None:
    asked = {"model": "small", "messages": ASKED, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert text and whole.choices[0].finish_reason == "length"
    assert "".join(x.token for x in whole.choices[0].logprobs.content) == text
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(x.choices[0].delta.content or "" for x in chunks if x.choices) == text
    assert chunks[-1].usage == whole.usage


def test_completions_with_stop_and_n(client) -> None:
    asked = {"model": "small", "prompt": "The old house", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked, n=2, logprobs=1)
    text = whole.choices[0].text
    assert [x.text for x in whole.choices] == [text] * 2
    cut = client.completions.create(**asked, stop=text[6:9]).choices[0]
    assert cut.text == text[: text.index(text[6:9])] and cut.finish_reason == "stop"


def test_errors_are_the_clients_own(client, small) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="no", max_retries=0).models.list()
    assert [x.id for x in client.models.list()] == ["small"]


PROMPT = "The old house by the sea. " * 30


def test_a_requests_own_cache_and_what_it_evicted(client) -> None:
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    kept = client.completions.create(**asked)
    less = client.completions.create(**asked, extra_body={"keep_tokens": 0.5})
    assert kept.usage.evicted_tokens == 0
    assert 0.3 < less.usage.evicted_tokens / less.usage.prompt_tokens < 0.6
    assert kept.usage.prompt_tokens_details.cached_tokens == 0
    assert less.usage.prompt_tokens_details.cached_tokens > 0.7 * less.usage.prompt_tokens
    longer = asked | {"max_tokens": 60, "extra_body": {"max_cache_tokens": 64, "every": 16}}
    once = longer | {"extra_body": {"max_cache_tokens": 64}}
    lost = [client.completions.create(**x).usage.evicted_tokens for x in (longer, once)]
    assert lost[0] > lost[1] + 30
    for own in ({"prefix_caching": False}, {"cache_salt": "mine"}):
        anew = client.completions.create(**asked, extra_body=own)
        assert anew.usage.prompt_tokens_details.cached_tokens == 0
        assert anew.choices[0].text == kept.choices[0].text
