"""Compile a model's elementwise operations with torch.compile, to launch fewer kernels per step.

In plain PyTorch a norm takes eight launches, RoPE five, silu(gate) * up two; compiled, each takes
one. Matrix products stay with cuBLAS, attention with our kernels. Compiled are the functions of
`models.pieces` and everything between the attentions of two layers, where a layer passes its last
residual sum to the next norm. In families without a known layer structure, transformers' own
modules are compiled, each class once. In a model with sidecar maps whole layers are compiled, with
attention as one custom operation.

KVFOLD_COMPILE: `auto` (on CUDA devices) or `off`. Shapes: N tokens of a step, D model width.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.maps.family import AttentionFamily
from kvfold.models.adapter import Family, Residual, decoder_of
from kvfold.models.merged import GatedMLP
from kvfold.models.pointwise import PointwiseOps

TOKENS = 127  # of the step to compile with; a prime, so that no other dimension has this size
RECOMPILES = 64  # most variants of one function: widths, dtypes, and one or several tokens

Forward = Callable[[Tensor, Tensor, AttentionContext], Tensor]
Swap = tuple[nn.Module, str, Any]  # module, attribute, its new value


def wanted(device_type: str) -> bool:
    """Whether to compile for this type of device. Raises ValueError."""
    setting = os.environ.get("KVFOLD_COMPILE", "auto")
    if setting not in ("auto", "off"):
        raise ValueError(f"KVFOLD_COMPILE must be auto or off; got {setting!r}")
    return setting == "auto" and device_type == "cuda"


class Compiled:
    """Compiled replacements for parts of a model. `install` puts them in. backend: of
    torch.compile."""

    def __init__(self, model: Any, family: type[Family], backend: str = "inductor") -> None:
        if issubclass(family, AttentionFamily):
            self.swaps: list[Swap] = _whole_layers(model, family, backend)
            return
        pieces = PointwiseOps(*(_piece(function, backend) for function in PointwiseOps()))
        self.swaps = [(x, "pointwise", pieces) for x in family.attentions(model)]
        whole = family.finish is not None and not _is_replaced(model.base_model)
        self.swaps += (_layers if whole else _modules)(model, family, backend)

    def install(self) -> None:
        """Put the compiled functions into the model. Its outputs change by rounding only."""
        for module, name, value in self.swaps:
            vars(module)[name] = value

    def remove(self) -> None:
        """Restore the model."""
        for module, name, _ in self.swaps:
            vars(module).pop(name, None)

    @torch.inference_mode()
    def warm_up(self, forward: Forward, device: torch.device) -> None:
        """Install, and compile everything that steps need. If that fails, warn and run without.

        forward: runs the model on tokens, positions int64 [N] and a context.
        """
        self.install()
        try:
            with torch._dynamo.config.patch(cache_size_limit=RECOMPILES):
                for number in (TOKENS, 1):
                    positions = torch.arange(number, device=device)
                    forward(torch.zeros_like(positions), positions, _DryContext())
        except Exception as error:
            self.remove()
            self.swaps = []
            warnings.warn(
                f"torch.compile failed, so that a step takes more launches; KVFOLD_COMPILE=off "
                f"does not try: {type(error).__name__}: {str(error)[:500]}",
                stacklevel=2,
            )


def _is_replaced(module: nn.Module) -> bool:
    """Whether a module's `forward` was replaced, for instance by accelerate."""
    return any("forward" in vars(x) for x in module.modules())


def _layers(model: Any, family: type[Family], backend: str) -> list[Swap]:
    """Compiled layers that pass on their last residual sum, and a last norm that adds it."""
    assert family.finish is not None
    enter, finish = _piece(_enter, backend), _piece(family.finish, backend)
    norm = model.base_model.norm
    layers = [(x, "forward", partial(_layer, x, enter, finish)) for x in family.layers(model)]
    inside = [x for attention in family.attentions(model) for x in attention.children()]
    return [
        *layers,
        (norm, "forward", partial(_last, norm, enter)),
        *_by_class(inside, backend),  # norms of queries and keys
    ]


def _layer(
    layer: Any,
    enter: Callable[..., Any],
    finish: Callable[..., Any],
    hidden_states: Tensor | Residual,
    **extra: Any,
) -> Residual:
    x, normed = enter(layer.input_layernorm, *_pair(hidden_states))
    out, _ = layer.self_attn(hidden_states=normed, **extra)
    residual: Residual = finish(layer, x, out)
    return residual


def _last(norm: Any, enter: Callable[..., Any], hidden_states: Tensor | Residual) -> Tensor:
    normed: Tensor = enter(norm, *_pair(hidden_states))[1]
    return normed


def _pair(x: Tensor | Residual) -> tuple[Tensor, Tensor | None]:
    return x if isinstance(x, tuple) else (x, None)


def _enter(norm: Any, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
    """Hidden states [1, N, D] plus the pending residual, and their norm."""
    x = x if more is None else x + more
    return x, type(norm).forward(norm, x)


def _whole_layers(model: Any, family: type[Family], backend: str) -> list[Swap]:
    """Compile a model's layers as they are, without attention, and the norms after the last one."""
    decoder, layers = decoder_of(model), list(family.layers(model))
    if _is_replaced(decoder):
        return []
    inside = {type(x) for layer in layers for x in layer.children()}
    return _by_class([*layers, *(x for x in decoder.children() if type(x) in inside)], backend)


def _modules(model: Any, family: type[Family], backend: str) -> list[Swap]:
    """Compile norms and MLPs, each on its own."""
    attentions = set(family.attentions(model))
    inner = {type(x) for y in family.layers(model) for x in y.children() if x not in attentions}
    return _by_class([x for x in model.modules() if type(x) in inner], backend)


def _by_class(modules: Sequence[nn.Module], backend: str) -> list[Swap]:
    """Compile the modules that transformers or kvfold wrote, each class once."""
    kinds = {type(x) for x in modules}  # PyTorch's own modules are one launch already
    known = [x for x in kinds if x is GatedMLP or x.__module__.startswith("transformers.")]
    forwards = {kind: _piece(kind.forward, backend) for kind in known}
    return [
        (x, "forward", partial(forwards[type(x)], x))
        for x in modules
        if type(x) in forwards and "forward" not in vars(x)
    ]


class _DryContext(AttentionContext):
    """An attention context without a pool, for compilation: stores nothing, and all outputs are
    0."""

    def attend(self, layer: LayerAttention, q: Tensor, entries: Tensor) -> Tensor:
        return layer.merge_heads(q.new_zeros(*q.shape[:3], layer.value_columns.widest))


def _piece(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a function twice: for one token, and for any other number of tokens (dim 1 of all
    tensors)."""
    return partial(_call, torch.compile(function, backend=backend))


def _call(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    # torch.compile treats every size of an nn.Parameter as a constant.
    args = tuple(x.detach() if isinstance(x, nn.Parameter) else x for x in args)
    _mark((*args, *more.values()))
    return function(*args, **more)


def _mark(x: Any) -> None:
    """Mark dims of size TOKENS as dynamic. Other sizes stay constants until a call has another
    one."""
    if isinstance(x, tuple):
        for item in x:
            _mark(item)
    elif isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == TOKENS:
        torch._dynamo.maybe_mark_dynamic(x, 1)
