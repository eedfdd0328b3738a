"""Bytes of a model's weights, from its config and what it stores."""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvfold.layout import CacheSpec, LayerSpec
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


@dataclass(frozen=True, kw_only=True)
class _Original:
    """Numbers in the weights of an original model: of all, of all but the embeddings, and of each
    layer's attention."""

    all: int
    without_embeddings: int
    attentions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Key:
    """A config as the key of a cache: configs have no hash, and may change. text: its JSON."""

    text: str
    config: Any = field(compare=False)


def _bytes(config: Any, spec: CacheSpec, *, exclude_embeddings: bool) -> int:
    original = _original(_Key(text=config.to_json_string(use_diff=False), config=config))
    numbers = original.without_embeddings if exclude_embeddings else original.all
    folded: dict[LayerSpec, int] = {}  # layers that store alike have equally many numbers
    for index, layer in enumerate(spec.layers):
        if layer.keys == "plain":
            continue
        if layer not in folded:
            folded[layer] = _folded_numbers(config, spec, index)
        numbers += folded[layer] - original.attentions[index]
    return DTYPE.itemsize * numbers


@lru_cache(maxsize=8)  # callers ask for many specs of one config, and a model takes 0.1 s
def _original(key: _Key) -> _Original:
    family, config = family_of(key.config), deepcopy(key.config)  # `from_config` sets its dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    return _Original(
        all=model.num_parameters(),
        without_embeddings=model.num_parameters(exclude_embeddings=True),
        attentions=tuple(map(_num_parameters, family.attentions(model))),
    )


def _folded_numbers(config: Any, spec: CacheSpec, index: int) -> int:
    """Numbers in the weights of the folded attention of a layer."""
    folded = family_of(config).folded[config.model_type]
    with torch.device("meta"):
        return _num_parameters(folded(config, spec.geometry, spec.layers[index], index))


def _num_parameters(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())
