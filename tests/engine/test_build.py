"""Constructors of an engine leave the model as it was, whether they fail or not."""

from typing import Any

import pytest
import torch

from kvfold import LLM, SamplingParams, recipes
from kvfold.cache.eviction import policies
from kvfold.compression.planning.default import even_spec
from kvfold.config import CacheConfig
from kvfold.engine.runner import build
from kvfold.models.families import family_of
from llm_cases import compressed
from models import llama_8b, tiny, tokens

SETTINGS = {"max_sequences": 2, "max_tokens": 96, "page": 8, "kv_bytes": 2**20}
COMPRESSED = "llama-gqa, compressed"


def model_of(name: str) -> Any:
    if name != COMPRESSED:
        return tiny(name)
    return compressed("llama-gqa", "fast", keep=0.5)


def state(model: Any) -> tuple[Any, ...]:
    """All that an engine could change: modules and what stands in them, tensors, flags, config."""
    modules = [(name, type(x), id(x), x.training) for name, x in model.named_modules()]
    inside = [{"forward", "pieces"} & vars(x).keys() for x in model.modules()]
    tensors = [(name, id(x), x.requires_grad) for name, x in model.named_parameters()]
    config = model.config.to_dict(), model.config._attn_implementation
    return modules, inside, tensors, config


FAILING = [
    ("llama-gqa", {"kv_bytes": 100}, "kv_bytes must be at least"),
    ("llama-gqa", {"kv_bytes": 100, "bits": 4}, "kv_bytes must be at least"),
    ("llama-gqa", {"evict": "h2o", "keep_tokens": 1.5}, "keep_tokens must be in"),
    ("opt", {"page": 0}, "page must be at least 1 row"),
    ("opt", {"bits": 4, "chunk": 0}, "chunk must be at least 1"),
    ("mistral-sliding", {"format": "kivi", "bits": 4}, "sliding window"),
    (COMPRESSED, {"kv_bytes": 100, "bits": 4}, "kv_bytes must be at least"),
    (COMPRESSED, {"bits": 4, "chunk": 0}, "chunk must be at least 1"),
]


@pytest.mark.parametrize(("name", "settings", "message"), FAILING)
def test_a_constructor_that_fails_leaves_the_model(name: str, settings, message: str) -> None:
    model = model_of(name)
    before, weights = state(model), {k: x.clone() for k, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        LLM(model, **{**SETTINGS, **settings})
    assert state(model) == before
    assert all(torch.equal(x, weights[k]) for k, x in model.state_dict().items())


@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"evict": "snapkv", "keep_tokens": 0.5}])
@pytest.mark.parametrize("name", ["llama-gqa", "opt", COMPRESSED])
def test_an_llm_leaves_the_model(name: str, settings) -> None:
    model, ids = model_of(name), tokens(1, 40)
    before, weights = state(model), {k: x.clone() for k, x in model.state_dict().items()}
    wanted = model(ids).logits
    llm = LLM(model, **SETTINGS, **settings)
    llm.generate(ids[0].tolist(), SamplingParams(max_new_tokens=4))
    assert state(model) == before
    assert all(torch.equal(x, weights[k]) for k, x in model.state_dict().items())
    assert torch.equal(model(ids).logits, wanted)


def test_a_model_that_is_given_away_is_not_copied() -> None:
    model = tiny("llama-gqa")
    assert LLM(model, **SETTINGS).model is not model
    assert LLM(model, owned=True, **SETTINGS).model is model


def test_what_is_not_turned_is_shared() -> None:
    """A compressed model's maps alone are copied, and those only where bits turn them."""
    model = model_of(COMPRESSED)
    mine = {id(x): name for name, x in model.named_parameters()}
    whole, turned = (LLM(model, **SETTINGS, bits=bits).model for bits in (None, 4))
    assert all(id(x) in mine for x in whole.parameters())
    own = {name for name, x in turned.named_parameters() if id(x) not in mine}
    assert own and all("self_attn" in name for name in own)
    assert not any(name.endswith("o_proj.bias") for name in own)


@pytest.mark.parametrize(
    ("device", "settings", "policy", "page"),
    [
        ("cuda", {}, None, 64),
        ("cpu", {}, None, 32),
        ("cuda", {"page": 16}, None, 16),
        ("cuda", {"bits": 3}, None, 32),  # which one pass does not read
        ("cuda", {"residual": 32}, None, 32),
        ("cuda", {}, "snapkv", 32),
    ],
)
def test_pages_are_those_of_one_pass_on_a_gpu(
    device: str, settings: dict[str, Any], policy: str | None, page: int
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    config = llama_8b(num_hidden_layers=2)
    spec = even_spec(recipes.get("swift"), family_of(config).geometry(config), 0.75, (8, 4))
    found = policy and policies.get(policy)
    layout = build.layout_of(config, spec, CacheConfig(**settings), found, 2, device)
    assert layout.page == page
