"""The engine serves models of any type by maps beside their weights: what it computes is what
transformers does with the same maps.

Shapes: T tokens of a prompt.
"""

from unittest import mock

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import kvfold
from kvfold.engine.requests.params import SamplingParams
from kvfold.maps.plain import measured_means
from kvfold.utils.errors import SettingError
from maps_cases import EXPANDED
from maps_engine_cases import PROMPT, STEPS, UNSERVED, apart, engine_logits
from model_types import TYPES, tiny
from sidecar_cases import bytes_tokenizer

KINDS = ("llama", "qwen3_moe", "gemma3_text", "phi3", "cohere2", "olmo2", "glm", "gemma2", "gpt2")
KINDS += ("smollm3", "granitemoe", "mixtral", "stablelm", "exaone4", "opt")
SERVED = [x for x in TYPES if x not in (*UNSERVED, *EXPANDED, "opt")]  # opt: as a family


def compressed(name: str, keep: float, folder):
    model = tiny(name)
    made = kvfold.compress(
        model,
        keep=keep,
        align=1,
        windows=True,
        tokenizer=bytes_tokenizer(folder),
        max_tokens=1024,
    )
    return model, made


@pytest.fixture
def ids() -> list[int]:
    return torch.randint(3, 127, (PROMPT + STEPS,)).tolist()


@pytest.mark.parametrize("keep", [1.0, 0.5])
@pytest.mark.parametrize("name", [x for x in KINDS if x in TYPES])
def test_steps_are_those_of_transformers(name: str, keep: float, ids, tmp_path) -> None:
    model, made = compressed(name, keep, tmp_path)
    if name == "gemma2":  # sdpa of transformers 5.17 leaves its cap out
        model.set_attn_implementation("eager")
    llm = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64)
    found = engine_logits(llm, ids)
    kvfold.attach(model, made)
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 :]
    assert apart(found, wanted) < 4e-5
    assert apart(found, wanted.flip(0)) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_a_type_is_served_without_maps(name: str, ids) -> None:
    model = tiny(name)
    if name == "gemma2":  # sdpa of transformers 5.17 leaves its cap out
        model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 :]
    llm = kvfold.LLM(model, max_sequences=2, max_tokens=64)
    assert apart(engine_logits(llm, ids), wanted) < 4e-5


@pytest.mark.parametrize("name", [x for x in UNSERVED if x in TYPES])
def test_a_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(SettingError, match=UNSERVED[name]):
        kvfold.LLM(tiny(name), max_sequences=1, max_tokens=64)


def test_fewer_bits_cost_little(ids, tmp_path) -> None:
    model, made = compressed("qwen3_moe", 1.0, tmp_path)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, PROMPT - 1 :]
    lost = []
    for bits in (8, 4):
        llm = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64, bits=bits)
        lost.append(apart(engine_logits(llm, ids), wanted))
    assert lost[0] < 0.05  # weights are random, and large
    assert lost[0] < lost[1] < 0.3


def test_requests_run_together_and_share_prefixes(tmp_path) -> None:
    model, made = compressed("gemma3_text", 0.5, tmp_path)
    llm = kvfold.LLM(model, maps=made, max_sequences=3, max_tokens=96)
    prompts = [torch.randint(3, 127, (n,)).tolist() for n in (40, 17, 3)]
    wanted = SamplingParams(max_new_tokens=12, ignore_eos=True)
    together = llm.generate(prompts, wanted)
    alone = [llm.generate([x], wanted)[0] for x in prompts]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere2"])
def test_a_prompt_may_be_longer_than_a_chunk(name: str, tmp_path) -> None:
    """Steps of its first tokens alone choose nothing."""
    model, made = compressed(name, 0.5, tmp_path)
    prompt = torch.randint(3, 127, (40,)).tolist()
    answers = []
    for chunk in (7, 64):
        llm = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64, chunk=chunk)
        answers += llm.generate([prompt], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert answers[0].error is None
    assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("llama", {"evict": "h2o", "keep_tokens": 0.5}, "nothing is evicted"),
        ("llama", {"format": "kivi", "bits": 4}, "the only format is"),
    ],
)
def test_what_is_not_served_is_refused(name: str, settings, why: str, tmp_path) -> None:
    model, made = compressed(name, 0.5, tmp_path)
    with pytest.raises(SettingError, match=why):
        kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64, **settings)


def test_a_model_keeps_its_own_attention(ids, tmp_path) -> None:
    """An engine serves a copy, of the same weights."""
    model, made = compressed("llama", 0.5, tmp_path)
    with torch.no_grad():
        before = model(torch.tensor([ids])).logits
    kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits, before)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3_text", "cohere2"])
def test_few_bits_need_no_maps(name: str, ids) -> None:
    """Nor does a model whose type nobody named need any in 16 bits and more."""
    model = tiny(name)
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 :]
    exact = kvfold.LLM(model, max_sequences=2, max_tokens=64)
    assert apart(engine_logits(exact, ids), wanted) < 4e-5
    packed = kvfold.LLM(model, max_sequences=2, max_tokens=64, bits=8)
    assert 1e-5 < apart(engine_logits(packed, ids), wanted) < 0.05
    bits = [x.runner.pool.layout.bits_per_token for x in (exact, packed)]
    assert bits[1] == bits[0] * (8 + 16 / 16) / 16  # a scale for 16 numbers


def test_a_model_without_maps_is_looked_at_once() -> None:
    model, seen = tiny("gemma3_text"), []
    forward = type(model).forward

    def counted(self, *args, **kwargs):
        ids = kwargs.get("input_ids")
        seen.extend([] if ids is None else [ids.shape[1]])  # the engine itself embeds tokens
        return forward(self, *args, **kwargs)

    with mock.patch.object(type(model), "forward", counted):
        llm = kvfold.LLM(model, max_sequences=2, max_tokens=64, bits=8)
    assert len(seen) == 1
    assert all(x.keys.shape[1] == 1 for x in llm.runner.family.compressed), "the rest is freed"


def test_means_that_are_not_stored_stay_where_attention_would_feel_them() -> None:
    for name, kept in (("gemma2", (0, None)), ("qwen2", (None, None))):
        for means in measured_means(tiny(name)):
            for x, zero in zip(means, kept, strict=True):
                assert (float(x.abs().max()) == 0) == (zero == 0)


def test_attention_that_looks_ahead_is_refused() -> None:
    model = tiny("gemma3_text")
    model.model.layers[0].self_attn.is_causal = False  # as `use_bidirectional_attention` sets it
    with pytest.raises(SettingError, match="lets tokens see those that follow them"):
        kvfold.LLM(model)


def test_a_type_without_positions_needs_max_tokens() -> None:
    with pytest.raises(SettingError, match="model type 'bloom' states no number of positions"):
        kvfold.LLM(
            BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2))
        )
