"""Folded checkpoints as transformers sees them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import kvfold
from kvfold.api import save
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.evaluation.dense import cache_bytes
from kvfold.hub.checkpoint import provenance_of, spec_of
from kvfold.models.positions import DIGITS
from kvfold.utils.versions import cache_argument
from models import tiny, tokens


@pytest.fixture(scope="module")
def folded():
    return fold("llama-gqa", "lean")


def fold(name: str, recipe: str, keep: float = 0.5):
    model = tiny(name)
    compressor = Compressor(model, kvfold.recipes.get(recipe))
    made = calibrate(model, compressor.family, tokens(6, 64), compressor.needs)
    prepared = compressor.prepare(made)
    prepared.fold(prepared.plan(keep, 1), {"model": name})
    return model


@pytest.fixture(scope="module")
def saved(folded, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "model"
    save(folded, None, path)
    return path


def test_another_program_loads_it_after_import_kvfold(saved) -> None:
    code = (
        "import kvfold; from transformers import AutoModelForCausalLM as Auto\n"
        f"print(type(Auto.from_pretrained({str(saved)!r}).model.layers[0].self_attn).__name__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Folded" in found.stdout


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def test_round_trip_is_exact(folded, saved) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(logits(loaded, tokens(2, 20)), logits(folded, tokens(2, 20)))
    assert spec_of(loaded) == spec_of(folded)
    assert provenance_of(loaded)["recipe"]["name"] == "lean"
    assert type(kvfold.load(str(saved))) is type(loaded)


def test_a_loaded_model_saves_again(saved, tmp_path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded, tokens(1, 9)), logits(again, tokens(1, 9)))


@pytest.mark.parametrize("recipe", kvfold.recipes.RECIPES)
def test_the_cache_holds_only_stored_numbers(recipe: str) -> None:
    model = fold("llama-gqa", recipe, 0.5)
    cache = DynamicCache(config=model.config)
    logits(model, tokens(2, 20), **cache_argument(cache))
    spec = spec_of(model)
    beside = DIGITS * sum(layer.keys == "pre_rope" for layer in spec.layers)  # positions
    assert cache_bytes(cache) == 2 * 20 * (spec.stored_numbers + beside) * 4
    assert spec.stored_numbers <= 0.5 * spec.geometry.full_numbers


def test_sampling_and_beams(folded) -> None:
    ids = tokens(2, 8)
    torch.manual_seed(0)
    sampled = folded.generate(ids, max_new_tokens=6, do_sample=True, top_k=20)
    beams = folded.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False)
    assert sampled.shape[1] <= 14 and beams.shape[1] <= 14


def test_greedy_generation_equals_full_forwards(folded) -> None:
    ids = tokens(1, 8)
    made = folded.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    for stop in range(8, 16):
        assert made[0, stop] == logits(folded, made[:, :stop])[0, -1].argmax()


def test_attentions_are_returned(folded) -> None:
    folded.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = folded(tokens(1, 6), output_attentions=True)
    finally:
        folded.set_attn_implementation("sdpa")
    assert len(out.attentions) == 2
    assert torch.allclose(out.attentions[0].sum(-1), torch.ones(1, 4, 6), atol=1e-5)
    assert torch.allclose(out.logits, logits(folded, tokens(1, 6)), atol=1e-4)


def test_other_attentions_are_refused(saved) -> None:
    with pytest.raises(ValueError, match="flex_attention"):
        AutoModelForCausalLM.from_pretrained(saved, attn_implementation="flex_attention")


def test_continuous_batching_is_refused(folded) -> None:
    pages = object.__new__(PagedAttentionCache)
    with pytest.raises(ValueError, match="continuous batching"):
        logits(folded, tokens(1, 4), position_ids=torch.arange(4)[None], cache=pages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["quantization_config"].update(format=99), "format 99"),
        (lambda c: c["quantization_config"].update(surprise=1), "surprise"),
        (lambda c: c["quantization_config"]["cache"].pop("layers"), "cache has no layers"),
        (lambda c: c.update(num_key_value_heads=4), "do not belong together"),
    ],
)
def test_foreign_configs_are_refused(saved, tmp_path, change, message) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(copy)


def test_a_folded_model_is_not_folded_again(folded) -> None:
    with pytest.raises(ValueError, match="compressed already"):
        Compressor(folded, kvfold.recipes.get("small"))


def test_bfloat16_stays_close() -> None:
    model = fold("llama-gqa", "small")
    exact = logits(model, tokens(1, 20))
    rounded = logits(model.to(torch.bfloat16), tokens(1, 20)).float()
    assert (rounded - exact).norm() < 0.03 * exact.norm()


def test_capped_scores_are_loaded_so_that_transformers_caps_them(tmp_path) -> None:
    tiny("gemma2").save_pretrained(tmp_path)
    assert kvfold.load(str(tmp_path), device="cpu").config._attn_implementation == "eager"
