"""Check every layer's attention before vLLM serves requests."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.ops.common.compile_ahead import CompileAhead, keeping_kernels
from kvfold.vllm_plugin import KERNEL_FOLDER
from kvfold.vllm_plugin.blocks import BlockAttention
from kvfold.vllm_plugin.log import logger

if TYPE_CHECKING:
    from kvfold.vllm_plugin.backend import CachedImpl

CHUNK = 64  # tokens of the trial's prefill chunk, beside those of an exact window
# Of its decoding requests, which read the chunk's first tokens. With a window, others are so much
# longer than it.
LENGTHS = (1, 2, 5, 12, 27, 50)


@torch.inference_mode()
def check_attention(attention: BlockAttention, layers: "Sequence[CachedImpl]") -> None:
    """Run every layer's attention on sample inputs and new blocks, by itself and in a step with all
    layers. Raises ValueError naming the first layer with outputs that are not finite. If a layer's
    outputs differ between the two, launches are not repeated from layer to layer (`BlockContext`).
    """
    finite, equal = run_layers(attention, layers)
    if not bool(torch.stack(equal).all()):
        attention.kinds.clear()
        logger.warning(
            "kvfold: launches repeated from layer to layer give other numbers than launches of each"
            " layer, so they are not repeated, and steps with prompts take longer. Please report it"
        )
    if bool(torch.stack(finite).all()):
        return
    first = layers[[bool(x) for x in finite].index(False)].maps.index
    view = attention.view
    dtype = str(view.dtype).removeprefix("torch.")
    raise ValueError(
        f"kvfold's plugin for vLLM: the attention of layer {first} gives numbers that are not "
        f"finite in {dtype} on {view.device}; serve the model with --dtype float32, or use another "
        "checkpoint. If the original model runs in this dtype, set KVFOLD_BACKEND=reference and "
        "report it"
    )


def compile_kernels(
    attention: BlockAttention, layers: "Sequence[CachedImpl]", max_num_decodes: int
) -> None:
    """Compile in parallel what steps of up to `max_num_decodes` decoding requests need.

    vLLM has a folder for kernels for each of its configurations, the model's path among them. These
    kernels depend on none of it, and are kept where Triton keeps others.
    """
    distinct = {attention.kinds.get(x.maps.index, x): x for x in layers}
    begun = time.monotonic()
    with keeping_kernels(KERNEL_FOLDER), CompileAhead(attention.view.device) as ahead:
        attention.warm_up(max_num_decodes)
        run_layers(attention, list(distinct.values()))
        if ahead.futures:
            logger.info("kvfold: loading or compiling %d kernels", len(ahead.futures))
    if ahead.futures:
        logger.info("kvfold: the kernels took %.1f s", time.monotonic() - begun)


@torch.inference_mode()
def run_layers(
    attention: BlockAttention, layers: "Sequence[CachedImpl]"
) -> tuple[list[Tensor], list[Tensor]]:
    """Run each layer on sample inputs. Returns, for each, a bool [] of the device: whether its
    outputs are finite, and whether they are the same in a step with all layers."""
    view, window = attention.view, attention.view.layout.window
    chunk = min(window + CHUNK, view.max_tokens)
    lengths = sorted({n for x in LENGTHS for n in (x, window + x) if n <= chunk})
    positions = torch.tensor([*(n - 1 for n in lengths), *range(chunk)], device=view.device)
    step = attention.make_step(lengths, chunk)
    finite: list[Tensor] = []
    equal: list[Tensor] = []
    context = attention.begin(step)
    for layer in layers:
        inputs = layer.sample_inputs(positions)
        out = attention.attend_on_new_blocks(layer.maps, step, *inputs)
        finite.append(layer.project_output(out).isfinite().all())
        again = attention.attend_on_new_blocks(layer.maps, step, *inputs, context=context)
        equal.append(((out == again) | out.isnan()).all())
    attention.locations.clear()
    return finite, equal
