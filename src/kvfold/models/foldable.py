"""Whether a layer computes what its weights say: what is folded, or served by an engine of its own,
is read from weights alone."""

from typing import Any

from torch import Tensor, nn

from kvfold.models.adapter import Family
from kvfold.utils.errors import SettingError


def check_weights(model: Any, family: type[Family]) -> None:
    """Raises SettingError for a model whose attention does more than its weights say: by an
    adapter, quantised weights, hooks, or weights that are elsewhere."""
    for index, attention in enumerate(family.attentions(model)):
        check_causal(attention, f"layer {index}, {family.attention_name}")
        for name, module in attention.named_modules():
            where = f"{family.attention_name}.{name}".rstrip(".")
            if why := _reason(module, name):
                raise SettingError(f"layer {index}, {where}: {why}")


def check_causal(attention: nn.Module, name: str) -> None:
    """Raises SettingError for attention whose tokens see those that follow them."""
    if not getattr(attention, "is_causal", True):
        raise SettingError(
            f"{name} lets tokens see those that follow them, which the engine does not: use"
            " kvfold.attach and transformers"
        )


def _reason(module: nn.Module, name: str) -> str | None:
    """What makes a module of an attention do more than its weights say, and the way out."""
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
    coded = type(weight) not in (nn.Parameter, Tensor)  # as torchao's
    if coded or not floats or weight.element_size() == 1:  # type: ignore[operator]
        what = f"a {type(weight).__name__}" if coded else str(weight.dtype)
        return (
            f"weights of {what}: take the model before it was quantised, or maps beside the weights"
            " (`fold=False`, or `maps`)"
        )
    return None
