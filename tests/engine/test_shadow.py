"""Shadow scoring: the loss is what transformers computes, and scoring harms no request."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvfold
import model_types
from kvfold import LLM, CacheParams, SamplingParams
from kvfold.config import parse_share
from kvfold.engine.core import shadow
from kvfold.engine.requests.request import TokenLogprobs
from kvfold.engine.runner.original import OriginalPass
from kvfold.utils.errors import SettingError
from llm_cases import compressed
from models import tiny, tokens
from sidecar_cases import bytes_tokenizer

PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (40, 1, 5, 33)]
ANSWER = SamplingParams(max_new_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=1)
SIZE = {"page": 8, "kv_bytes": 2**22, "max_sequences": 4, "max_tokens": 160}


def llm_of(name: str = "llama-gqa", **settings) -> LLM:
    return LLM(tiny(name), **SIZE | {"shadow": 1.0} | settings)


def scored(llm: LLM) -> shadow.ShadowTotals:
    """The totals, once nothing waits any more."""
    while llm.engine.run_idle():
        pass
    assert llm.engine.shadow is not None and not llm.engine.shadow.has_work
    return llm.engine.shadow.totals


@torch.inference_mode()
def dense(name: str, ids: list[int]) -> torch.Tensor:
    return tiny(name)(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def expected(name: str, prompts: list[list[int]], answers) -> tuple[float, int]:
    """Sum of the losses, and how many likeliest tokens differ, by one forward of transformers."""
    total, differing = 0.0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logs = dense(name, prompt + list(answer.token_ids))[len(prompt) - 1 : -1]
        for token, entry, row in zip(answer.token_ids, answer.logprobs, logs, strict=True):
            total += entry.chosen - float(row[token])
            differing += entry.top[0][0] != int(row.argmax())
    return total, differing


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "mistral-sliding"])
def test_the_loss_is_what_transformers_computes(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, of prompts of any length, greedy and sampled."""
    monkeypatch.setattr(shadow, "CHUNK", chunk)
    llm = llm_of(name, bits=2)
    wanted = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=1, logprobs=1)
    answers = llm.generate(PROMPTS, wanted)
    totals = scored(llm)
    loss, differing = expected(name, PROMPTS, answers)
    count = 12 * len(PROMPTS)
    assert (totals.num_scored, totals.num_tokens) == (len(PROMPTS), count)
    assert totals.positive - totals.negative == pytest.approx(loss, abs=1e-3 * count)
    assert totals.loss == pytest.approx(loss / count, abs=1e-3)
    assert totals.num_differing == pytest.approx(differing, abs=1)
    assert sum(totals.histogram) == count and totals.positive > 0.05  # 2 bits lose something


@pytest.mark.parametrize("name", ["llama", "glm"])
def test_maps_that_drop_dimensions_count(name: str, tmp_path: Path) -> None:
    """Of a family, and of a model type without one."""
    model = model_types.tiny(name)
    tokenizer = bytes_tokenizer(tmp_path)
    maps = kvfold.compress(
        model, keep=0.5, align=1, windows=True, tokenizer=tokenizer, max_tokens=1024
    )
    settings = {"max_sequences": 4, "max_tokens": 100, "kv_bytes": 2**22, "shadow": 1.0}
    llm = LLM(model, maps=maps, **settings)
    prompt = list(range(5, 45))
    (answer,) = llm.generate([prompt], replace(SAMPLED, logprobs=1))
    totals = scored(llm)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + list(answer.token_ids)])).logits[0, 39:-1]
    logs = logits.float().log_softmax(-1)
    pairs = zip(answer.token_ids, answer.logprobs, logs, strict=True)
    losses = [entry.chosen - float(row[token]) for token, entry, row in pairs]
    assert totals.num_tokens == 12 and totals.loss == pytest.approx(sum(losses) / 12, abs=1e-4)
    assert totals.positive + totals.negative > 1e-3


def test_evicted_tokens_count() -> None:
    llm = llm_of(evict="kv-compress")
    llm.generate([PROMPTS[0]], SAMPLED, cache=CacheParams(max_cache_tokens=16))
    assert llm.engine.scheduler.compressions.num_done
    totals = scored(llm)
    assert totals.num_tokens == 12 and totals.positive + totals.negative > 0.01


def test_an_uncompressed_cache_loses_nothing() -> None:
    llm = llm_of()
    llm.generate(PROMPTS, ANSWER)
    llm.generate(PROMPTS, SAMPLED)
    totals = scored(llm)
    assert totals.num_tokens == 2 * 12 * len(PROMPTS)
    assert totals.positive + totals.negative < 1e-3 * totals.num_tokens
    assert totals.num_differing <= 1


def test_nothing_is_drawn_without_a_share() -> None:
    llm = llm_of(shadow=0)
    llm.generate(PROMPTS, ANSWER)
    assert llm.engine.shadow is None and not llm.engine.run_idle()


