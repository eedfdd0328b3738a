"""Needle samples keep to their length and seed; evaluation leaves model and cache as they were."""

import copy
import math
import random
import re
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvfold.evaluation.dense import DenseSession
from kvfold.evaluation.haystack import FACT, INTRO, QUESTION, build_sample, load_filler, load_words
from kvfold.evaluation.needle import _summarise, evaluate_needle
from kvfold.evaluation.reader import Reader
from kvfold.utils.versions import CACHE


def count_pieces(text: str) -> int:
    """A tokenizer of words and punctuation: additive over sentences."""
    return len(re.findall(r" ?\w+| ?[^\w\s]|\n", text))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def sizes(**overrides: int) -> dict[str, int]:
    return {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    } | overrides


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes())).eval()


@pytest.mark.parametrize("length", [400, 512, 1000, 4096])
@pytest.mark.parametrize("num_facts", [1, 4])
def test_sample_fills_its_length(length: int, num_facts: int) -> None:
    for seed in range(5):
        sample = build_sample(
            count_pieces,
            length=length,
            num_facts=num_facts,
            filler=load_filler(),
            rng=random.Random(seed),
        )
        pairs = zip(sample.questions, sample.answers, strict=True)
        longest = max(count_pieces(q) + count_pieces(a) for q, a in pairs)
        assert length - 8 <= count_pieces(sample.prompt) + longest <= length


def test_each_fact_stands_once_between_sentences() -> None:
    filler = load_filler()
    sample = build_sample(
        count_pieces, length=2048, num_facts=8, filler=filler, rng=random.Random(3)
    )
    assert sample.prompt.startswith(INTRO)
    assert sample.prompt.endswith("\n")
    rest, keys = sample.prompt.removeprefix(INTRO), set()
    for question, answer in zip(sample.questions, sample.answers, strict=True):
        key = re.fullmatch(
            re.escape(QUESTION).replace(r"\{key\}", r"(\w+ \w+)", 1).replace(r"\{key\}", r"\1"),
            question,
        ).group(1)
        fact = FACT.format(key=key, value=int(answer))
        assert rest.count(fact) == 1
        rest = rest.replace(fact, "").replace("  ", " ").strip()
        keys.add(key)
    assert len(keys) == 8
    assert "magic" not in rest
    start = next(i for i, s in enumerate(filler) if rest.startswith(s + " "))
    running = " ".join(filler[(start + i) % len(filler)] for i in range(len(filler)))
    assert running.startswith(rest)


def test_seed_decides_the_sample() -> None:
    def build(seed: int) -> object:
        return build_sample(
            count_pieces, length=700, num_facts=3, filler=load_filler(), rng=random.Random(seed)
        )

    assert build(1) == build(1)
    assert build(1) != build(2)


def test_sentence_counts_that_do_not_add_up_still_fit() -> None:
    def count(text: str) -> int:
        return count_pieces(text) + 2

    sample = build_sample(
        count, length=900, num_facts=4, filler=load_filler(), rng=random.Random(0)
    )
    longest = max(count(q) + count(sample.answers[0]) for q in sample.questions)
    assert 900 - 12 <= count(sample.prompt) + longest <= 900


def test_long_sentences_do_not_stop_a_short_sample() -> None:
    filler = [" ".join(["long"] * 400) + ".", *["Short words stand here."] * 5]
    for seed in range(12):
        sample = build_sample(
            count_pieces, length=300, num_facts=4, filler=filler, rng=random.Random(seed)
        )
        assert sum(sample.prompt.count(answer + ".") for answer in sample.answers) == 4


def test_too_short_a_length_names_the_one_needed() -> None:
    def build(length: int) -> object:
        rng = random.Random(0)
        return build_sample(count_pieces, length=length, num_facts=6, filler=load_filler(), rng=rng)

    with pytest.raises(ValueError, match=r"length is 150 .* need (\d+)") as error:
        build(150)
    needed = int(re.search(r"need (\d+)", str(error.value)).group(1))
    build(needed)
    with pytest.raises(ValueError, match=f"need {needed}"):
        build(needed - 1)


