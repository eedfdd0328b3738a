"""kvfold: shrink a language model's KV cache and measure what it costs."""

from kvfold import recipes
from kvfold.api import compress
from kvfold.loading import load, reference

__all__ = ["__version__", "compress", "load", "recipes", "reference"]
__version__ = "0.1.0"
