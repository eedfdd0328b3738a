"""Products of the same inputs as one wide product, over weights that do not exist twice.

A step of few tokens reads weights and does little else: three launches of narrow products take
longer than one, and `ops.linear` has kernels for it. Shapes: N tokens, D width, I inner width of an
MLP.
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
    """weight [sum of outputs, D] and bias: of linear layers, whose own are views of them."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    @torch.inference_mode(False)  # whose tensors could not be trained
    def of(cls, linears: Sequence[nn.Linear]) -> "MergedLinear":
        """Values, names and memory stay, in all models that share these parameters: only where
        their numbers lie changes. What lies one behind another already stays where it is."""
        biases = [x.bias for x in linears if x.bias is not None]
        assert len(biases) in (0, len(linears)), "all of them have a bias, or none"
        return cls(_merge([x.weight for x in linears]), _merge(biases) if biases else None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., D] -> [.., sum of outputs]."""
        return linear(x, self.weight, self.bias)


def _merge(parts: Sequence[nn.Parameter]) -> Tensor:
    """All rows of `parts`, which become views of them."""
    first, rows = parts[0].detach(), [len(x) for x in parts]
    if _adjacent(parts):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    whole = torch.cat([x.detach() for x in parts])
    for part, own in zip(parts, whole.split(rows), strict=True):
        part.data = own
    return whole


def _adjacent(parts: Sequence[nn.Parameter]) -> bool:
    """Whether they lie one behind another in one memory."""
    end = parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.storage_offset() == end):
            return False
        end += part.numel()
    return True


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with the modules of an MLP that computes this, by their names."""

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
        found: Tensor = self.down(inner)
        return found


def merge_products(model: Any, family: type[Family]) -> None:
    """One product for what a layer's attention makes of its inputs, and one for gate and up where
    its MLP has them; what follows either as such a product too. The model is a runner's own; what
    it shares weights with computes as before.
    """
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
            torch.cuda.empty_cache()  # of pieces that no larger tensor fits into


def _plain(owner: nn.Module, linears: Sequence[nn.Module]) -> bool:
    """Whether all that is known of them is their weights: nobody has put a forward of their own
    into them, as what spreads a model over devices does, and they lie in one place."""
    modules = (owner, *linears)
    if any("forward" in vars(x) for x in modules) or any(type(x) is not nn.Linear for x in linears):
        return False
    return len({(x.weight.device, x.weight.dtype, x.bias is None) for x in linears}) == 1
