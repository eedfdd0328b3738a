"""A folded model against the original, and against a dense model with projected keys and values."""

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from fold_cases import close, prepared
from kvfold import recipes
from kvfold.compression.bases.base import Source
from kvfold.compression.bases.loss_weighted import LossWeighted
from kvfold.compression.compressor import Prepared
from kvfold.ops.common.attention import attention, rotate
from kvfold.utils.versions import cache_argument
from matrix import matrix
from models import CONFIGS, tokens

CASES = matrix(list(CONFIGS), list(recipes.RECIPES), diagonals=2)
LENGTH, PADDING = 40, 5
PROJECTED = "kvfold_test_projected"


def chunked(model, ids: Tensor, chunk: int, mask: Tensor | None = None) -> Tensor:
    """Logits through the model's cache, `chunk` tokens at a time."""
    cache, outputs = DynamicCache(config=model.config), []
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for start in range(0, ids.shape[1], chunk):
        stop, extra = min(start + chunk, ids.shape[1]), {}
        if mask is not None:
            extra["attention_mask"] = mask[:, :stop]
            extra["position_ids"] = positions[:, start:stop]
        if model.config.model_type == "opt":
            extra.pop("position_ids", None)
        with torch.no_grad():
            out = model(ids[:, start:stop], **cache_argument(cache), **extra)
        outputs.append(out.logits)
    return torch.cat(outputs, 1)


def padded(batch: int = 3) -> tuple[Tensor, Tensor]:
    """Left-padded ids and mask: rows with 0, 3 and PADDING padding tokens."""
    ids, mask = tokens(batch, LENGTH, seed=5), torch.ones(batch, LENGTH, dtype=torch.long)
    for row, padding in enumerate((0, 3, PADDING)):
        mask[row, :padding] = 0
    return ids, mask


@pytest.mark.parametrize(("name", "turned"), [("llama-gqa", True), ("opt", False)])
def test_keys_that_rope_turned_count_from_their_mean(name: str, turned: bool, monkeypatch) -> None:
    """However far they spread along what the first token stores, where others count from it."""

    def first(_: LossWeighted, source: Source) -> tuple[Tensor, ...]:
        return (source["key_post_weighted"].mean().flatten() * (1 + 1e-6),) * 3

    monkeypatch.setattr(LossWeighted, "first", first)
    found = prepared(name, "swift")
    keys = [x for x in found.candidates if x.side == "k"]
    for x in keys:
        mean = found.statistics[x.layer, "key_post_weighted"].mean()[x.heads[0]]
        assert torch.equal(x.basis.mean, mean) is turned
    assert keys


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_full_rank_equals_the_original(name: str, recipe: str) -> None:
    bases = prepared(name, recipe)
    model = bases.compressor.model
    ids, (left, mask) = tokens(1, LENGTH), padded()
    want, want_padded = chunked(model, ids, LENGTH), chunked(model, left, LENGTH, mask)
    bases.fold(bases.plan(1.0, 1), {})
    for chunk in (7, LENGTH):
        close(chunked(model, ids, chunk), want)
        close(chunked(model, left, chunk, mask), want_padded, mask)


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_half_rank_equals_projected_keys_and_values(name: str, recipe: str) -> None:
    bases = prepared(name, recipe)
    model, spec = bases.compressor.model, bases.plan(0.5, 1)
    ids, (left, mask) = tokens(1, LENGTH), padded()
    with Projected(bases, spec):
        want, want_padded = chunked(model, ids, LENGTH), chunked(model, left, LENGTH, mask)
    before = chunked(model, ids, LENGTH)
    bases.fold(spec, {})
    lossless = spec.layers[0].latents[0].rank == bases.layers[0][0].width
    assert lossless or (want - before).abs().max() > 1e-3 * before.abs().max()
    for chunk in (1, 7, 64, LENGTH):
        close(chunked(model, ids, chunk), want)
    for chunk in (7, LENGTH):
        close(chunked(model, left, chunk, mask), want_padded, mask)


class Projected:
    """The original model with keys and values replaced by mean + up down^T (. - mean)."""

    def __init__(self, bases: Prepared, spec) -> None:
        self.compressor, self.layers, self.spec = bases.compressor, bases.layers, spec

    def __enter__(self) -> None:
        model = self.compressor.model
        AttentionInterface.register(PROJECTED, self.attention)
        AttentionMaskInterface.register(PROJECTED, sdpa_mask)
        self.before = model.config._attn_implementation
        self.rotary = self.compressor.family.rotary(model)
        if self.rotary is not None:
            self.hook = self.rotary.register_forward_hook(self._remember)
        model.set_attn_implementation(PROJECTED)

    def __exit__(self, *_: object) -> None:
        self.compressor.model.set_attn_implementation(self.before)
        if self.rotary is not None:
            self.hook.remove()

    def _remember(self, _module, _args, output) -> None:
        self.cos, self.sin = (table[:, None] for table in output)

    def attention(self, module, q, k, v, mask, scaling=None, softcap=None, **_):
        spec = self.spec.layers[module.layer_idx]
        pre = spec.keys == "pre_rope"
        if pre:
            scale = self.cos[..., :1] ** 2 + self.sin[..., :1] ** 2
            k = rotate(k, self.cos / scale, self.sin / scale, sign=-1)
        k, v = self._project(spec, module.layer_idx, k, v)
        if pre:
            k = rotate(k, self.cos, self.sin)
        scaling = self.compressor.geometry.scaling if scaling is None else scaling
        out, _ = attention(q, k, v, mask, scaling, softcap=softcap)
        return out.transpose(1, 2).contiguous(), None

    def _project(self, spec, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = {"k": k.double().clone(), "v": v.double().clone()}
        for latent, candidate in zip(spec.latents, self.layers[layer], strict=True):
            basis, heads = candidate.basis, list(latent.heads)
            held = [parts[side][:, heads].transpose(1, 2).flatten(2) for side in latent.side]
            c = torch.cat(held, -1) - basis.mean
            c = c @ basis.down[:, : latent.rank] @ basis.up[:, : latent.rank].mT + basis.mean
            for side, part in zip(latent.side, c.chunk(len(held), -1), strict=True):
                parts[side][:, heads] = part.unflatten(-1, (len(heads), -1)).transpose(1, 2)
        return parts["k"].float(), parts["v"].float()
