"""What tests of llm share with others."""

import pytest
import torch

import kvfold
from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from models import tiny, tokens


def compressed(name: str, recipe: str, **size):
    """A tiny model folded in memory; skips pairs that are refused by design."""
    model = tiny(name)
    try:
        compressor = Compressor(model, recipes.get(recipe))
    except ValueError as error:
        pytest.skip(str(error))
    family, wanted = compressor.family, compressor.needs
    made = calibrate(model, family, tokens(8, 64), wanted, topics=torch.arange(8) // 4)
    given = size if "factor" in size else size | {"align": 1}
    return kvfold.compress(model, recipe, statistics=made, **given, fold=True)
