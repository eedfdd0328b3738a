"""Fused CPU kernels for the small operations of steps with few tokens, as `engine.runner.compiled`
is on GPUs.

With few tokens, calls of PyTorch operations take longer than their work. So norms, RoPE and
projections of queries and keys, and the logits are computed by Numba kernels if tokens are few and
numbers are fp32. Everything else, and prefill, stays in PyTorch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.models import pointwise
from kvfold.models.adapter import Family
from kvfold.models.merged import MergedLinear
from kvfold.ops.common.attention import Tables
from kvfold.ops.linear import FEW


def install(model: Any, family: type[Family]) -> None:
    """Replace these operations in a runner's model. Its outputs change by rounding only."""
    from kvfold.ops.pointwise import numba

    def queries(q: Tensor, tables: Tables | None, up: Tensor | None) -> Tensor:
        if up is None or not few(q, up):
            return pointwise.queries(q, tables, up)
        return numba.queries(q, tables, up)

    def keys(k: Tensor, tables: Tables | None, down: Tensor) -> Tensor:
        return (numba if few(k, down) else pointwise).keys(k, tables, down)

    def norm(module: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not few(x, module.weight):
            return forward(x)
        return numba.rms_norm(x, module.weight, module.variance_epsilon)

    for attention in family.attentions(model):
        vars(attention)["pointwise"] = pointwise.PointwiseOps(queries=queries, keys=keys)
    for module in model.modules():
        if "forward" not in vars(module) and _is_rms_norm(module):
            vars(module)["forward"] = partial(norm, module, module.forward)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and "forward" not in vars(head):
        vars(head)["forward"] = MergedLinear.of((head,))


def few(x: Tensor, weight: Tensor) -> bool:
    """Whether x [B, T, ..] holds few tokens of one batch in fp32, as the weights."""
    is_few = x.shape[0] == 1 and x.shape[1] <= FEW
    return is_few and x.dtype is weight.dtype is torch.float32


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether this is the RMSNorm of Llama in transformers, or a copy of it in another family."""
    ours = type(module).__module__.startswith("transformers.models.")
    return (
        ours and type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    )
