"""The model `kvfold` of lm-evaluation-harness, and its API models against kvfold's server.

Tasks are YAML and rows are local files. Skipped without lm-eval; `make test-lm-eval` has it.
"""

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from importlib.metadata import EntryPoint
from math import fsum
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason='needs pip install "kvfold[lm-eval]"')

from lm_eval.api.instance import Instance

import kvfold
from kvfold import SamplingParams
from kvfold.config import CacheConfig
from kvfold.evaluation.measure import Measurement, measure, runner_for
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.reader import Reader
from kvfold.evaluation.tasks import read_tasks
from kvfold.hub.loading import load_tokenizer, resolve
from kvfold.lm_eval import KVFoldLM
from kvfold.utils.errors import SettingError
from lm_eval_cases import ROWS, STORY, answers_of, evaluated, rounded, tasks  # noqa: F401
from serving import TEMPLATE, serving, small_llm
from tolerance import model_terms, rounding

SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_length": 256,
    "kv_bytes": 2**22,
    "batch_size": "auto",
}


@pytest.fixture(scope="module")
def lm() -> KVFoldLM:
    return KVFoldLM("reference:gqa", **SMALL)


def requests() -> list[Instance]:
    pairs = [(row["context"], choice) for row in ROWS for choice in row["choices"]]
    return [Instance("loglikelihood", {}, pair, 0) for pair in pairs]


def read_after_contexts(lm: KVFoldLM, **settings: Any) -> list[tuple[float, bool]]:
    """The log-likelihoods as `kvfold eval` computes them."""
    model, cache = kvfold.reference("gqa"), CacheConfig(**settings)
    runner = runner_for(model, cache, 200, tokenizer=lm.tokenizer)
    reader = Reader(partial(PagedSession, runner))
    likelihoods = []
    for request in requests():
        context, rest = lm._encode_pair(*request.args)
        reader.prefill(context)
        likelihoods.append(reader.likelihood(rest))
    reader.close()
    return likelihoods


# -- log-likelihoods --------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 4])
def test_one_by_one_they_are_those_of_kvfold_eval(lm: KVFoldLM, bits: int) -> None:
    one = KVFoldLM("reference:gqa", bits=bits, **(SMALL | {"batch_size": 1}))
    assert one.loglikelihood(requests()) == read_after_contexts(lm, bits=bits)
    assert one.llm.runner.pool.used_bytes == 0


def test_together_they_differ_by_rounding(lm: KVFoldLM) -> None:
    found, expected = lm.loglikelihood(requests()), read_after_contexts(lm)
    error = rounding(torch.float32, model_terms(lm.llm.model.config, 256))
    for (score, is_greedy), (other, other_is_greedy) in zip(found, expected, strict=True):
        assert score == pytest.approx(other, rel=error) and is_greedy is other_is_greedy


def test_they_are_read_through_the_compressed_cache(lm: KVFoldLM) -> None:
    """At 2 bits they differ from those at 16 bits by far more than from those of `kvfold eval`,
    where a number between two codes may get the other one."""
    plain = lm.loglikelihood(requests())
    coded = KVFoldLM("reference:gqa", bits=2, **SMALL).loglikelihood(requests())
    expected = read_after_contexts(lm, bits=2)

    def difference(others: list[tuple[float, bool]]) -> float:
        return fsum(abs(x - y) for (x, _), (y, _) in zip(coded, others, strict=True))

    assert difference(plain) > 4 * difference(expected)


def test_what_follows_is_read_after_the_eviction(lm: KVFoldLM) -> None:
    evict = {"evict": "kv-compress", "keep_tokens": 0.25}
    evicting = KVFoldLM("reference:gqa", **evict, **SMALL)
    found = evicting.loglikelihood(requests())
    assert found == read_after_contexts(lm, **evict) != lm.loglikelihood(requests())
    assert evicting.llm.runner.pool.used_bytes == 0
    with pytest.raises(SettingError, match="evict='kv-compress': this task scores whole texts"):
        evicting.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (STORY,), 0)])


