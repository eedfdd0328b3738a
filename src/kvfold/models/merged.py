"""Merge linear layers with the same input into one product, without copying their weights.

A decode step of few tokens mostly reads weights: three narrow products take longer than one wide
product, for which `ops.linear` has kernels. Shapes: N tokens, D width, I inner width of an MLP.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from kvfold.models.adapter import Family
from kvfold.models.folded import FoldedAttention
from kvfold.ops.linear import gated, linear


class MergedLinear(NamedTuple):
    """Several linear layers as one. weight [sum of outputs, D], bias: the layers' own parameters
    are views of them."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    @torch.inference_mode(False)  # inference tensors could not be trained later
    def of(cls, linears: Sequence[nn.Linear]) -> "MergedLinear":
        """Merge linear layers. Their parameters keep values and names, also in other models that
        share them; only their memory moves. Adjacent parameters stay where they are."""
        biases = [x.bias for x in linears if x.bias is not None]
        assert len(biases) in (0, len(linears)), "all of them have a bias, or none"
        return cls(_merge([x.weight for x in linears]), _merge(biases) if biases else None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., D] -> [.., sum of outputs]."""
        return linear(x, self.weight, self.bias)


def _merge(parts: Sequence[nn.Parameter]) -> Tensor:
    """Concatenate parameters [rows, ..], which become views of the result."""
    first, rows = parts[0].detach(), [len(x) for x in parts]
    if _adjacent(parts):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    merged = torch.cat([x.detach() for x in parts])
    for part, view in zip(parts, merged.split(rows), strict=True):
        part.data = view
    return merged


def _adjacent(parts: Sequence[nn.Parameter]) -> bool:
    """Whether parameters lie one after another in the same memory."""
    end = parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.storage_offset() == end):
            return False
        end += part.numel()
    return True


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with the modules of an MLP that computes this."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self.merged = MergedLinear.of((mlp.gate_proj, mlp.up_proj))
        self.down = (
            MergedLinear.of((mlp.down_proj,)) if _plain(mlp, (mlp.down_proj,)) else mlp.down_proj
        )
        self.silu = isinstance(mlp.act_fn, type(ACT2FN["silu"])) and self.merged.bias is None
        self.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.silu:
            inner = gated(x, self.merged.weight)
        else:
            gate, up = self.merged(x).chunk(2, dim=-1)
            inner = self.act_fn(gate) * up
        out: Tensor = self.down(inner)
        return out


def merge_products(model: Any, family: type[Family]) -> None:
    """Merge the products of each layer's attention inputs, and gate and up of its MLP if it has
    them. The model belongs to one runner; models that share its weights compute as before."""
    for layer in family.layers(model):
        attention = getattr(layer, family.attention_name)
        if isinstance(attention, FoldedAttention) and _plain(attention, attention.products):
            attention.merged = MergedLinear.of(attention.products)
            if _plain(attention, (attention.o_proj,)):
                attention.output = MergedLinear.of((attention.o_proj,))
        if name := family.gated:
            mlp = getattr(layer, name)
            if _plain(mlp, (mlp.gate_proj, mlp.up_proj)):
                setattr(layer, name, GatedMLP(mlp))
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # free fragments, into which no larger tensor fits


def _plain(owner: nn.Module, linears: Sequence[nn.Module]) -> bool:
    """Whether modules are ordinary linear layers: no replaced forward (as accelerate installs), one
    device and dtype, and all with or all without a bias."""
    modules = (owner, *linears)
    if any("forward" in vars(x) for x in modules) or any(type(x) is not nn.Linear for x in linears):
        return False
    return len({(x.weight.device, x.weight.dtype, x.bias is None) for x in linears}) == 1