def test_a_replay_draws_the_same_requests() -> None:
    prompts = [tokens(1, 9, seed=n)[0].tolist() for n in range(400)]

    def drawn(**settings: float) -> list[int]:
        llm = llm_of(**settings)
        requests = [llm.engine.request(x, ANSWER, None) for x in prompts]
        return [i for i, x in enumerate(requests) if llm.engine.shadow.draws(x)]

    first = drawn(shadow=0.1)
    assert first == drawn(shadow=0.1) != drawn(shadow=0.1, seed=1)
    assert 15 <= len(first) <= 70 and set(first) < set(drawn(shadow=0.5))


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_answers_are_those_without_it(logprobs: int | None) -> None:
    wanted = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=logprobs)
    with_shadow, without = (llm_of(shadow=x, bits=4).generate(PROMPTS, wanted) for x in (1.0, 0.0))
    assert with_shadow == without


def test_a_busy_engine_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests wait nothing is scored, and what the queue has no room for is dropped."""
    monkeypatch.setattr(shadow, "QUEUE", 2)
    llm = llm_of(max_sequences=1)
    scores = llm.engine.shadow
    requests = [llm.request(PROMPTS[2], ANSWER, None)[0] for _ in range(6)]
    for request in requests:
        llm.engine.submit(request)
    while llm.engine.scheduler.waiting:
        llm.engine.step()
        assert scores.totals.num_scored == 0 or not llm.engine.scheduler.waiting
    while llm.engine.has_work:
        llm.engine.step()
    totals = scored(llm)
    assert totals.num_scored + totals.num_dropped == 6
    assert totals.num_dropped >= 3 and all(x.finish_reason == "length" for x in requests)


def test_running_requests_wait_for_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    advance = OriginalPass.advance

    def counted(self: OriginalPass, count: int) -> None:
        counts.append(count)
        advance(self, count)

    monkeypatch.setattr(OriginalPass, "advance", counted)
    monkeypatch.setattr(shadow, "CHUNK", 2)
    llm = llm_of(max_sequences=2)
    long = SamplingParams(max_new_tokens=80, ignore_eos=True)
    llm.add(PROMPTS[0], ANSWER)  # ends early, and is scored while the other one runs
    llm.add(PROMPTS[1], long)
    steps = 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    assert 1 < len(counts) <= steps / shadow.EVERY + 2 and max(counts) <= 2
    assert scored(llm).num_scored == 2


def test_long_requests_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "LIMIT", 20)
    llm = llm_of()
    llm.generate(PROMPTS, ANSWER)  # of 52, 13, 17 and 45 tokens
    totals = scored(llm)
    assert (totals.num_scored, totals.num_skipped) == (2, 2)


def test_an_error_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = llm_of()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):

        def fails(self: OriginalPass, count: int) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(OriginalPass, "advance", fails)
        answers = llm.generate(PROMPTS, ANSWER)
        totals = scored(llm)
    assert {x.finish_reason for x in answers} == {"length"}
    assert (totals.num_failed, totals.num_scored, totals.num_tokens) == (len(PROMPTS), 0, 0)
    assert "could not be scored" in caplog.text
    llm.generate(PROMPTS[:1], ANSWER)
    assert scored(llm).num_scored == 1


def test_numbers_that_are_not_finite_are_not_counted() -> None:
    totals = shadow.ShadowTotals()
    entry = TokenLogprobs(chosen=-1.0, top=((3, -0.5),))
    broken = TokenLogprobs(chosen=float("nan"), top=((3, -0.5),))
    with pytest.raises(ValueError, match="not finite"):
        totals.add([entry, entry], [entry, broken])
    assert totals == shadow.ShadowTotals()


def test_pre_emption_keeps_what_was_served() -> None:
    llm = llm_of(bits=4)
    request, _ = llm.request(PROMPTS[0], ANSWER, None)
    llm.engine.submit(request)
    for _ in range(4):
        llm.engine.step()
    llm.engine.scheduler._requeue(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert request.num_restarts == 1 and len(request.served) == 12
    assert scored(llm).num_tokens == 12


def test_a_folded_model_is_refused() -> None:
    folded = compressed("llama-gqa", "lorc", keep=0.5)
    with pytest.raises(SettingError, match=r"shadow compares .* no longer has: serve maps"):
        LLM(folded, **SIZE, shadow=0.001)


@pytest.mark.parametrize("value", ["x", "101%", -0.1, 1.5, "nan", True])
def test_shares_that_are_none(value: float | str) -> None:
    with pytest.raises(SettingError, match=r"shadow must be a share such as 0.1% or .001"):
        parse_share("shadow", value)


def test_shares() -> None:
    texts = {"0.1%": 0.001, ".001": 0.001, "100 %": 1.0, "": 0.0, None: 0.0, 0.25: 0.25}
    assert {x: parse_share("shadow", x) for x in texts} == pytest.approx(texts)
