"""Checkpoints whose files do not belong together are refused, naming what is wrong."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import kvfold
from kvfold.api import save
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor, Prepared
from kvfold.hub.checkpoint import folded_tensors, guard_of, provenance_of, spec_of
from models import CONFIGS, tiny, tokens

IDS = tokens(1, 12)


def prepared(model, recipe: str = "lean", seed: int = 1) -> Prepared:
    compressor = Compressor(model, kvfold.recipes.get(recipe))
    made = calibrate(model, compressor.family, tokens(6, 64, seed), compressor.needs)
    return compressor.prepare(made)


def folded(recipe: str = "lean", name: str = "llama-gqa"):
    model = tiny(name)
    found = prepared(model, recipe)
    found.fold(found.plan(0.5, 1), {"model": name})
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "folded"
    save(folded(), None, path)
    return path


@pytest.fixture
def copy(made, tmp_path) -> Path:
    """A folded checkpoint to damage."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in made.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def load(path: Path):
    return kvfold.load(str(path), device="cpu")


LOADERS = {"kvfold": load, "transformers": AutoModelForCausalLM.from_pretrained}
loader = pytest.mark.parametrize("read", LOADERS.values(), ids=LOADERS)


def edit_weights(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def edit_config(path: Path, change) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


# -- weights --------------------------------------------------------------------------------------


@loader
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("model.layers.1.self_attn.key_up"), r"1 missing \(.*layers.1.*key_up\)"),
        (
            lambda x: x.pop("model.layers.0.mlp.up_proj.weight"),
            r"1 missing \(.*mlp.up_proj.weight\)",
        ),
        (
            lambda x: [x.pop(name) for name in list(x) if ".1.self_attn." in name],
            r"\d missing \((model.layers.1.self_attn.\w+(.weight|.bias)?, ){3}...\)",
        ),
        (lambda x: x.update(more=torch.ones(2)), r"1 unexpected \(more\)"),
        (
            lambda x: x.update({"model.norm.weight": torch.ones(7)}),
            r"1 of another shape \(model.norm.weight\)",
        ),
    ],
)
def test_a_folded_checkpoint_has_its_tensors_and_no_others(copy, read, change, message) -> None:
    edit_weights(copy, change)
    with pytest.raises(ValueError, match=f"copy': tensors {message}; .* copy all of them again"):
        read(copy)


