"""Biases of keys and values leave the cache before it is quantised, and change nothing else."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from kvfold.layout.pages import plain_spec
from kvfold.maps.plain import measured_means
from kvfold.models.copies import shared_copy
from kvfold.models.families import family_of
from kvfold.models.fold import fold_plain
from kvfold.models.rotate import with_full_rank_latents
from models import ROTARY, tiny, tokens

BIASED = ["qwen2", "llama3-scaling", "opt", "gpt-neox"]


def folded(model):
    """A copy that stores rotated keys and values, in floating point."""
    spec = with_full_rank_latents(plain_spec(family_of(model.config).geometry(model.config)))
    copy = shared_copy(model)
    fold_plain(copy, spec, measured_means(model))
    return copy


@pytest.mark.parametrize("name", BIASED)
def test_attention_is_the_same_without_them(name: str) -> None:
    model = tiny(name, dtype=torch.float64)
    ids = tokens(2, 40)
    torch.testing.assert_close(folded(model)(ids).logits, model(ids).logits, rtol=1e-9, atol=1e-9)


def test_a_bias_of_hundreds_is_not_stored() -> None:
    """In pairs that hardly rotate, as Qwen2.5 has them, and in values."""
    slow = {"rope_type": "default", "rope_theta": 1e9}
    config = Qwen2Config(**ROTARY, rope_parameters=slow)
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    )
    attention = model.model.layers[0].self_attn
    last = attention.head_dim // 2 - 1  # turns least
    with torch.no_grad():
        attention.k_proj.bias.unflatten(0, (2, -1))[:, last] = 400.0
        attention.v_proj.bias.fill_(400.0)
    copy, ids = folded(model), tokens(1, 40)
    seen = []
    layer = copy.model.layers[0].self_attn
    project = layer.project
    layer.project = lambda x, tables: seen.append(project(x, tables)) or seen[-1]
    torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=1e-8, atol=1e-8)
    norms = seen[0][1].unflatten(-1, (4, -1)).norm(dim=-1)  # of two keys and two values
    assert float(norms.max()) < 40  # a bias alone has 400 and more
