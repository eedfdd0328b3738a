"""What tests of maps users share with others."""

from typing import Any

import torch

from kvfold.maps.layers import attention_layers
from kvfold.maps.sidecar import Sidecar, probes_of
from maps_cases import random_maps

NO_SPEC: Any = None  # maps alone decide


def full_rank(model, keep: float = 1.0) -> Sidecar:
    layers = attention_layers(model)
    maps = {layer.name: random_maps(layer, keep) for layer in layers}
    return Sidecar(maps=maps, spec=NO_SPEC, base=probes_of(layers), provenance={})


def generated(model, ids: torch.Tensor, **settings) -> torch.Tensor:
    torch.manual_seed(0)
    tokens = {"min_new_tokens": 12, "max_new_tokens": 12}
    settings = {"do_sample": False, "pad_token_id": 0, **tokens, **settings}
    return model.generate(ids, **settings)


def logits(model, ids: torch.Tensor, **more) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **more).logits


GENERATE = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "static": {"cache_implementation": "static"},
    "static, prompt in chunks": {"cache_implementation": "static", "prefill_chunk_size": 8},
    "without a cache": {"use_cache": False},
}
