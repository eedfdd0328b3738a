"""The recipe and the size where none is given, chosen by a model's config alone."""

import pytest
import torch
import transformers as hf

import kvfold
from kvfold.compression.planning import default
from kvfold.compression.planning.default import FACTOR, choose_recipe, even_spec, speed_spec
from kvfold.compression.planning.step_time import load_of, predict
from kvfold.compression.planning.target import Target
from kvfold.config import DEFAULT_KEEP, LEVELS, Ratios
from kvfold.hub.checkpoint import provenance_of
from kvfold.layout.pages import plain_spec
from kvfold.models.families import family_of
from kvfold.models.kernels import fastest_layout, kernels_of
from matrix import matrix
from models import CONFIGS, llama_8b, tiny
from tiers_cases import statistics_of

pytest.importorskip("triton", reason="what a GPU reads in one pass is told by kernels")

LLAMA_8B = llama_8b()
QWEN_1_5B = hf.Qwen2Config(
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
)
MANY_HEADS = llama_8b(num_key_value_heads=32)


@pytest.mark.parametrize("config", [LLAMA_8B, QWEN_1_5B])
@pytest.mark.parametrize("size", [{}, {"factor": 6}, {"bytes_per_token": 2000}])
def test_bits_are_planned_for_what_a_gpu_reads_in_one_pass(config, size) -> None:
    recipe, target, why = choose_recipe(None, config, Target(**size))
    assert recipe.name == "swift" and target.prefer == "speed" and target.levels == LEVELS
    assert target.factor == size.get("factor", None if size else FACTOR)
    assert target.keep is None and "in one pass: planned for speed" in str(why)


@pytest.mark.parametrize("name", [*CONFIGS, "many heads"])
def test_where_no_gpu_does_they_are_balanced_and_it_says_why(name: str) -> None:
    config = MANY_HEADS if name == "many heads" else CONFIGS[name]()
    recipe, target, why = choose_recipe(None, config, Target())
    assert (recipe.name, target.factor, target.prefer) == ("swift", FACTOR, "balanced")
    assert "no kernel reads it in one pass: " in str(why)
    if name == "many heads":
        assert "32 KV heads of 1 query heads each" in str(why)
        assert kernels_of(
            config, even_spec(recipe, family_of(config).geometry(config), 0.5)
        ).complete


@pytest.mark.parametrize("given", [{"prefer": "size"}, {"prefer": "balanced"}, {"levels": (8, 4)}])
def test_what_is_asked_of_a_plan_stays(given) -> None:
    recipe, target, why = choose_recipe(None, LLAMA_8B, Target(**given))
    assert recipe.name == "swift" and target.factor == FACTOR
    assert target.prefer == given.get("prefer", "balanced") and "one pass" not in str(why)
    assert target.levels == given.get("levels", target.levels)


@pytest.mark.parametrize(
    ("config", "size"),
    matrix(
        [LLAMA_8B, QWEN_1_5B, MANY_HEADS],
        [{"keep": 0.5}, {"budget": "ppl<=1.01"}, {"keep": 0.125}],
    ),
)
def test_without_bits_it_loses_least_of_what_is_no_slower(config, size) -> None:
    recipe, target, why = choose_recipe(None, config, Target(**size))
    geometry, load = family_of(config).geometry(config), load_of(config)
    names = [*default.REBUILT, default.SERVED]
    whole = predict(config, plain_spec(geometry), load)
    steps = [
        predict(config, even_spec(kvfold.recipes.get(x), geometry, target.keep or 0.5), load)
        for x in names
    ]
    at = names.index(recipe.name)
    assert whole is not None and steps[at] is not None and steps[at].ms <= whole.ms
    assert all(x is not None and x.ms > whole.ms for x in steps[:at])
    assert all(f"{x} (" in str(why) for x in names[:at])
    assert (target.keep, target.budget) == (size.get("keep"), size.get("budget"))


def test_which_these_are() -> None:
    def name(config, keep):
        return choose_recipe(None, config, Target(keep=keep))[0].name

    assert [name(LLAMA_8B, x) for x in (0.5, 0.125)] == ["lean", "small"]
    assert [name(QWEN_1_5B, x) for x in (0.5, 0.25)] == ["lean", "small"]
    assert name(MANY_HEADS, 0.5) == "swift"
    _, _, why = choose_recipe(None, CONFIGS["gemma2"](), Target(keep=0.5))
    assert "reconstructs no keys; not small (has no kernels), lean (has no kernels)" in str(why)


def test_two_widths_are_of_their_own_recipe() -> None:
    assert choose_recipe(None, LLAMA_8B, Target(hybrid=Ratios()))[0].name == "zdc"


def test_a_named_recipe_is_taken_and_gets_its_size() -> None:
    mine = kvfold.recipes.get("zack")
    by_name, by_recipe = (choose_recipe(x, LLAMA_8B, Target()) for x in ("zack", mine))
    assert by_name == by_recipe == (mine, Target(keep=DEFAULT_KEEP, prefer="balanced"), None)
    _, ours, _ = choose_recipe("lean", LLAMA_8B, Target())
    assert ours == Target(factor=FACTOR, prefer="balanced")
    with pytest.raises(ValueError, match="unknown recipe 'big'; recipes: swift"):
        choose_recipe("big", LLAMA_8B, Target())
    with pytest.raises(ValueError, match="levels are the bits of planned numbers"):
        choose_recipe("zack", LLAMA_8B, Target(levels=(8,)))


def test_what_is_asked_about_is_what_one_pass_reads_at_most() -> None:
    spec = speed_spec(kvfold.recipes.get("swift"), family_of(LLAMA_8B).geometry(LLAMA_8B))
    *keys, values = spec.layers[0].latents
    assert {x.tiers for x in keys} == {((128, 4),)} and values.tiers == ((736, 4),)
    assert fastest_layout(LLAMA_8B, spec) is not None


@pytest.mark.parametrize("name", ["llama-gqa", "opt"])
def test_compress_records_the_choice_which_has_kernels(name: str) -> None:
    model = tiny(name)
    recipe, _, why = choose_recipe(None, model.config, Target())
    statistics = statistics_of(model, recipe.name)
    kvfold.compress(model, statistics=statistics, fold=True)
    made = provenance_of(model)
    assert made["chosen"] == why and made["recipe"]["name"] == recipe.name == "swift"
    assert made["factor"] == FACTOR and made["prefer"] == "balanced" and made["keep"] is None
    spec = model.config.quantization_config.spec
    assert kernels_of(model.config, spec, torch.bfloat16).complete