def test_packaged_words_and_filler() -> None:
    adjectives, nouns = load_words()
    assert len(set(adjectives)) == len(adjectives) >= 150
    assert len(set(nouns)) == len(nouns) >= 300
    filler = load_filler()
    assert sum(map(len, filler)) > 140_000
    assert all(s == s.strip() and "\n" not in s for s in filler)


def test_random_model_scores_in_range_and_is_left_alone(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    before = copy.deepcopy(model.state_dict())
    seen: list[tuple[int, int]] = []
    results = evaluate_needle(
        model,
        tokenizer,
        lengths=(1200, 1500),
        num_contexts=2,
        facts_per_context=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [r.length for r in results] == [1200, 1500]
    assert all(0 <= r.exact <= 1 and r.num_questions == 4 for r in results)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_length_beyond_the_positions(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=r"4096 tokens.*max_position_embeddings is 2048"):
        evaluate_needle(model, tokenizer, lengths=(512, 4096))


@pytest.mark.parametrize("sliding", [False, True])
def test_questions_do_not_change_the_cache(sliding: bool) -> None:
    torch.manual_seed(0)
    model = (
        MistralForCausalLM(MistralConfig(**sizes(sliding_window=16)))
        if sliding
        else LlamaForCausalLM(LlamaConfig(**sizes()))
    ).eval()
    context, question = torch.randint(0, 256, (50,)).tolist(), [1, 2, 3]
    with torch.no_grad():
        reader = Reader(partial(DenseSession, model, chunk=7))
        reader.prefill(context)
        keys = [layer.keys.clone() for layer in reader.session.cache.layers]
        first = reader.answer(question, 6)
        reader.answer([9, 8, 7, 6, 5], 6)
        assert reader.answer(question, 6) == first
        assert all(
            torch.equal(k, layer.keys)
            for k, layer in zip(keys, reader.session.cache.layers, strict=True)
        )
        whole = model(torch.tensor([context + question])).logits[0, -1].argmax()
    assert first[0] == int(whole)


class Oracle:
    """Stores token ids as keys and answers from what the cache holds; forgets every `blind` key."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, blind: str = "") -> None:
        self.tokenizer, self.blind = tokenizer, blind
        self.config = LlamaConfig(**sizes(num_hidden_layers=1))
        self.device = torch.device("cpu")

    def __call__(self, *, input_ids, use_cache, logits_to_keep, **cache):
        assert input_ids.shape[1] <= 512
        rows = input_ids[:, None, :, None].float()
        keys, _ = cache[CACHE].update(rows, rows, 0)
        text = self.tokenizer.decode(keys.flatten().long().tolist())
        logits = torch.zeros(1, 1, 256)
        logits[0, 0, self._next(text)] = 1
        return CausalLMOutputWithPast(logits=logits)

    def _next(self, text: str) -> int:
        asked = re.search(r"numbers? for (\w+ \w+) mentioned in the provided text is( ?\d*)$", text)
        if asked is None or (self.blind and self.blind in asked[1]):
            return 0
        assert text.count("What is the special") == 1, "an earlier question is still in the cache"
        value = re.search(rf"numbers for {asked[1]} is: (\d+)\.", text)[1]
        following = f" {value}"[len(asked[2]) :][0]
        return self.tokenizer(following)["input_ids"][0]


def test_a_model_that_retrieves_scores_one(tokenizer: PreTrainedTokenizerFast) -> None:
    (result,) = evaluate_needle(Oracle(tokenizer), tokenizer, lengths=(2000,), num_contexts=3)
    assert (result.exact, result.exact_se, result.num_questions) == (1.0, 0.0, 12)


def test_standard_error_is_clustered_by_context() -> None:
    clustered = _summarise(512, [[True, True], [False, False]])
    assert (clustered.exact, clustered.exact_se) == pytest.approx((0.5, 0.5))
    even = _summarise(512, [[True, False], [True, False]])
    assert (even.exact, even.exact_se) == pytest.approx((0.5, 0.0))
    assert math.isnan(_summarise(512, [[True, False]]).exact_se)


def test_a_model_that_misses_some_scores_between(tokenizer: PreTrainedTokenizerFast) -> None:
    (result,) = evaluate_needle(
        Oracle(tokenizer, blind="e"), tokenizer, lengths=(2000,), num_contexts=6
    )
    assert 0 < result.exact < 1
    assert 0 < result.exact_se < 0.25
