"""Under vLLM: what is done about logits that are not finite, and the trial before it serves."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvfold.layout.pages import cache_layout, plain_spec
from kvfold.models.families import family_of
from kvfold.models.fold import fold_plain
from kvfold.vllm_plugin.blocks import BlockAttention, BlockView
from kvfold.vllm_plugin.guard import LogitsGuard, end_tokens
from kvfold.vllm_plugin.trial import check_attention
from models import tiny
from steps import broken


def test_vllm_ends_requests_whose_logits_are_not_finite(caplog) -> None:
    guard, fine = LogitsGuard([3, 5]), torch.randn(3, 8)
    fine[0, 7] = -torch.inf
    assert torch.equal(guard(fine.clone()), fine) and not caplog.records
    bad = fine.clone()
    bad[1, 2], bad[2] = torch.nan, -torch.inf
    with caplog.at_level(logging.ERROR, "vllm.kvfold"):
        found = guard(bad)
        assert torch.equal(found[0], fine[0])
        assert found[1:].argmax(-1).tolist() == [3, 3]
        assert found[1:].softmax(-1)[:, [3, 5]].tolist() == [[0.5, 0.5]] * 2
        assert "not finite for 2 token(s)" in caplog.text
        for _ in range(7):  # 3 .. 9 in all
            guard(torch.full((1, 8), torch.nan))
    assert [x.args[0] for x in caplog.records] == [2, 4, 8]


def test_vllm_leaves_logits_of_a_model_without_end_tokens() -> None:
    assert LogitsGuard([])(torch.full((1, 8), torch.nan)).isnan().all()


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [({"eos_token_id": [2, 7]}, 3, [2, 7]), ({"eos_token_id": 2}, 3, [2]), ({}, 3, [3])],
)
def test_vllm_ends_requests_by_the_models_end_tokens(generation, config, want, monkeypatch) -> None:
    model_config = SimpleNamespace(
        try_get_generation_config=lambda: generation, hf_config=SimpleNamespace(eos_token_id=config)
    )
    assert end_tokens(model_config) == want
    monkeypatch.setenv("VLLM_RAISE_ON_LOGIT_NANS", "1")
    assert end_tokens(model_config) == []


def sampled(layer, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, len(positions), layer.geometry.hidden_size)
    rotary, stop = layer.rotary, int(positions.max()) + 1
    q, rows = layer.project(x, rotary and rotary.tables(x, positions[None], stop))
    return q[0].detach(), rows[0].detach()


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "opt"])
def test_vllm_tries_every_layers_attention_first(name: str, monkeypatch) -> None:
    monkeypatch.setenv("KVFOLD_BACKEND", "reference")
    model = tiny(name)
    family = family_of(model.config)
    spec = plain_spec(family.geometry(model.config))
    fold_plain(model, spec)
    layers = [
        SimpleNamespace(
            maps=x.description, project_output=x.o_proj, sample_inputs=partial(sampled, x)
        )
        for x in family.attentions(model)
    ]
    layout = cache_layout(spec, page=16, itemsize=4)
    view = BlockView(layout, torch.float32, torch.device("cpu"), 256)
    attention = BlockAttention([x.maps for x in layers], view)
    check_attention(attention, layers)
    assert not attention.locations
    broken(monkeypatch, layer=1, rows=27)
    with pytest.raises(ValueError, match=r"attention of layer 1 gives numbers .* float32 on cpu"):
        check_attention(attention, layers)
