"""A short trial of every layer's attention over blocks, before vLLM serves a request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvfold.vllm_plugin.blocks import BlockAttention

if TYPE_CHECKING:
    from kvfold.vllm_plugin.backend import CachedImpl

CHUNK = 64  # tokens of a prompt
LENGTHS = (1, 2, 5, 12, 27, 50)  # of requests that decode beside it, over its first rows


@torch.inference_mode()
def check_attention(attention: BlockAttention, layers: "Sequence[CachedImpl]") -> None:
    """Attention of tokens that each layer gives as a sample, on blocks of its own. Raises
    ValueError naming the first layer whose outputs are not finite."""
    view = attention.view
    chunk = min(CHUNK, view.max_tokens)
    lengths = [n for n in LENGTHS if n <= chunk]
    positions = torch.tensor([*(n - 1 for n in lengths), *range(chunk)], device=view.device)
    step = attention.step_of(lengths, chunk)
    finite = []
    for layer in layers:
        q, rows = layer.sample(positions)
        out = attention.attend_alone(layer.maps, step, q, rows)
        finite.append(layer.finish(out).isfinite().all())
    attention.places.clear()
    if bool(torch.stack(finite).all()):
        return
    first = layers[[bool(x) for x in finite].index(False)].maps.index
    dtype = str(view.dtype).removeprefix("torch.")
    raise ValueError(
        f"kvfold's plugin for vLLM: the attention of layer {first} gives numbers that are not "
        f"finite in {dtype} on {view.device}; serve the model with --dtype float32, or use another "
        "checkpoint. If the original model runs in this dtype, set KVFOLD_BACKEND=reference and "
        "report it"
    )
