"""A family with soft-capped scores, a scale of its own and capped logits, as Gemma 2 has: a Llama
whose attention is written out that way, against its folded models and the engine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import kvfold
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.layout import CacheSpec
from kvfold.layout.pages import plain_spec
from kvfold.models.families import family_of
from kvfold.models.llama import LlamaFamily
from models import tiny, tokens
from steps import logits_of

pytestmark = pytest.mark.gpu

SCALE, CAP, FINAL = 0.4, 0.7, 2.0
CAPPED = "kvfold_test_capped"


def _capped(module, q, k, v, mask, **_):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = CAP * torch.tanh(q @ k.mT * SCALE / CAP) + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


AttentionInterface.register(CAPPED, _capped)
AttentionMaskInterface.register(CAPPED, eager_mask)


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(name: str, function: Callable) -> None:
        monkeypatch.setattr(LlamaFamily, name, classmethod(function))

    whole = LlamaFamily.logits
    hook("scaling", lambda cls, config, head_dim: SCALE)
    hook("softcap", lambda cls, config: CAP)
    hook("logits", lambda cls, model, x: FINAL * torch.tanh(whole(model, x) / FINAL))


def dense(model, ids: Tensor) -> Tensor:
    """Logits [T, V] of ids [1, T], without the cap that transformers knows nothing of."""
    model.set_attn_implementation(CAPPED)
    with torch.no_grad():
        found = model(ids).logits[0]
    model.set_attn_implementation("sdpa")
    return found


def close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("recipe", [None, "lorc", "zack", "small", "fast"])
def test_folded_and_paged_models_cap_their_scores(recipe: str | None) -> None:
    model, ids = tiny("llama-gqa"), tokens(1, 40)
    whole = dense(model, ids)
    if recipe is not None:
        wanted = Compressor(model, kvfold.recipes.get(recipe)).needs
        found = calibrate(model, family_of(model.config), tokens(8, 64), wanted)
        model = kvfold.compress(model, recipe, statistics=found, keep=1.0, align=1, fold=True)
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                close(model(ids).logits[0], whole)
    config = CacheConfig(kv_bytes=2**21, page=8, evict="snapkv", keep_tokens=1.0)
    with PagedSession(build_runner(model, config, num_slots=1, max_tokens=64), 7) as session:
        paged = [logits_of(session, ids[0, :30].tolist(), prompt=30)]
        paged += [logits_of(session, [token]) for token in ids[0, 30:].tolist()]
    close(torch.cat(paged), FINAL * torch.tanh(whole / FINAL))


def test_checkpoints_from_before_have_no_cap() -> None:
    geometry = LlamaFamily.geometry(tiny("llama-gqa").config)
    saved = plain_spec(geometry).to_dict()
    assert CacheSpec.from_dict(saved).geometry == geometry and geometry.softcap == CAP
    del saved["geometry"]["softcap"]
    assert CacheSpec.from_dict(saved).geometry.softcap is None
