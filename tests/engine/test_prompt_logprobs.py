"""How likely prompts are: those of the dense model, whatever is read together and how often."""

import json
from collections.abc import Iterator

import pytest
import torch

from kvfold import LLM, CacheParams, SamplingParams
from kvfold.engine.runner import prompt_logprobs
from models import tiny, tokens
from serving import Served, serving, small_llm

PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (70, 1, 5, 33)]
WANTED = SamplingParams(max_new_tokens=4, ignore_eos=True, prompt_logprobs=3)


def llm_of(**settings) -> LLM:
    fixed = {"page": 8, "kv_bytes": 2**22, "max_sequences": 4, "max_tokens": 160}
    return LLM(tiny("llama-gqa"), **fixed | settings)


@torch.inference_mode()
def dense(prompt: list[int]) -> torch.Tensor:
    return tiny("llama-gqa")(torch.tensor([prompt])).logits[0].float().log_softmax(-1)


def check(found, prompt: list[int]) -> None:
    assert len(found) == len(prompt) - 1
    for token, own, row in zip(prompt[1:], found, dense(prompt)[:-1], strict=True):
        assert own.chosen == pytest.approx(float(row[token]), abs=1e-3)
        assert own.rank - 1 == pytest.approx(int((row > row[token] + 1e-3).sum()), abs=2)
        assert len(own.top) == 3
        for (_, value), wanted in zip(own.top, row.topk(3).values.tolist(), strict=True):
            assert value == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("chunk", [7, 512])
def test_they_are_the_dense_models(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, in blocks of few logits, beside each other and a request that wants none."""
    monkeypatch.setattr(prompt_logprobs, "MOST", 2000)
    llm = llm_of(chunk=chunk)
    plain = SamplingParams(max_new_tokens=4, ignore_eos=True)
    found = llm.generate([*PROMPTS, PROMPTS[0]], [*[WANTED] * len(PROMPTS), plain])
    for own, prompt in zip(found, PROMPTS, strict=False):
        check(own.prompt_logprobs, prompt)
    assert found[-1].prompt_logprobs is None and found[-1].token_ids == found[0].token_ids
    (first, *rest) = llm.stream(PROMPTS[0], WANTED)
    check(first.prompt_logprobs, PROMPTS[0])
    assert [x.prompt_logprobs for x in rest] == [None] * 3


def test_nothing_is_taken_from_others_and_pre_emption_tells_once() -> None:
    llm = llm_of()
    llm.generate(PROMPTS[0], WANTED)
    request, _ = llm.request(PROMPTS[0], WANTED, None)
    llm.engine.submit(request)
    llm.engine.step()
    llm.engine.scheduler._requeue(request)
    outputs = [x for _ in range(8) for x in llm.engine.step()]
    assert request.num_cached == 0 and request.num_restarts == 1
    check(request.prompt_logprobs, PROMPTS[0])
    assert [x.prompt_logprobs for x in outputs] == [None] * 3  # the first came before


def test_they_are_known_before_rows_are_evicted() -> None:
    llm = llm_of(evict="kv-compress")
    (found,) = llm.generate([PROMPTS[0]], WANTED, cache=CacheParams(max_cache_tokens=20))
    check(found.prompt_logprobs, PROMPTS[0])
    assert llm.engine.scheduler.compressions.num_done


def test_a_packed_context_has_none() -> None:
    llm = llm_of(evict="kvzip", keep_tokens=1.0)
    context = llm.pack(PROMPTS[0], factor=2, measure=False)
    with pytest.raises(
        ValueError, match="prompt_logprobs: the tokens of a packed context are not computed again"
    ):
        llm.generate(PROMPTS[2], WANTED, context=context)


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(small_llm()) as served:
        yield served


def test_an_echo_has_logprobs(small: Served) -> None:
    """What evaluation harnesses read: of all of the prompt but its first token, and of outputs."""
    ids = small.llm.encode("The old house stood at the end of the lane.")
    asked = {"prompt": ids, "max_tokens": 3, "temperature": 0, "logprobs": 2, "echo": True}
    (choice,) = small.ask(**asked)["choices"]
    params = SamplingParams(max_new_tokens=3, logprobs=2, prompt_logprobs=2)
    (wanted,) = small.llm.generate([ids], params)
    found = choice["logprobs"]
    both = [None, *wanted.prompt_logprobs, *wanted.logprobs]
    assert found["token_logprobs"] == [None if x is None else x.chosen for x in both]
    assert found["top_logprobs"][0] is None and len(found["tokens"]) == len(ids) + 3
    for logprob, top in list(zip(found["token_logprobs"], found["top_logprobs"], strict=True))[1:]:
        assert 2 <= len(top) <= 3 and max(top.values()) >= logprob
    offsets, (_, *tokens) = found["text_offset"], found["tokens"]
    starts = [start + len(x) for start, x in zip(offsets[1:], tokens, strict=True)]
    assert offsets == [0, 0, *starts[:-1]]  # BOS is no part of the text
    plain = small.ask(**asked | {"echo": False})["choices"][0]["logprobs"]
    assert plain["token_logprobs"] == found["token_logprobs"][len(ids) :]


def test_a_stream_echoes_them_first(small: Served) -> None:
    asked = {"prompt": "The old house", "max_tokens": 3, "temperature": 0, "logprobs": 0}
    whole = small.ask(**asked, echo=True)["choices"][0]["logprobs"]
    body = {**asked, "echo": True, "stream": True}
    with small.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [x.removeprefix("data: ") for x in answer.iter_lines() if x]
    parts = [json.loads(x)["choices"][0]["logprobs"] for x in lines[:-1]]
    tokens = [token for x in parts if x for token in x["tokens"]]
    assert tokens == whole["tokens"] and len(parts[0]["tokens"]) > 1


def test_vllms_own_form(small: Served) -> None:
    ids = small.llm.encode("The old house stood")
    asked = {"prompt": ids, "max_tokens": 2, "temperature": 0}
    (choice,) = small.ask(**asked, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None and len(rest) == len(ids) - 1
    (wanted,) = small.llm.generate([ids], SamplingParams(max_new_tokens=2, prompt_logprobs=2))
    for token, found, scored_ in zip(ids[1:], rest, wanted.prompt_logprobs, strict=True):
        assert found[str(token)]["logprob"] == scored_.chosen
        assert found[str(token)]["rank"] == scored_.rank
        assert {1, 2} <= {x["rank"] for x in found.values()} and 2 <= len(found) <= 3
        assert all(x["decoded_token"] for x in found.values())
    assert small.refused(400, prompt=ids, prompt_logprobs=21)["param"] == "prompt_logprobs"
    error = small.refused(400, prompt=ids, prompt_logprobs=1, stream=True)
    assert error["param"] == "prompt_logprobs"
    chat = {"messages": [{"role": "user", "content": "Who?"}], "prompt_logprobs": 1}
    error = small.refused(400, "/v1/chat/completions", **chat)
    assert error["message"] == "prompt_logprobs: only /v1/completions has it"
