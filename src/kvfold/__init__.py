"""kvfold: shrink a language model's KV cache and measure what it costs."""

import sys
from pathlib import Path

__all__ = [
    "LLM",
    "CacheParams",
    "SamplingParams",
    "__version__",
    "compress",
    "load",
    "recipes",
    "reference",
]
__version__ = "0.1.0"

# The command line answers --help without waiting for torch; its commands import what they need.
if Path(sys.argv[0]).stem != "kvfold":
    from kvfold.versions import check_transformers

    check_transformers()

    from kvfold import recipes
    from kvfold.api import compress
    from kvfold.engine.llm import LLM
    from kvfold.engine.sequence import CacheParams, SamplingParams
    from kvfold.loading import load, reference
