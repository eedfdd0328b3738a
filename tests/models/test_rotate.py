"""Rotating what is stored changes the rows and nothing else."""

import pytest
import torch
from transformers import DynamicCache

from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.models.rotate import rotate_latents
from kvfold.ops.common.rotation import rotation
from kvfold.utils.versions import cache_argument
from models import tiny, tokens


@pytest.mark.parametrize("recipe", ["zack", "lorc", "palu-j", "fast", "swift", "lean", "small"])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "opt", "gpt-neox"])
def test_rotation_is_absorbed(name: str, recipe: str) -> None:
    model = tiny(name)
    try:
        compressor = Compressor(model, recipes.get(recipe))
    except ValueError as error:
        pytest.skip(str(error))
    windows, topics = tokens(8, 64), torch.arange(8) // 4
    family, wanted = compressor.family, compressor.needs
    prepared = compressor.prepare(calibrate(model, family, windows, wanted, topics=topics))
    prepared.fold(prepared.plan(0.6, 1), {})
    ids, before, after = tokens(2, 20, seed=9), DynamicCache(), DynamicCache()
    with torch.no_grad():
        wanted = model(ids, **cache_argument(before)).logits
        for layer in family.attentions(model):
            turns = {x: rotation(x.rank, seed=x.rank) for x in layer.spec.latents if x.rank}
            rotate_latents(layer, turns)
        found = model(ids, **cache_argument(after)).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before.layers[0].keys, after.layers[0].keys, atol=1e-3)
