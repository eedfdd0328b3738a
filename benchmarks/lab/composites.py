"""A server of a published method, or of several composed, for a model of random weights.

    python benchmarks/lab/composites.py METHOD SHAPE DEVICE serve random:SHAPE ...

runs the command line `kvfold serve random:SHAPE ...`, with a model that stores of a token what the
method does at the share that the quality tables use.
"""

import sys
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Literal

from kvfold.cli.methods import read
from kvfold.cli.options import STORAGE
from kvfold.config import Ratios
from kvfold.recipes import get

PLAIN, TWO_WIDTHS = "uncompressed", "ZDC, two widths"
# Names and settings of `kvfold compare --methods`, the most telling and the fastest first. What
# only plain PyTorch reads on a GPU comes last.
METHODS = (
    PLAIN, "zack .5", "zdc .5", "int4", "H2O", "H2O-ZDC", TWO_WIDTHS,
    "Keyformer-Z", "GEAR-ZDC 4 bits", "KVQuant-Z 4 bits", "GEAR-ZDC 2 bits",
    "Keyformer", "GEAR 4 bits", "KVQuant 4 bits",
)  # fmt: skip
SPREAD = 0.75, 1.0, 1.0, 1.25  # of ZACK's ranks: those of reference:gqa at a half lie in it
# Of hybrid-gqa.json `ZDC (0.0, 0.0) (0.5, 0.5) 0.2..0.6`: important tokens whole, others halved.
HALVES = Ratios(
    keys=0.0, values=0.0, low_rank_keys=0.5, low_rank_values=0.5, important=0.2, important_last=0.6
)


def method_of(name: str) -> tuple[Any, Any]:
    """The method of `kvfold compare` (None: it is not one of these) and its cache's settings,
    a `Storage`."""
    return (None, STORAGE) if name in (PLAIN, TWO_WIDTHS) else read(name)[0]


def spec_of(name: str, shape: str) -> Any:
    """What a token stores with a method, a CacheSpec; None: full keys and values."""
    from kvfold.bench.variants import SHAPES
    from kvfold.experimental.hybrid import with_low_rank
    from kvfold.layout import SIDES, CacheSpec, Latent, LayerSpec
    from kvfold.layout.formats.kvquant import KVQuant

    geometry, method = SHAPES[shape], method_of(name)[0]
    if name != TWO_WIDTHS and (method is None or method.recipe is None):
        return None
    recipe = method.recipe if method else get("zdc")
    keep = method.target.keep if method else 1.0
    shares = cycle(SPREAD if recipe.ranks == "energy" else (1.0,))
    even = (tuple((2 * i + 1) / 2**bits - 1 for i in range(2**bits)) for bits in KVQuant.widths)
    books = tuple(even) if recipe.codebooks else None
    latents = tuple(
        Latent(
            side=side,
            heads=(head,),
            rank=round(keep * next(shares) * geometry.head_dim),
            codebooks=books,
        )
        for side in SIDES
        for head in range(geometry.num_kv_heads)
    )
    keys: Literal["pre_rope", "post_rope"] = (
        "pre_rope" if recipe.basis == "channels" else "post_rope"
    )
    layer = LayerSpec(keys=keys, values="fused", latents=latents)
    spec = CacheSpec(geometry=geometry, layers=(layer,) * geometry.num_layers)
    return with_low_rank(spec, HALVES, align=1) if name == TWO_WIDTHS else spec


def word_tokenizer(size: int) -> Any:
    """A word for every token id, so that each token of an answer is a piece of its text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word(i): i for i in range(size)}, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word(number: int) -> str:
    return f"w{number}"


def serve(name: str, shape: str, device: str, words: Sequence[str]) -> int:
    """Run `kvfold serve` with the method's model in place of a loaded one. Returns its exit
    code."""
    import torch

    from kvfold.bench.synthetic_engine import random_folded
    from kvfold.cli import common
    from kvfold.cli.main import main

    torch.manual_seed(0)
    model = random_folded(shape, spec_of(name, shape), torch.device(device))
    tokenizer = word_tokenizer(model.config.vocab_size)
    loaders = {
        "load_config": lambda *_: model.config,
        "load_tokenizer": lambda *_: tokenizer,
        "load": lambda *_: model,
        "base_and_maps": lambda name, maps: (name, maps),
    }
    for loader, replacement in loaders.items():
        setattr(common, loader, replacement)
    return main(words)


if __name__ == "__main__":
    name, shape, device, *words = sys.argv[1:]
    sys.exit(serve(name, shape, device, words))
