"""The recipe where none is named: one that kernels serve, chosen by shapes alone."""

import pytest
import torch
import transformers as hf

import kvfold
from kvfold.artifact import provenance_of
from kvfold.compression.default import PREFERENCE, chosen, widest_spec
from kvfold.compression.target import Target
from kvfold.config import DEFAULT_KEEP
from kvfold.loading import load_config
from kvfold.models.kernels import kernels_of
from models import CONFIGS, llama_8b, tiny
from test_tiers import statistics_of

LLAMA_8B = llama_8b()
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM2 = hf.LlamaConfig(hidden_size=576, num_hidden_layers=30, **HEADS)


@pytest.mark.parametrize(
    ("size", "name", "why"),
    [
        ({}, "lean", "at this size; not small"),
        ({"keep": 0.125}, "small", "with fast kernels on a GPU at this size"),
        ({"budget": "ppl<=1.01"}, "lean", "not small"),  # any size may come of it
        ({"factor": 8}, "lean", "not small"),
        ({"bytes_per_token": 9000}, "lean", "not small"),
    ],
)
def test_wide_latents_give_way_to_those_that_kernels_read_fast(size, name, why) -> None:
    recipe, said = chosen(None, LLAMA_8B, Target(**size))
    assert recipe == kvfold.recipes.get(name) and said is not None and why in said


@pytest.mark.parametrize("size", [{}, {"keep": 1.0}, {"budget": "ppl<=1.01"}])
@pytest.mark.parametrize("config", [SMOLLM2, load_config("reference:gqa")])
def test_narrow_ones_stay_small(config, size) -> None:
    assert chosen(None, config, Target(**size))[0].name == "small"


def test_without_kernels_it_is_the_best_and_says_so() -> None:
    recipe, why = chosen(None, CONFIGS["gemma2"](), Target())
    assert recipe.name == PREFERENCE[0] == "small" and "none has fast kernels" in str(why)
    assert chosen(None, CONFIGS["opt"](), Target())[0].name == "lean"  # no keys beside values


def test_planned_sizes_are_asked_about_in_tiers_of_every_level() -> None:
    def tiers(**size):
        (keys, *_, values) = widest_spec(recipe, LLAMA_8B, Target(**size)).layers[0].latents
        return keys.tiers, values.tiers

    recipe = kvfold.recipes.get("lean")
    assert tiers(factor=4) == (((40, 8), (40, 4), (32, 2)), ((336, 8), (320, 4), (320, 2)))
    assert tiers(bytes_per_token=9000, levels=(4,)) == (((128, 4),), ((1024, 4),))
    assert tiers(keep=0.5) == (None, None)


def test_a_named_recipe_is_taken() -> None:
    mine = kvfold.recipes.get("zack")
    assert chosen("zack", LLAMA_8B, Target()) == chosen(mine, LLAMA_8B, Target()) == (mine, None)
    with pytest.raises(ValueError, match="unknown recipe 'big'; recipes: zack"):
        chosen("big", LLAMA_8B, Target())


@pytest.mark.parametrize("name", ["llama-gqa", "opt"])
def test_compress_records_the_choice_which_has_kernels(name: str) -> None:
    model = tiny(name)
    recipe, why = chosen(None, model.config, Target())
    statistics = statistics_of(model, recipe.name)
    kvfold.compress(model, statistics=statistics)
    made = provenance_of(model)
    assert made["chosen"] == why and made["recipe"]["name"] == recipe.name
    assert made["keep"] == DEFAULT_KEEP
    spec = model.config.quantization_config.spec
    assert kernels_of(model.config, spec, torch.bfloat16).complete
