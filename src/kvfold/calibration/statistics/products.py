"""Computes gradients through the linear layers of a quantised model, whatever its kernels support.

Kernels for packed weights or rounded activations are often written for inference: their backward
pass is missing, or returns zeros without an error. So each quantised linear layer is checked on a
few vectors. If the check fails, its gradients are computed from the dequantised weight. That is
read by passing the rows of an identity matrix through the layer, which works for any format.

Shapes: T tokens; D, O input and output numbers of a layer.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.models.devices import replaced_forward
from kvfold.models.weights import is_packed
from kvfold.utils.errors import SettingError

ROWS = 1024  # of the identity matrix at a time
UNKNOWN = ".*autograd kernel was not registered.*"  # torch's warning of gradients that may be zeros
_CHECKED = 8  # random vectors
_TOLERANCE = 0.2  # rounded activations differ by a few hundredths, a missing gradient by 1


class NoGradients(SettingError):
    """Raised where gradients of the loss end in a quantised model's kernels. reason: where."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"gradients of the loss end where the model is quantised ({reason}): take the model in"
            " 16 bits, or maps of it, which fit the quantised one too"
        )


@contextmanager
def differentiable(model: nn.Module, like: Tensor) -> Iterator[list[str]]:
    """Within it, all linear layers of a model pass gradients on.

    like: a tensor of the activations' dtype and device. Yields the names of layers whose gradients
    are computed from their dequantised weights. Raises NoGradients where another quantised module
    ends the gradients, such as a kernel for a mixture of experts.
    """
    broken = [(name, x) for name, x in _products(model) if not _passes(x, like)]
    packed = [(name, x) for name, x in model.named_modules() if _is_packed(x)]
    with ExitStack() as stack:
        for name, module in packed:
            hook = module.register_forward_hook(partial(_check_passed, name))
            stack.callback(hook.remove)
        for _, module in broken:
            product = partial(_product, module.forward, module.in_features)
            stack.enter_context(replaced_forward(module, product))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", message=UNKNOWN)
        try:
            yield [name for name, _ in broken]
        except UserWarning as warning:
            raise NoGradients(str(warning).partition(":")[0]) from warning


def _products(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Linear layers of a model, by name, except torch's Linear with an ordinary weight."""
    for name, module in model.named_modules():
        sizes = hasattr(module, "in_features") and hasattr(module, "out_features")
        if sizes and not any(module.children()) and not _is_plain(module):
            yield name, module


def _is_plain(module: Any) -> bool:
    """Whether a layer is torch's Linear with an ordinary weight, perhaps under accelerate's
    hooks."""
    forward = module.__dict__.get("_old_forward", module.forward)
    weight = getattr(module, "weight", None)
    is_own = getattr(forward, "__func__", None) is nn.Linear.forward
    return is_own and isinstance(weight, Tensor) and not is_packed(weight)


def _is_packed(module: nn.Module) -> bool:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(is_packed(x) for x in tensors)


def _check_passed(name: str, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    """Raises NoGradients where a module's inputs require gradients and its outputs do not."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in _floats(args)):
        return
    if not all(x.requires_grad for x in _floats(out)):
        raise NoGradients(f"{name} computes none")


def _floats(x: Any) -> list[Tensor]:
    """Floating-point tensors among a module's arguments or outputs."""
    if isinstance(x, Tensor):
        return [x] if x.is_floating_point() else []
    return [y for one in x for y in _floats(one)] if isinstance(x, tuple | list) else []


def _passes(module: Any, like: Tensor) -> bool:
    """Whether a layer's gradient is right: for y = W x / |W x| it must give y . W x = |W x|."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECKED, module.in_features, generator=generator).to(like)
    with torch.no_grad():
        if not isinstance(module(x), Tensor):  # a router, say
            return True
        product = (module(x) - module(-x)).float() / 2  # without the bias
    norms = product.norm(dim=-1)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=UNKNOWN)
        out = module(x.requires_grad_())
        if not out.requires_grad:
            return False
        along = (product / norms[:, None].clamp(min=1e-30)).to(out)
        try:
            (gradient,) = torch.autograd.grad(out, x, along, allow_unused=True)
        except (RuntimeError, UserWarning):  # NotImplementedError is a RuntimeError
            return False
    if gradient is None:
        return False
    measured = (gradient.float() * x.detach().float()).sum(-1)
    return bool(((measured - norms).abs() <= _TOLERANCE * norms).all())


def _product(forward: Callable[[Tensor], Tensor], width: int, x: Tensor) -> Tensor:
    """A layer's outputs [.., O] for x [.., D], whose gradient is computed from its weight."""
    out: Tensor = _Product.apply(forward, width, x)
    return out


class _Product(torch.autograd.Function):
    """forward(x) = x W^T + b. Its gradient is computed from the outputs of `forward` for the rows
    of an identity matrix, scaled to the size of x, as layers that round their inputs expect such
    numbers."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[Tensor], Tensor], width: int, x: Tensor) -> Tensor:
        ctx.forward, ctx.width = forward, width
        size = x.detach().abs().amax()
        ctx.save_for_backward(torch.where(size > 0, size, 1))
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (size,) = ctx.saved_tensors
        eye = torch.eye(1, ctx.width, dtype=size.dtype, device=size.device) * size
        bias = (ctx.forward(eye) + ctx.forward(-eye)) / 2
        parts = []
        for start in range(0, ctx.width, ROWS):
            rows = torch.zeros(min(ROWS, ctx.width - start), ctx.width).to(size)
            rows.diagonal(start).fill_(size)
            weight = ((ctx.forward(rows) - bias) / size).to(gradient)  # [rows, O]
            parts.append(gradient @ weight.mT)
        return None, None, torch.cat(parts, -1).to(size)