def test_a_plain_checkpoint_has_its_tensors(tmp_path) -> None:
    tiny("llama-gqa").save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda x: x.update(more=torch.ones(2)))
    load(tmp_path)  # nobody reads it
    edit_weights(tmp_path, lambda x: x.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ValueError, match=r"1 missing \(model.layers.1.self_attn.k_proj.weight\)"):
        load(tmp_path)
    edit_config(tmp_path, lambda c: c.update(intermediate_size=32))
    with pytest.raises(ValueError, match=r"6 of another shape \(model.layers.0.mlp.down_proj"):
        load(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_checkpoints_of_every_family_load(tmp_path, name: str) -> None:
    recipe = "fast" if name == "qwen3" else "lean"  # keys that are normalised are not factored
    model = folded(recipe, name)
    save(model, None, tmp_path / "folded")
    tiny(name).save_pretrained(tmp_path / "plain")
    assert spec_of(load(tmp_path / "folded")) == spec_of(model)
    load(tmp_path / "plain")


@loader
def test_tied_weights_are_not_missing(tmp_path, monkeypatch, read) -> None:
    tied = CONFIGS["llama-gqa"]()
    tied.tie_word_embeddings = True
    monkeypatch.setitem(CONFIGS, "llama-gqa", lambda: tied)
    save(folded(), None, tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    model = read(tmp_path / "tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@loader
def test_weights_of_another_compression_are_refused(copy, made, read) -> None:
    """The same spec, from other text: nothing but the digest tells them apart."""
    model = tiny("llama-gqa")
    other = prepared(model, seed=2)
    other.fold(spec_of(load(made)), {})
    save_file(dict(model.state_dict()), copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="are not those that its config"):
        read(copy)


def test_a_config_without_its_quantization_is_recognised(copy) -> None:
    edit_config(copy, lambda c: c.pop("quantization_config"))
    with pytest.raises(ValueError, match=r"3 missing .*quantization_config was removed"):
        load(copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(copy, value: float) -> None:
    edit_config(copy, lambda c: c["quantization_config"].pop("digest"))
    edit_weights(copy, lambda x: x["model.layers.1.self_attn.o_proj.weight"][3, 3:5].fill_(value))
    with pytest.raises(ValueError, match=r"parameter model.layers.1.self_attn.o_proj.weight holds"):
        load(copy)


# -- the digest -----------------------------------------------------------------------------------


def digest(path: Path) -> str | None:
    return json.loads((path / "config.json").read_text())["quantization_config"].get("digest")


def test_every_way_of_saving_writes_a_digest_that_holds(made, tmp_path) -> None:
    half = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half", max_shard_size="20KB")
    assert digest(made) and digest(tmp_path / "half") not in (None, digest(made))
    again = kvfold.load(str(tmp_path / "half"), dtype=torch.float32, device="cpu")
    again.save_pretrained(tmp_path / "single")
    assert load(tmp_path / "single").dtype is torch.float32
    folded().save_pretrained(tmp_path / "direct")
    assert digest(tmp_path / "direct") == digest(made)


def test_trained_weights_save_with_a_new_digest(made, tmp_path) -> None:
    model = load(made)
    model.model.layers[0].self_attn.o_proj.weight.data.mul_(2)
    model.save_pretrained(tmp_path)
    assert digest(tmp_path) != digest(made)
    load(tmp_path)


@loader
def test_checkpoints_without_a_digest_still_load(copy, read) -> None:
    edit_config(copy, lambda c: c["quantization_config"].pop("digest"))
    assert provenance_of(read(copy))["model"] == "llama-gqa"


def earlier(path: Path) -> None:
    """Make a checkpoint one of format 1: without a guard, its digest of attentions' first rows."""
    model = load(path)
    edit_weights(path, lambda x: x.pop(guard_of(model)))
    section = model.config.quantization_config
    section.format = 1
    digest = section.digest_of(folded_tensors(model), model.config)
    edit_config(path, lambda c: c["quantization_config"].update(format=1, digest=digest))


@loader
def test_checkpoints_of_format_1_still_load(copy, made, read, tmp_path) -> None:
    earlier(copy)
    again = read(copy)
    assert torch.equal(again(IDS).logits, read(made)(IDS).logits)
    again.save_pretrained(tmp_path / "again")
    assert guard_of(again) in load_file(tmp_path / "again" / "model.safetensors")
    edit_weights(copy, lambda x: x["model.layers.0.self_attn.o_proj.weight"][0].neg_())
    with pytest.raises(ValueError, match="are not those that its config"):
        read(copy)


@loader
@pytest.mark.parametrize("name", ["self_attn.o_proj.weight", "mlp.up_proj.weight"])
def test_any_changed_weight_is_refused(copy, read, name: str) -> None:
    edit_weights(copy, lambda x: x[f"model.layers.1.{name}"][-1, -1:].mul_(1.0001))
    with pytest.raises(ValueError, match="are not those that its config"):
        read(copy)


@loader
def test_whole_numbers_are_no_weights(copy, read) -> None:
    edit_config(copy, lambda c: c["quantization_config"].pop("digest"))
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(copy, lambda x: x.update({name: x[name].to(torch.int16)}))
    with pytest.raises(ValueError, match=f"tensor {name} is of dtype I16"):
        read(copy)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_config_of_impossible_numbers_is_refused(copy, value: float) -> None:
    edit_config(copy, lambda c: c["rope_parameters"].update(rope_theta=value))
    with pytest.raises(ValueError, match="rope_theta must be a finite number, not below 0"):
        load(copy)


def test_layers_without_weights_are_counted_before_they_are_made(copy, tmp_path) -> None:
    edit_config(copy, lambda c: c.update(num_hidden_layers=1_000_000))
    tiny("llama-gqa").save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    edit_config(tmp_path / "plain", lambda c: c.update(num_hidden_layers=1_000_000))
    for path in (copy, tmp_path / "plain"):
        with pytest.raises(ValueError, match=r"num_hidden_layers is 1000000, and .* \d\d tensors"):
            load(path)


# -- the spec -------------------------------------------------------------------------------------


def latent(change):
    return lambda cache: change(cache["layers"][0]["latents"][1])


LATENT = r"cache.layers\[0\].latents\[1\]"
EDITS = [
    (lambda c: c.pop("layers"), "cache has no layers"),
    (lambda c: c.update(colour=1), "cache has unknown keys colour"),
    (lambda c: c["layers"].pop(), r"cache.layers must be 2 layers; got 1"),
    (lambda c: c["layers"].append(c["layers"][0]), "cache.layers must be 2 layers; got 3"),
    (lambda c: c.update(layers=7), "cache.layers must be a list; got 7"),
    (lambda c: c["layers"].__setitem__(0, None), r"cache.layers\[0\] must be an object; got None"),
    (lambda c: c["layers"][0].update(keys="shiny"), r"layers\[0\].keys must be one of plain, post"),
    (lambda c: c["layers"][0].update(keys="absorbed"), r"layers\[0\].keys must be one of plain"),
    (lambda c: c["layers"][0].update(keys=["pre"]), r"layers\[0\].keys must be one of plain"),
    (lambda c: c["layers"][0].update(values=2), r"layers\[0\].values must be one of plain, fused"),
    (lambda c: c["layers"][1]["latents"].reverse(), r"layers\[1\].latents must be of keys"),
    (lambda c: c["layers"][1].update(latents=[]), r"layers\[1\].latents must be of keys"),
    (lambda c: c["layers"][1]["latents"].pop(0), r"keys of heads 0..1, each once, in order"),
    (
        latent(lambda x: x.update(rank=32.7)),
        rf"{LATENT}.rank must be an integer in 0..12; got 32.7",
    ),
    (latent(lambda x: x.update(rank=-1)), rf"{LATENT}.rank must be an integer in 0..12; got -1"),
    (latent(lambda x: x.update(rank=13)), rf"{LATENT}.rank must be an integer in 0..12; got 13"),
    (latent(lambda x: x.update(rank="4")), rf"{LATENT}.rank must be an integer in 0..12; got '4'"),
    (latent(lambda x: x.update(rank=True)), rf"{LATENT}.rank must be an integer"),
    (latent(lambda x: x.pop("rank")), rf"{LATENT} has no rank"),
    (latent(lambda x: x.update(side="q")), rf"{LATENT}.side must be one of k, v, kv; got 'q'"),
    (latent(lambda x: x.update(heads=[])), rf"{LATENT}.heads must be a list of at least one head"),
    (latent(lambda x: x.update(heads=[2])), rf"{LATENT}.heads\[0\] must be an integer in 0..1"),
    (latent(lambda x: x.update(heads=[0])), r"each once, in order; got \[0, 0\]"),
    (latent(lambda x: x.update(heads=1)), rf"{LATENT}.heads must be a list; got 1"),
    (latent(lambda x: x.update(tiers=[])), rf"{LATENT}.tiers must be tiers whose numbers add up"),
    (latent(lambda x: x.update(tiers=[[1, 4]])), rf"{LATENT}.tiers must be tiers whose numbers"),
    (latent(lambda x: x.update(tiers=[[1, 4, 2]])), rf"{LATENT}.tiers must be a list of pairs"),
    (latent(lambda x: x.update(tiers=[[0, 4]])), rf"{LATENT}.tiers\[0\]\[0\] must be an integer"),
    (
        latent(lambda x: x.update(tiers=[[x["rank"], 5]])),
        rf"{LATENT}.tiers\[0\]\[1\] must be one of 1, 2, 3, 4, 6, 8, 16; got 5",
    ),
    (
        lambda c: [x.update(rank=0) for x in c["layers"][0]["latents"]],
        r"layers\[0\].latents must store at least one number",
    ),
    (
        lambda c: c["layers"][0].update(keys="plain"),
        r"layers\[0\].latents must have keys of one head and rank 12, being plain",
    ),
    (lambda c: c["geometry"].update(head_dim=-4), "cache.geometry.head_dim must be an integer of"),
    (lambda c: c["geometry"].update(rope=1), "cache.geometry.rope must be one of True, False"),
    (lambda c: c["geometry"].update(scaling="x"), "cache.geometry.scaling must be a number above"),
    (lambda c: c["geometry"].update(softcap=0), "cache.geometry.softcap must be a number above 0"),
    (lambda c: c["geometry"].pop("rope"), "cache.geometry has no rope"),
    (lambda c: c["geometry"].update(num_kv_heads=3), "num_query_heads must be a multiple of"),
]


@pytest.mark.parametrize(("change", "message"), EDITS, ids=range(len(EDITS)))
def test_an_edited_spec_is_refused_by_its_field(copy, change, message) -> None:
    edit_config(copy, lambda c: change(c["quantization_config"]["cache"]))
    with pytest.raises(ValueError, match=message):
        load(copy)


@pytest.mark.parametrize("name", ["cache", "provenance"])
def test_sections_are_objects(copy, name: str) -> None:
    edit_config(copy, lambda c: c["quantization_config"].update({name: [1]}))
    with pytest.raises(ValueError, match=rf"{name} in the kvfold section .* object; got \[1\]"):
        load(copy)


@loader
def test_an_edit_that_fits_the_weights_is_refused(copy, read) -> None:
    def plan(cache) -> None:
        for x in cache["layers"][0]["latents"]:
            x["tiers"] = [[x["rank"], 4]] if x["rank"] else []

    edit_config(copy, lambda c: plan(c["quantization_config"]["cache"]))
    with pytest.raises(ValueError, match="are not those that its config"):
        read(copy)


# -- the README -----------------------------------------------------------------------------------


def test_the_readme_says_what_was_done_and_how_to_load_it(made) -> None:
    text, spec = (made / "README.md").read_text(), spec_of(load(made))
    assert "from `llama-gqa` with the recipe `lean`" in text
    assert "\nBase model: `llama-gqa`" in text
    assert f"192 -> {spec.bytes_per_token()} bytes per token" in text
    assert f"{spec.kept_fraction:.4f} of the numbers kept" in text
    assert "kvfold.load(" in text and "kvfold.LLM(" in text and "planned" not in text


def test_the_readme_says_what_was_planned_and_measured(tmp_path) -> None:
    model = tiny("llama-gqa")
    found = prepared(model, "small")
    learnt = {"steps": 3, "before": 0.25, "after": 0.125}
    known = {"model": "m", "ratio": 1.0081, "budget": "ppl<=1.01", "recovery": learnt}
    found.fold(found.plan_factor(6), known)
    save(model, None, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "bytes per token with the planned bits" in text and "with the planned bits\n" in text
    assert "perplexity ratio 1.0081 on held-out text, ppl<=1.01 allowed" in text
    assert "recovered in 3 steps: 0.2500 to 0.1250 nats" in text


SAME_SHAPES = [("kvquant", 1.0), ("zack", 1.0), ("fast", 1.0)]  # as of the original's weights


@pytest.mark.parametrize(("recipe", "keep"), SAME_SHAPES)
def test_without_kvfold_transformers_refuses_a_checkpoint_of_any_recipe(
    tmp_path, recipe: str, keep: float
) -> None:
    model = tiny("llama-gqa")
    compressor = Compressor(model, kvfold.recipes.get(recipe))
    topics = torch.arange(6) // 3
    statistics = calibrate(model, compressor.family, tokens(6, 64), compressor.needs, topics=topics)
    kvfold.compress(model, recipe, statistics=statistics, keep=keep, align=1, fold=True)
    save(model, None, tmp_path / "folded")
    load(tmp_path / "folded")
    path = str(tmp_path / "folded")
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({path!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode and "ignore_mismatched_sizes" in ended.stderr


def test_the_readme_tells_what_transformers_says_without_kvfold(made) -> None:
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(made)!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    text = " ".join((made / "README.md").read_text().split())
    for said in ("Unknown quantization type, got kvfold", "UNEXPECTED", "MISSING"):
        assert said in ended.stderr and said in text
    assert "You set `ignore_mismatched_sizes` to `False`" in ended.stderr and ended.returncode
    assert "You set ignore_mismatched_sizes to False" in text
