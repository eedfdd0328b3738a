"""A short trial of every layer's attention over blocks, before vLLM serves a request.

Shapes: N tokens of a step, D width.
"""

from collections.abc import Sequence

import torch

from kvfold.attention.base import LayerMaps
from kvfold.models.adapter import HFAttention
from kvfold.vllm_plugin.blocks import BlockAttention

CHUNK = 64  # tokens of a prompt
SIZE = 0.25  # of hidden states, as weights of norms in front of attention have it or exceed it
LENGTHS = (1, 2, 5, 12, 27, 50)  # of requests that decode beside it, over its first rows


@torch.inference_mode()
def check_attention(attention: BlockAttention, layers: Sequence[HFAttention]) -> None:
    """Attention of random hidden states, as a norm gives them, through each layer's own
    projections, on blocks of its own. Raises ValueError naming the first layer whose outputs are
    not finite."""
    view = attention.view
    chunk = min(CHUNK, view.max_tokens)
    lengths = [n for n in LENGTHS if n <= chunk]
    make = torch.Generator().manual_seed(0)
    x = torch.randn(1, len(lengths) + chunk, layers[0].geometry.hidden_size, generator=make)
    x = (SIZE * x).to(view.device, view.dtype)
    positions = torch.tensor([*(n - 1 for n in lengths), *range(chunk)], device=view.device)
    step = attention.step_of(lengths, chunk)
    finite = []
    for layer in layers:
        rotary = layer.rotary
        tables = None if rotary is None else rotary.tables(x, positions[None], chunk)
        q, rows = layer.project(x, tables)
        maps: LayerMaps = layer.maps
        out = attention.attend_alone(maps, step, q[0], rows[0])
        finite.append(layer.o_proj(out).isfinite().all())
    attention.places.clear()
    if bool(torch.stack(finite).all()):
        return
    first = layers[[bool(x) for x in finite].index(False)].layer_idx
    dtype = str(view.dtype).removeprefix("torch.")
    raise ValueError(
        f"kvfold's plugin for vLLM: the attention of layer {first} gives numbers that are not "
        f"finite in {dtype} on {view.device}; serve the model with --dtype float32, or use another "
        "checkpoint. If the original model runs in this dtype, set KVFOLD_BACKEND=reference and "
        "report it"
    )
