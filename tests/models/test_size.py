"""Bytes of weights are those of the modules that transformers and kvfold build."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold import recipes
from kvfold.bench.synthetic_engine import config_of
from kvfold.cli.main import main
from kvfold.compression.planning.default import even_spec
from kvfold.layout import CacheSpec, plain_layer
from kvfold.layout.pages import plain_spec
from kvfold.models import size
from kvfold.models.families import family_of
from models import CONFIGS


def folded_model(config: Any, spec: CacheSpec) -> Any:
    """A model without numbers in which every compressed layer is folded."""
    family = family_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))
        for index, layer in enumerate(spec.layers):
            if layer.keys != "plain":
                family.swap(model, spec, index)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_of_the_model(name: str, tied: bool) -> None:
    """Of an original model, and of layers that store different things."""
    config = CONFIGS[name]()
    config.num_hidden_layers, config.tie_word_embeddings = 4, tied
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [*config.layer_types, *config.layer_types]
    geometry = family_of(config).geometry(config)
    layers = [
        even_spec(recipes.get(recipe), geometry, keep).layers[0]
        for recipe, keep in (("swift", 0.5), ("small", 0.25))
    ]
    mixed = CacheSpec(geometry=geometry, layers=(layers[0], plain_layer(geometry), *layers))
    for spec in (plain_spec(geometry), mixed):
        model = folded_model(config, spec)
        assert size.weight_bytes(config, spec) == 2 * model.num_parameters()
        read = model.num_parameters(exclude_embeddings=not tied)
        assert size.step_bytes(config, spec) == 2 * read


def test_a_changed_config_has_other_bytes() -> None:
    config = config_of("tiny")
    spec = plain_spec(family_of(config).geometry(config))
    before = size.weight_bytes(config, spec)
    config.vocab_size += 1
    added = 2 * 2 * config.hidden_size  # the embedding and the output layer
    assert size.weight_bytes(config, spec) == before + added
    assert config.dtype is None  # stays as it was


def test_one_answer_builds_the_model_once(monkeypatch, capsys) -> None:
    """`kvfold advise` needs the bytes of ten settings."""
    built = []
    original = AutoModelForCausalLM.from_config
    monkeypatch.setattr(
        size.AutoModelForCausalLM,
        "from_config",
        lambda config, **options: built.append(config) or original(config, **options),
    )
    size._original.cache_clear()
    assert main(["advise", "random:tiny"]) == 0
    assert len(built) == 1 and "small 8x" in capsys.readouterr().out
