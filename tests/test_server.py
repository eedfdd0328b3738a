"""The server as its clients meet it, over HTTP."""

from collections.abc import Iterator

import pytest

from kvfold import SamplingParams
from serving import Served, serving, small_llm


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(small_llm()) as served:
        yield served


def test_a_completion_is_the_engines(small: Served) -> None:
    found = small.ask(prompt="The old house", max_tokens=8, temperature=0)
    (wanted,) = small.llm.generate("The old house", SamplingParams(max_new_tokens=8))
    assert found["object"] == "text_completion" and found["model"] == "small"
    (choice,) = found["choices"]
    assert choice["text"] == wanted.text and choice["finish_reason"] == "length"
    usage, prompt = found["usage"], len(small.llm.encode("The old house"))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 8)
