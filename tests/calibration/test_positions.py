"""Windows moved along a model's positions: what attention sees, and what stays in place."""

import pytest
import torch

from kvfold.calibration.calibrate import calibrate
from kvfold.calibration.positions import Shift, shifting
from kvfold.models.families import family_of
from models import tiny, tokens


def tables(model, length: int = 6) -> torch.Tensor:
    x = torch.empty(0)
    return model.model.rotary_emb(x, torch.arange(length)[None])[0][0]


def test_all_tokens_but_the_first_stand_further_on() -> None:
    model = tiny("llama-gqa")
    far = tables(model, 64)
    with shifting(family_of(model.config), model, model) as shift:
        shift.by = 40
        assert torch.equal(tables(model), torch.cat((far[:1], far[41:46])))
    assert torch.equal(tables(model), far[:6])


def test_hooks_go_when_something_fails() -> None:
    model = tiny("llama-gqa")
    with pytest.raises(KeyError), shifting(family_of(model.config), model) as shift:
        shift.by = 3
        raise KeyError
    assert not model.model.rotary_emb._forward_pre_hooks


def test_ends_are_log_uniform_up_to_the_limit() -> None:
    shift = Shift(8000)
    assert shift.by == 0
    ends = []
    for _ in range(400):
        shift.draw(500)
        ends.append(500 + shift.by)
    assert min(ends) >= 500 and max(ends) <= 8000
    middle = sorted(ends)[200]  # of 500 .. 8000 it is 2000
    assert 1900 < middle < 2100
    shift.draw(9000)
    assert shift.by == 0


def test_calibration_sees_keys_at_many_positions(monkeypatch) -> None:
    model, seen = tiny("llama-gqa"), []
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def forward(x, position_ids):
        seen.append(int(position_ids.max()))
        return plain(x, position_ids)

    monkeypatch.setattr(rotary, "forward", forward)
    calibrate(model, family_of(model.config), tokens(4, 16), {"key_post"})
    limit = model.config.max_position_embeddings
    assert min(seen) == 15 and limit / 3 < max(seen) < limit and len(set(seen)) == 4


@pytest.mark.parametrize("name", ["opt", "llama-dynamic"])
def test_models_whose_positions_are_fixed_stay(name: str) -> None:
    model = tiny("opt" if name == "opt" else "llama-gqa")
    if name == "llama-dynamic":
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    with shifting(family_of(model.config), model) as shift:
        shift.draw(8)
        assert shift.by == 0
