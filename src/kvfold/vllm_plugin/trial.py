"""Check every layer's attention before vLLM serves requests."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvfold.vllm_plugin.blocks import BlockAttention

if TYPE_CHECKING:
    from kvfold.vllm_plugin.backend import CachedImpl

CHUNK = 64  # tokens of the trial's prefill chunk
LENGTHS = (1, 2, 5, 12, 27, 50)  # of its decoding requests, which read the chunk's first tokens


@torch.inference_mode()
def check_attention(attention: BlockAttention, layers: "Sequence[CachedImpl]") -> None:
    """Run every layer's attention on sample inputs and new blocks. Raises ValueError naming the
    first layer with outputs that are not finite."""
    view = attention.view
    chunk = min(CHUNK, view.max_tokens)
    lengths = [n for n in LENGTHS if n <= chunk]
    positions = torch.tensor([*(n - 1 for n in lengths), *range(chunk)], device=view.device)
    step = attention.make_step(lengths, chunk)
    finite = []
    for layer in layers:
        q, entries = layer.sample_inputs(positions)
        out = attention.attend_on_new_blocks(layer.maps, step, q, entries)
        finite.append(layer.project_output(out).isfinite().all())
    attention.locations.clear()
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
