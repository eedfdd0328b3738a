"""A real model: SmolLM2-135M-Instruct, where `make smollm2` has brought it. `make test-real`."""

import pytest
import torch

import kvfold
from kvfold.compression.compressor import Compressor
from kvfold.evaluation.perplexity import token_nll
from kvfold.hub import reference as reference_models
from kvfold.hub.loading import load, load_tokenizer
from kvfold.utils.chat import encode_chat
from kvfold.utils.text import packaged, running
from kvfold.utils.tokens import windows

pytestmark = pytest.mark.real

MODEL = "reference:smollm2"
QUESTION = "What is the capital of France?"
LOSS = 3.9904  # of the window below, in float32


@pytest.fixture(scope="module", autouse=True)
def at_hand():
    if reference_models.local("smollm2") is None:
        pytest.skip(f"{MODEL} is not on this machine: run `make smollm2`")


@pytest.fixture(scope="module")
def tokenizer(at_hand):
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def model(at_hand):
    return load(MODEL, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def window(tokenizer):
    """Tokens [1, 1024] of a packaged text."""
    return windows(tokenizer, running(packaged("filler.txt")), 1024, 1024)


@torch.no_grad()
def logits_of(model, rows):
    return model(input_ids=rows).logits


def test_it_is_the_model_that_was_published(model, tokenizer):
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.num_key_value_heads) == (
        "llama",
        30,
        3,
    )
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    assert len(tokenizer) == config.vocab_size == 49152
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == 2


def test_loss_of_a_packaged_text(model, window):
    with torch.no_grad():
        loss = model(input_ids=window, labels=window).loss
    assert float(loss) == pytest.approx(LOSS, abs=5e-3)


def test_it_answers(model, tokenizer):
    ids = torch.tensor([encode_chat(tokenizer, QUESTION)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
    )
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])
    assert out[0, -1] == tokenizer.eos_token_id


@pytest.mark.parametrize("recipe", ["zack", "small"])
def test_all_dimensions_kept_change_nothing(model, tokenizer, window, recipe):
    compressor = Compressor(model, kvfold.recipes.get(recipe), tokenizer, max_tokens=4096)
    prepared = compressor.prepare()
    folded = prepared.folded_copy(prepared.plan(1.0))
    rows = window[:, :256]
    wanted, found = logits_of(model, rows), logits_of(folded, rows)
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


def test_half_of_the_cache_loses_little(model, tokenizer):
    """4,096 tokens of calibration: 0.14 nats were measured."""
    compressor = Compressor(model, kvfold.recipes.get("lean"), tokenizer, max_tokens=4096)
    prepared = compressor.prepare()
    folded = prepared.folded_copy(prepared.plan(0.5))
    rows = windows(tokenizer, running(packaged("filler.txt")), 512, 1024)
    losses = [
        float(token_nll(logits_of(x, rows)[:, :-1], rows[:, 1:]).mean()) for x in (model, folded)
    ]
    print(f"{losses[0]:.4f} -> {losses[1]:.4f}")
    assert losses[1] - losses[0] < 0.3


def test_the_engine_writes_what_the_dense_model_writes(model, tokenizer, window):
    prompts = [encode_chat(tokenizer, QUESTION), window[0, :200].tolist()]
    greedy = kvfold.SamplingParams(max_new_tokens=24)
    llm = kvfold.LLM(
        load(MODEL, dtype=torch.float32, device="cpu"), tokenizer=tokenizer, max_tokens=256
    )
    for prompt, completion in zip(prompts, llm.generate(prompts, greedy), strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        assert list(completion.token_ids) == out[0, len(prompt) :].tolist()
