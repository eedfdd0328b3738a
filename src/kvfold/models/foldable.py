"""Check that attention computes only what its weights say, because folding and the engine read
weights alone."""

from typing import Any

from torch import Tensor, nn

from kvfold.models.adapter import Family
from kvfold.utils.errors import SettingError


def check_weights(model: Any, family: type[Family]) -> None:
    """Raises SettingError for a model whose attention does more than its weights say: with an
    adapter, quantised weights, hooks, or offloaded weights."""
    for index, attention in enumerate(family.attentions(model)):
        check_causal(attention, f"layer {index}, {family.attention_name}")
        for name, module in attention.named_modules():
            where = f"{family.attention_name}.{name}".rstrip(".")
            if why := _reason(module, name):
                raise SettingError(f"layer {index}, {where}: {why}")


def check_causal(attention: nn.Module, name: str) -> None:
    """Raises SettingError for attention in which tokens see later tokens."""
    if not getattr(attention, "is_causal", True):
        raise SettingError(
            f"{name} lets tokens see those that follow them, which the engine does not: use"
            " kvfold.attach and transformers"
        )


def _reason(module: nn.Module, name: str) -> str | None:
    """Why a module of an attention does more than its weights say, and the way out; None if it does
    not."""
    kind = type(module).__module__.split(".")[0]
    if kind == "peft":
        return (
            "an adapter of PEFT, which would be dropped: merge it first, with"
            " model.merge_and_unload() of the PEFT model, or use kvfold.attach and transformers"
        )
    if any(x.is_meta for x in module.parameters(recurse=False)):
        return (
            "weights that accelerate reads from the host or from disk: load the model without"
            " offloading, or use kvfold.attach and transformers"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        return "a hook, which would not be called: remove it, or use kvfold.attach and transformers"
    if not name:
        return None
    linear = type(module).forward is nn.Linear.forward
    if hasattr(module, "in_features") and not linear:
        return (
            f"a {type(module).__name__}, whose weights are not those of a linear layer of PyTorch:"
            " take the model before it was quantised, or maps beside the weights (`fold=False`,"
            " or `maps`)"
        )
    if not linear:
        return None
    weight, floats = module.weight, all(x.is_floating_point() for x in module.parameters())
    packed = type(weight) not in (nn.Parameter, Tensor)  # as torchao's
    if packed or not floats or weight.element_size() == 1:  # type: ignore[operator]
        kind_name = f"a {type(weight).__name__}" if packed else str(weight.dtype)
        return (
            f"weights of {kind_name}: take the model before it was quantised, or maps beside the"
            " weights (`fold=False`, or `maps`)"
        )
    return None
