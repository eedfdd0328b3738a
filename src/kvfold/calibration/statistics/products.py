"""Gradients through a quantised model's products, also where its library computes none.

Kernels for packed weights or rounded activations are often written for inference: their backward
pass is missing, or gives zeros without an error. Each product of a quantised layer is checked on a
few vectors. Where the check fails, gradients go through the layer's dequantised weight, which is
read by giving the layer the rows of an identity matrix: no format has to be known.

Shapes: T tokens; D, O numbers that a layer takes and gives.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.models.placed import replaced_forward
from kvfold.models.weights import is_packed
from kvfold.utils.errors import SettingError

ROWS = 1024  # of the identity matrix at a time
UNKNOWN = ".*autograd kernel was not registered.*"  # torch's warning of gradients that may be zeros
_CHECKED = 8  # random vectors
_APART = 0.2  # rounded activations differ by a few hundredths, a missing gradient by one


class NoGradients(SettingError):
    """Gradients of the loss end in a quantised model's kernels. reason: where."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"gradients of the loss end where the model is quantised ({reason}): take the model in"
            " 16 bits, or maps of it, which fit the quantised one too"
        )


@contextmanager
def differentiable(model: nn.Module, like: Tensor) -> Iterator[list[str]]:
    """A model whose products pass gradients on, until the block ends. like: a tensor of its
    activations' dtype and device. Yields the names of layers whose gradients go through their
    dequantised weights.

    The block raises NoGradients where another part of quantised numbers ends them, such as a kernel
    for a mixture of experts.
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
    """Linear layers of a model, by name, that are not torch's own with a plain weight."""
    for name, module in model.named_modules():
        sizes = hasattr(module, "in_features") and hasattr(module, "out_features")
        if sizes and not any(module.children()) and not _is_plain(module):
            yield name, module


def _is_plain(module: Any) -> bool:
    """Whether a layer is torch's Linear. accelerate's hooks around it change no number."""
    forward = module.__dict__.get("_old_forward", module.forward)
    weight = getattr(module, "weight", None)
    is_own = getattr(forward, "__func__", None) is nn.Linear.forward
    return is_own and isinstance(weight, Tensor) and not is_packed(weight)


def _is_packed(module: nn.Module) -> bool:
    each = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(is_packed(x) for x in each)


def _check_passed(name: str, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    """Raises NoGradients where a module's outputs have no gradient and its inputs have one."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in _floats(args)):
        return
    if not all(x.requires_grad for x in _floats(out)):
        raise NoGradients(f"{name} computes none")


def _floats(x: Any) -> list[Tensor]:
    """Tensors of floats among a module's arguments or outputs."""
    if isinstance(x, Tensor):
        return [x] if x.is_floating_point() else []
    return [y for one in x for y in _floats(one)] if isinstance(x, tuple | list) else []


def _passes(module: Any, like: Tensor) -> bool:
    """Whether a layer's gradient is that of its product: for y = W x / |W x|, y . W x = |W x|."""
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
    found = (gradient.float() * x.detach().float()).sum(-1)
    return bool(((found - norms).abs() <= _APART * norms).all())


def _product(forward: Callable[[Tensor], Tensor], width: int, x: Tensor) -> Tensor:
    """A layer's outputs [.., O] of x [.., D]; their gradient goes through the layer's weight."""
    out: Tensor = _Product.apply(forward, width, x)
    return out


class _Product(torch.autograd.Function):
    """forward(x) = x W^T + b, whose gradient at x is computed with what `forward` makes of the rows
    of an identity matrix. They are as large as x: layers that round their inputs round them well.
    """

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
        found = []
        for start in range(0, ctx.width, ROWS):
            rows = torch.zeros(min(ROWS, ctx.width - start), ctx.width).to(size)
            rows.diagonal(start).fill_(size)
            weight = ((ctx.forward(rows) - bias) / size).to(gradient)  # [rows, O]
            found.append(gradient @ weight.mT)
        return None, None, torch.cat(found, -1).to(size)
