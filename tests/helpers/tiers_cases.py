"""What tests of tiers share with others."""

import torch

from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from models import tokens


def statistics_of(model, recipe: str):
    compressor = Compressor(model, recipes.get(recipe))
    family, wanted = compressor.family, compressor.needs
    return calibrate(model, family, tokens(8, 64), wanted, topics=torch.arange(8) // 4)
