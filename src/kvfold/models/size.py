"""Bytes of weights, by a model's config and what it stores."""

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvfold.layout import CacheSpec
from kvfold.models.families import family_of

DTYPE = torch.bfloat16  # what a GPU serves models in


def step_bytes(config: Any, spec: CacheSpec) -> int:
    """Of a model that stores what `spec` says, in DTYPE: all weights but embeddings, of which a
    step looks up a few rows, unless the last layer shares them. Allocates nothing."""
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return _bytes(config, spec, exclude_embeddings=not tied)


def weight_bytes(config: Any, spec: CacheSpec) -> int:
    """Of all weights of such a model. Allocates nothing."""
    return _bytes(config, spec, exclude_embeddings=False)


def _bytes(config: Any, spec: CacheSpec, *, exclude_embeddings: bool) -> int:
    family = family_of(config)
    config = deepcopy(config)  # `from_config` leaves DTYPE in it
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        for index, layer in enumerate(spec.layers):
            if layer.keys != "plain":
                family.swap(model, spec, index)
    return DTYPE.itemsize * int(model.num_parameters(exclude_embeddings=exclude_embeddings))
