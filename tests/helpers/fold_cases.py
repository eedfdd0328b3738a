"""What tests of fold share with others."""

import pytest
import torch
from torch import Tensor

from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor, Prepared
from models import tiny, tokens


def prepared(name: str, recipe: str) -> Prepared:
    """Bases of a recipe on a tiny model; skips pairs that are refused by design."""
    model = tiny(name)
    try:
        compressor = Compressor(model, recipes.get(recipe))
    except ValueError as error:
        pytest.skip(str(error))
    windows, topics = tokens(8, 64), torch.arange(8) // 4
    wanted = compressor.needs
    return compressor.prepare(calibrate(model, compressor.family, windows, wanted, topics=topics))


def close(got: Tensor, want: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        got, want = got[mask.bool()], want[mask.bool()]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