def test_a_policy_without_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a budget"):
        KVFoldLM("reference:gqa", evict="kvzip", **SMALL).loglikelihood(requests())


def test_whole_texts_are_scored_in_windows(lm: KVFoldLM) -> None:
    texts = [STORY, 20 * STORY]
    found = lm.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    )
    short, long = (lm.tok_encode(text, add_special_tokens=False) for text in texts)
    assert len(long) > 256 and lm.prefix_token_id not in long

    def scored(ids: list[int], last: int) -> float:
        sampling = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
        (completion,) = lm.llm.generate([ids], sampling)
        return fsum(x.chosen for x in completion.prompt_logprobs[-last:])

    size = 254  # a window's tokens beside the one before it and an output
    first = scored([lm.prefix_token_id, *long[:size]], size)
    rest = scored(long[-size - 1 :], len(long) - size)
    assert found == pytest.approx([scored([lm.prefix_token_id, *short], len(short)), first + rest])


def test_a_long_context_is_cut_on_its_left(lm: KVFoldLM) -> None:
    context = lm.tok_encode(20 * STORY)
    (cut, whole) = lm._loglikelihood_tokens(
        [(None, context, [5, 6]), (None, context[-253:], [5, 6])]
    )
    assert cut == whole
    with pytest.raises(SettingError, match="an answer of 255 tokens leaves no context in 256"):
        lm._loglikelihood_tokens([(None, [5], [5] * 255)])


def test_tokens_before_a_text_come_once(lm: KVFoldLM) -> None:
    ids = lm.tok_encode(STORY)
    assert ids[0] == lm.tokenizer.bos_token_id != ids[1]
    assert lm.tok_encode(lm.tokenizer.bos_token + STORY) == ids
    assert lm.tok_encode(STORY, add_special_tokens=False) == ids[1:]


# -- generation -------------------------------------------------------------------------------


def generated(lm: KVFoldLM, **settings: Any) -> str:
    (text,) = lm.generate_until([Instance("generate_until", {}, (STORY, settings), 0)])
    return text


def test_answers_are_the_engines(lm: KVFoldLM) -> None:
    (whole,) = lm.llm.generate([STORY], SamplingParams(max_new_tokens=24))
    assert generated(lm, max_gen_toks=24, until=[]) == whole.text
    stop = whole.text[8:12]
    before = whole.text[: whole.text.index(stop)]
    assert generated(lm, max_gen_toks=24, until=[stop, ""], do_sample=False) == before
    sampled = {"do_sample": True, "top_p": 0.9, "seed": 3, "max_gen_toks": 24}
    params = SamplingParams(max_new_tokens=24, temperature=1.0, top_p=0.9, seed=3)
    assert generated(lm, **sampled) == lm.llm.generate([STORY], params)[0].text
    with pytest.raises(ValueError, match="unknown gen_kwargs: num_beams; of kvfold: "):
        generated(lm, num_beams=4)


def test_a_request_that_does_not_fit_the_pool_fails() -> None:
    tight = KVFoldLM("reference:gqa", **(SMALL | {"kv_bytes": 2**20, "max_sequences": 1}))
    with pytest.raises((RuntimeError, ValueError), match="kv_bytes"):
        generated(tight, max_gen_toks=240, until=[])


# -- settings ---------------------------------------------------------------------------------


def test_settings_are_those_of_llm() -> None:
    with pytest.raises(ValueError, match="unknown settings: bitz; of the cache: kv_bytes, page, "):
        KVFoldLM("reference:gqa", bitz=4)
    with pytest.raises(SettingError, match="bits must be one of 16, 8"):
        KVFoldLM("reference:gqa", bits=5)
    for batch_size, num_slots in {1: 1, "3": 3, "auto": 16}.items():
        many = KVFoldLM("reference:gqa", **(SMALL | {"batch_size": batch_size}))
        assert many.llm.runner.pool.num_slots == num_slots and many.max_length == 256
    assert KVFoldLM("reference:gqa", max_sequences=2, **SMALL).llm.runner.pool.num_slots == 2


