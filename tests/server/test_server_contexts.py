"""Packed contexts that a server has by name: answers are those of who passes one to the engine."""

import asyncio
from collections.abc import Iterator

import pytest

from kvfold import LLM, AsyncLLM, PackedContext, SamplingParams
from kvfold.server.app import create_app
from kvfold.utils.errors import SettingError
from serving import Served, serving, small_llm, text_string_to_metric_families

TEXT = "The magic number is: 48213. The ship sails at noon, and the cook stays on the island. " * 4
HOW = {"evict": "kvzip", "keep_tokens": 1.0, "page": 8, "bits": 8}
GREEDY = {"temperature": 0, "max_tokens": 8}
ASKED = " The magic number is:"


@pytest.fixture(scope="module")
def book() -> PackedContext:
    return small_llm(**HOW).pack(TEXT, factor=4, measure=False)


@pytest.fixture(scope="module")
def small(book: PackedContext) -> Iterator[Served]:
    llm = small_llm(**HOW)
    other = llm.pack("A ship went to sea. " * 12, factor=4, measure=False)
    with serving(llm, contexts={"book": book, "other": other}) as served:
        yield served


def gauge(served: Served, name: str) -> dict[str, float]:
    """Values by context."""
    text = served.client.get("/metrics").text
    samples = [x for family in text_string_to_metric_families(text) for x in family.samples]
    return {x.labels["context"]: x.value for x in samples if x.name == name}


def test_metrics_say_how_the_cache_is_kept() -> None:
    with serving(small_llm(**HOW, repair=True)) as served:
        text = served.client.get("/metrics").text
    samples = [x for family in text_string_to_metric_families(text) for x in family.samples]
    (said,) = (x.labels for x in samples if x.name == "vllm:cache_config_info")
    wanted = {"block_size": "8", "bits": "8", "evict": "kvzip", "keep_tokens": "1.0"}
    assert said | wanted | {"repair": "True"} == said


def test_a_completion_goes_on_from_a_context(small: Served, book: PackedContext) -> None:
    before = gauge(small, "kvfold:context_requests_total")
    found = small.ask(prompt=[ASKED, " The ship"], context="book", **GREEDY)
    after = gauge(small, "kvfold:context_requests_total")
    wanted = small.llm.generate(
        [ASKED, " The ship"], SamplingParams(max_new_tokens=8), context=book
    )
    assert [x["text"] for x in found["choices"]] == [x.text for x in wanted]
    plain = small.ask(prompt=ASKED, **GREEDY)
    assert plain["choices"][0]["text"] != wanted[0].text
    usage, tokens = found["usage"], len(book.token_ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * tokens
    assert usage["prompt_tokens"] > 2 * tokens
    assert {name: after[name] - before[name] for name in after} == {"book": 2, "other": 0}
    held = gauge(small, "kvfold:context_bytes")
    assert held == {"book": book.num_bytes, "other": 0}


def test_contexts_are_listed_and_others_are_not_found(small: Served) -> None:
    (card,) = small.client.get("/v1/models").json()["data"]
    assert card["contexts"].keys() == {"book", "other"} and card["contexts"]["book"] > 100
    error = small.refused(404, prompt=ASKED, context="bible")
    assert (error["param"], error["code"]) == ("context", "context_not_found")
    assert error["message"] == (
        "the context 'bible' does not exist; this server has 'book', 'other'"
    )
    assert small.refused(400, prompt=ASKED, context=3)["param"] == "context"


def test_a_chat_has_begun_already(small: Served) -> None:
    asked = [{"role": "user", "content": "Who?"}]
    error = small.refused(400, "/v1/chat/completions", messages=asked, context="book")
    assert error["param"] == "context" and "use /v1/completions" in error["message"]


def test_a_prompt_that_no_longer_fits_behind_it(small: Served, book: PackedContext) -> None:
    long = [5] * (256 - len(book.token_ids) + 1)
    error = small.refused(400, prompt=long, context="book")
    assert "the prompt has 257 tokens" in error["message"]


def test_a_server_refuses_contexts_that_it_cannot_take(book: PackedContext) -> None:
    def start(llm: LLM) -> None:
        serving_llm = AsyncLLM(llm)
        try:
            create_app(serving_llm, "small", contexts={"book": book})
        finally:
            serving_llm.close()

    with pytest.raises(
        SettingError, match=r"was packed with .*stores cache entries in another way"
    ):
        start(small_llm(**HOW | {"bits": 4}))
    tokens = len(book.token_ids)
    with pytest.raises(
        SettingError, match=rf"context has {tokens} tokens, and max_tokens is {tokens}:"
    ):
        start(small_llm(**HOW, max_tokens=tokens))


def test_async_llm_goes_on_from_a_context(book: PackedContext) -> None:
    llm = small_llm(**HOW)
    params = SamplingParams(max_new_tokens=8)
    (wanted,) = llm.generate(ASKED, params, context=book)

    async def ask() -> list[str]:
        async with AsyncLLM(llm) as found:
            whole = await found.generate(ASKED, params, context=book)
            stream = await found.stream(ASKED, params, context=book)
            return [whole.text, "".join([output.text async for output in stream])]

    assert asyncio.run(ask()) == [wanted.text] * 2
