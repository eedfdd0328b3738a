"""Find the first part of a model whose outputs are not finite (NaN or infinity).

Shapes: N tokens, V vocabulary.
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

PROBE = 64  # tokens of a short forward; with fewer, an overflow of scores may stay unnoticed
HEAD = "the head of logits"


def probe_ids(vocabulary: int, count: int) -> list[int]:
    """Distinct low token ids, which are letters and short words in most tokenizers."""
    return [(7 * i + 33) % vocabulary for i in range(count)]


def rows_are_finite(logits: Tensor) -> Tensor:
    """Whether a token can be sampled from each row of logits [.., V]: bool [..]. A row may contain
    -inf for banned tokens, but no NaN and no +inf."""
    return logits.amax(-1).isfinite()


@contextmanager
def watched(model: Any) -> Iterator[Callable[[], str]]:
    """Context manager that watches forward passes of a model. Yields a function that names the
    first part whose outputs were not finite, in the order in which they ran; the head if all were
    finite."""
    seen: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, out: seen.append((name, _finite(out)))

    parts = [("the embedding of tokens", model.get_input_embeddings())]
    try:
        family = family_of(model.config)
    except ValueError:  # a model without a family, which only maps serve
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
    """Whether all numbers in a module's outputs are finite, bool []."""
    if isinstance(out, Tensor):
        return out.isfinite().all()
    parts = [_finite(x) for x in out if x is not None]
    return torch.stack(parts).all()


@torch.no_grad()
def check_outputs(model: Any) -> None:
    """Run a short forward of a transformers model in its dtype. Raises ValueError that names the
    first part with outputs that are not finite, or the bad parameter."""
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
    """Advice about a model that overflows in its dtype."""
    if model.dtype is torch.float32:
        return "use another checkpoint"
    return "load it with dtype float32, or use another checkpoint"