def test_the_default_gpu_of_lm_eval_is_no_mistake() -> None:
    settings = SMALL | {"device": "cuda:0"}
    assert KVFoldLM("reference:gqa", **settings).llm.runner.device.type in ("cpu", "cuda")
    with pytest.raises(SettingError, match="device"):
        KVFoldLM("reference:gqa", **(SMALL | {"device": "cuda:99"}))


def test_the_entry_point_is_the_model() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "lm_eval.models"
    (name, value) = next(iter(project["entry-points"][group].items()))
    assert (name, EntryPoint(name, value, group).load()) == ("kvfold", KVFoldLM)


# -- lm-eval itself ---------------------------------------------------------------------------


def measured(tasks: Path, bits: int) -> dict[str, float]:
    """The scores of `kvfold eval`, by lm-eval's names."""
    what = Measurement(
        tasks={"rows": read_tasks(tasks / "rows.jsonl")}, cache=CacheConfig(bits=bits)
    )
    tokenizer = load_tokenizer("reference:gqa")
    scores = measure(kvfold.reference("gqa"), tokenizer, what).tasks["rows"].scores
    pairs = {"acc,none": "accuracy", "acc_bytes,none": "accuracy_per_byte"}
    return {name: scores[score].mean for name, score in pairs.items()}


@pytest.mark.parametrize("bits", [16, 8])
def test_figures_are_those_of_kvfold_eval(tasks: Path, bits: int) -> None:
    settings = {"pretrained": "reference:gqa", "bits": bits} | SMALL
    del settings["batch_size"]  # lm-eval gives it beside the others
    results = evaluated(tasks, ["choices"], "kvfold", model_args=settings, batch_size=1)
    assert rounded(results) == measured(tasks, bits)


@pytest.mark.slow
def test_the_command_has_the_model(tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvfold.lm_eval", "--model", "kvfold", "--device", "cpu"]
    command += ["--model_args", "pretrained=reference:gqa,bits=8,max_length=256,kv_bytes=4194304"]
    command += ["--include_path", str(tasks), "--tasks", "choices"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--output_path", f"{tmp_path}/x.json"], env=environment, check=True)
    (file,) = tmp_path.glob("x*.json")
    assert rounded(json.loads(file.read_text())) == measured(tasks, 8)


def test_api_models_work_with_the_server(tasks: Path, lm: KVFoldLM, monkeypatch) -> None:
    """Choices and answers by /v1/completions, and answers by /v1/chat/completions."""
    names = ["choices", "answers"]
    here = evaluated(tasks, names, lm)
    llm, template = small_llm(max_sequences=2), "{{ bos_token }}" + TEMPLATE
    for tokenizer in (llm.tokenizer, lm.tokenizer):
        monkeypatch.setattr(tokenizer, "chat_template", template)
    with serving(llm) as served:
        settings = {"model": "small", "tokenizer": str(resolve("reference:gqa"))}
        api = settings | {"base_url": f"{served.url}/v1/completions", "add_bos_token": True}
        there = evaluated(tasks, names, "local-completions", model_args=api)
        chat = {"model": "small", "base_url": f"{served.url}/v1/chat/completions"}
        told = evaluated(
            tasks,
            ["answers"],
            "local-chat-completions",
            model_args=chat,
            apply_chat_template=True,
        )
    assert rounded(there) == rounded(here)
    assert answers_of(there) == answers_of(here)
    chatted = evaluated(tasks, ["answers"], lm, apply_chat_template=True)
    assert answers_of(told) == answers_of(chatted) != answers_of(here)
