"""Bytes of a model's weights, from its config and what it stores."""

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvfold.layout import CacheSpec
from kvfold.models.families import family_of

DTYPE = torch.bfloat16  # what a GPU serves models in


def step_bytes(config: Any, spec: CacheSpec) -> int:
    """Weight bytes in DTYPE that one decode step reads: all but the embeddings, unless the output
    layer shares them. Allocates nothing."""
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return _bytes(config, spec, exclude_embeddings=not tied)


def weight_bytes(config: Any, spec: CacheSpec) -> int:
    """Bytes of all weights in DTYPE. Allocates nothing."""
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
