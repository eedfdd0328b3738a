"""Maps at full rank: models of many types answer as before, with no code for a family.

Shapes: B prompts, T tokens.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.maps.attach import attach_maps
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import (
    attention_layers,
    check_layers,
    eager_attention,
    using_attention,
)
from kvfold.models.fold import LatentMaps
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import cache_argument
from maps_cases import CHUNKS, EXPANDED, NEAR, apart, in_chunks, random_maps
from model_types import REFUSED, TYPES, tiny


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 127, (2, sum(CHUNKS)))


@pytest.mark.parametrize("name", [x for x in TYPES if x not in EXPANDED])
@torch.no_grad()
def test_at_full_rank_a_model_answers_as_before(name: str, ids: torch.Tensor) -> None:
    model = tiny(name)
    whole, chunked = model(ids, use_cache=False).logits, in_chunks(model, ids)
    layers = attention_layers(model)
    check_layers(model, layers)
    maps = {layer.name: random_maps(layer) for layer in layers if layer.source == layer.name}
    detach = attach_maps(model, layers, maps)
    assert apart(model(ids, use_cache=False).logits, whole) < NEAR
    assert apart(in_chunks(model, ids), chunked) < NEAR
    detach()
    assert torch.equal(model(ids, use_cache=False).logits, whole)
    wrong = {x: replace(own, key_up=own.key_up.flip(-1)) for x, own in maps.items()}
    attach_maps(model, layers, wrong)
    assert apart(model(ids, use_cache=False).logits, whole) > 0.01


@pytest.mark.parametrize("name", [x for x in (*EXPANDED, *REFUSED) if x in {**TYPES, **REFUSED}])
def test_attention_without_the_interface_is_refused_by_name(name: str) -> None:
    model = tiny(name)
    with pytest.raises(SettingError, match=f"of model type '{name}'"):
        check_layers(model, attention_layers(model))


KINDS = ("llama", "qwen3", "phi3", "gemma2", "gpt_oss", "gemma3n_text", "glm", "mimo_v2_flash")
KINDS += ("qwen3_next", "falcon_h1", "qwen2_vl", "gpt2", "olmo2")


@pytest.mark.parametrize("name", [x for x in KINDS if x in TYPES])
@torch.no_grad()
def test_at_half_rank_keys_and_values_are_projected(name: str, ids: torch.Tensor) -> None:
    """As where the whole is stored and attention projects it: another way to the same numbers."""
    model = tiny(name)
    layers = attention_layers(model)
    maps = {x.name: random_maps(x, 0.5) for x in layers if x.source == x.name}
    bound = {x.module: maps[x.source].to(torch.float32) for x in layers}

    def projected(base, module, q, k, v, attention_mask=None, **more):
        own = bound[module]
        k = own.keys(k) @ own.key_up.mT
        values = own.per_head(own.values(v)) @ own.value_ups.mT
        values = values + own.value_mean[:, None]
        inner = eager_attention(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
        return inner(module, q, k, values, attention_mask, **more)

    def registered(base: str) -> str:
        ALL_ATTENTION_FUNCTIONS.register(f"projected_{base}", partial(projected, base))
        mask = ALL_MASK_ATTENTION_FUNCTIONS[base]
        ALL_MASK_ATTENTION_FUNCTIONS.register(f"projected_{base}", mask)
        return f"projected_{base}"

    whole = model(ids, use_cache=False).logits
    with using_attention(model, registered):
        wanted = in_chunks(model, ids)
    assert apart(wanted, whole) > 0.01
    attach_maps(model, layers, maps)
    assert apart(in_chunks(model, ids), wanted) < NEAR
    assert apart(model(ids, use_cache=False).logits, wanted) < NEAR


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "gpt2"])
@torch.no_grad()
def test_left_padding_changes_nothing(name: str, ids: torch.Tensor) -> None:
    model = tiny(name)
    seen = torch.ones_like(ids)
    seen[0, :6] = 0
    wanted = in_chunks(model, ids, attention_mask=seen)
    layers = attention_layers(model)
    attach_maps(model, layers, {layer.name: random_maps(layer) for layer in layers})
    found = in_chunks(model, ids, attention_mask=seen)
    assert apart(found[0, 6:], wanted[0, 6:]) < NEAR
    assert apart(found[1], wanted[1]) < NEAR


@torch.no_grad()
def test_a_cache_holds_what_maps_leave(ids: torch.Tensor) -> None:
    model = tiny("llama")
    layers = attention_layers(model)
    attach_maps(model, layers, {layer.name: random_maps(layer, 0.5) for layer in layers})
    cache = DynamicCache(config=model.config)
    model(ids, **cache_argument(cache), use_cache=True)
    heads, d = layers[0].num_kv_heads, layers[0].head_dim
    assert cache.layers[0].keys.shape == (2, heads, sum(CHUNKS), d // 2)
    assert cache.layers[0].values.shape == (2, 1, sum(CHUNKS), heads * d // 2)


@pytest.mark.parametrize("key_rank", [0, 8])
@pytest.mark.parametrize("value_rank", [0, 8])
def test_stored_numbers_are_told_from_the_model_s_by_their_shape(key_rank, value_rank) -> None:
    """Zeros behind keys of rank 0 once gave them the width of a head again."""
    eye, mean = torch.eye(8), torch.zeros(8)
    key, value = (LatentMaps(eye[:, :r], eye[:, :r], mean) for r in (key_rank, value_rank))
    maps = Maps.of([key], [value]).with_stored_shape()
    k, v = torch.randn(2, 1, 1, 5, 8)
    assert not maps.are_stored(k, v)
    stored_k, stored_v = maps.keys(k), maps.values(v)
    assert maps.are_stored(stored_k, stored_v)
    assert min(stored_k.shape[3], stored_v.shape[3]) > 0
    q, stored_k, stored_v = maps.attended(k, stored_k, stored_v)
    scores = k @ k.mT if key_rank else torch.zeros(5, 5)
    assert torch.allclose(q @ stored_k.mT, scores.expand(1, 1, 5, 5), atol=1e-5)
    assert torch.allclose(
        maps.outputs(stored_v.transpose(1, 2)), v.transpose(1, 2) * bool(value_rank)
    )
