"""Where a model's numbers stop being finite: the first of its parts whose outputs are not.

Shapes: N tokens, V tokens of the vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvfold.models.devices import input_device
from kvfold.models.families import family_of
from kvfold.models.rotary import position_limit
from kvfold.models.weights import check_finite

PROBE = 64  # tokens of a short forward: scores of a few may overflow and leave no trace
HEAD = "the head of logits"


def probe_ids(vocabulary: int, count: int) -> list[int]:
    """Token ids that differ, low ones: of most tokenizers letters and short words."""
    return [(7 * i + 33) % vocabulary for i in range(count)]


def rows_are_finite(logits: Tensor) -> Tensor:
    """Whether a token can be chosen from each row of logits [.., V]: bool [..]. A row may hold -inf
    for tokens that can never come, but neither NaN nor infinity."""
    return logits.amax(-1).isfinite()


@contextmanager
def watched(model: Any) -> Iterator[Callable[[], str]]:
    """Watch a model's forward passes. What is yielded names the first part, in the order in which
    they ran, whose outputs were not finite; if all were finite, the head."""
    seen: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, out: seen.append((name, _finite(out)))

    parts = [("the embedding of tokens", model.get_input_embeddings())]
    try:
        family = family_of(model.config)
    except ValueError:  # a model that maps beside the weights are for
        parts += [(name, module) for name, module in model.base_model.named_children()]
    else:
        for index, layer in enumerate(family.layers(model)):
            attention = getattr(layer, family.attention_name)
            parts.append((f"the attention of layer {index}", attention))
            parts.append((f"layer {index}, behind its attention,", layer))
    handles = [module.register_forward_hook(hook(name)) for name, module in parts]
    try:
        yield lambda: next((name for name, finite in seen if not finite), HEAD)
    finally:
        for handle in handles:
            handle.remove()


def _finite(out: Any) -> Tensor:
    """Whether all numbers of a module's outputs are finite, bool []."""
    if isinstance(out, Tensor):
        return out.isfinite().all()
    found = [_finite(x) for x in out if x is not None]
    return torch.stack(found).all()


@torch.no_grad()
def check_outputs(model: Any) -> None:
    """One short forward pass of a model in transformers, in the dtype that it has. Raises
    ValueError naming the first part whose outputs are not finite, or the parameter at fault."""
    vocabulary = model.get_input_embeddings().num_embeddings
    count = min(PROBE, position_limit(model.config) or PROBE)
    ids = torch.tensor([probe_ids(vocabulary, count)], device=input_device(model))
    if bool(rows_are_finite(model(input_ids=ids, use_cache=False).logits).all()):
        return
    check_finite(model)
    with watched(model) as first:
        model(input_ids=ids, use_cache=False)
    raise ValueError(
        f"{first()} gives numbers that are not finite in {dtype_name(model)}: the model overflows "
        f"by itself, before anything is compressed; {way_out(model)}"
    )


def dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def way_out(model: Any) -> str:
    """What to do about a model that overflows in the dtype that it has."""
    if model.dtype is torch.float32:
        return "use another checkpoint"
    return "load it with dtype float32, or use another checkpoint"
