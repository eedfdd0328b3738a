"""Linear layers for few tokens on Hopper, and the gate after larger ones. Shapes: see `ops.linear`.

A decode step reads all weights once. cuBLAS does so at 2.5 to 4.1 of 4.6 TB/s, and splits narrow
products into parts that a second launch adds. On an H200, with Llama-3.1-8B's shapes, a layer's
four products with the activation take, in us: 1 token 127.2 with cuBLAS and 111.8 here, 8 tokens
127.4 and 117.0, 16 tokens 128.5 and 117.1. At 64 tokens cuBLAS is faster (131.2 and 135.6), except
for the gated product: 71.8 and 61.1.
"""
# mypy: allow-untyped-defs

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.plan import cdiv, power_of_two
from kvfold.ops.common.recording import launch_once
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.decode.kernels import after_launch

FEW, GATED = 16, 64  # most tokens of a product, and of a gated one
ONE = {"COLUMNS": 4, "DEPTH": 512, "num_warps": 2}  # measured best for one token
SEVERAL = {"COLUMNS": 64, "DEPTH": 128, "num_warps": 4}  # measured best for more tokens
STAGES = {1: 3, 16: 6, 32: 5, 64: 4}  # by tokens of a program
BLOCK = 1024  # numbers of a program of `act_kernel`


@triton.jit
def _gate(gate, up, like):
    """silu(gate) * up, with both first rounded to the dtype `like`, as separate kernels would."""
    gate, up = gate.to(like).to(tl.float32), up.to(like).to(tl.float32)
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def one_kernel(
    x, weight, bias, out, num_tokens, K, N,
    TOKENS: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Program i: COLUMNS outputs of one token."""
    after_launch(PDL)
    column, depth = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    row = weight + column[:, None].to(tl.int64) * K + depth[None, :]
    sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    up_sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        inputs = tl.load(x + start + depth).to(tl.float32)[None, :]
        sums += tl.load(row + start).to(tl.float32) * inputs
        if GATED:
            up_sums += tl.load(row + N.to(tl.int64) * K + start).to(tl.float32) * inputs
    total = tl.sum(sums, 1)
    if GATED:
        total = _gate(total, tl.sum(up_sums, 1), x.dtype.element_ty)
    if bias is not None:
        total += tl.load(bias + column).to(tl.float32)
    tl.store(out + column, total.to(x.dtype.element_ty))


@step_kernel
def few_kernel(
    x, weight, bias, out, num_tokens, K, N,
    TOKENS: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Program i: COLUMNS outputs of all tokens, at most TOKENS. Weights are the left operand, since
    tensor cores take the most rows of it."""
    after_launch(PDL)
    column, depth = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    token = tl.arange(0, TOKENS)[None, :]
    in_range = token < num_tokens
    row = weight + column[:, None].to(tl.int64) * K + depth[None, :]
    sums = tl.zeros([COLUMNS, TOKENS], tl.float32)
    up_sums = tl.zeros([COLUMNS, TOKENS], tl.float32)
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        inputs = tl.load(x + token * K + (start + depth)[:, None], in_range, 0.0)
        sums = tl.dot(tl.load(row + start), inputs, sums)
        if GATED:
            up_sums = tl.dot(tl.load(row + N.to(tl.int64) * K + start), inputs, up_sums)
    if GATED:
        sums = _gate(sums, up_sums, x.dtype.element_ty)
    if bias is not None:
        sums += tl.load(bias + column).to(tl.float32)[:, None]
    tl.store(out + token * N + column[:, None], sums.to(x.dtype.element_ty), in_range)


@triton.jit
def act_kernel(both, out, N, BLOCK: tl.constexpr):
    """Program (token, i): BLOCK numbers of silu(gate) * up, from a row of `both` [tokens, 2 N]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range, row = column < N, both + token * 2 * N
    gate, up = tl.load(row + column, in_range, 0.0), tl.load(row + N + column, in_range, 0.0)
    result = _gate(gate, up, both.dtype.element_ty)
    tl.store(out + token * N + column, result.to(both.dtype.element_ty), in_range)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `ops.linear.linear`."""
    if _num_tokens(x) > FEW or unserved(x, weight):
        return F.linear(x, weight, bias)
    return product(x, weight, bias)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Like `ops.linear.gated`."""
    if _num_tokens(x) > GATED or unserved(x, weight):
        return activated(F.linear(x, weight))
    return product(x, weight, gated=True)


def unserved(x: Tensor, weight: Tensor) -> str | None:
    """Why `product` does not support these tensors, or None."""
    if x.dtype.itemsize != 2 or x.dtype != weight.dtype:
        return f"{x.dtype} by {weight.dtype}"
    if len(weight) % (2 * SEVERAL["COLUMNS"]) or weight.shape[1] % ONE["DEPTH"]:
        return f"weights of {tuple(weight.shape)}"
    if not (weight.is_contiguous() and x.numel()):
        return "weights that do not lie in rows, or no tokens"
    return None if _on_hopper(x.device) else "another device than it was measured on"


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    """Run the kernel on x [.., K] of 1 to 64 tokens; a single token does without tensor cores."""
    number, inputs = _num_tokens(x), weight.shape[1]
    assert weight.is_contiguous() and 0 < number <= GATED, (weight.stride(), number)
    outputs = len(weight) // (1 + gated)
    out = x.new_empty(*x.shape[:-1], outputs)
    tokens = 1 if number == 1 else max(16, power_of_two(number))
    kernel, options = (one_kernel, ONE) if tokens == 1 else (few_kernel, SEVERAL)
    launch_once(
        kernel, (outputs // options["COLUMNS"],),
        x.contiguous(), weight.detach(), None if bias is None else bias.detach(), out, number,
        inputs, outputs, TOKENS=tokens, GATED=gated, STAGES=STAGES[tokens], **options,
        **launch_options(x.device),
    )  # fmt: skip
    return out


def activated(both: Tensor) -> Tensor:
    """Return silu(gate) * up [.., N] of products [.., 2 N]; gate is the first half."""
    both = both.contiguous()
    numbers = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], numbers)
    if out.numel():
        grid = out.numel() // numbers, cdiv(numbers, BLOCK)
        launch_once(act_kernel, grid, both, out, numbers, BLOCK=BLOCK, num_warps=4)
    return out


def _num_tokens(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


@lru_cache
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
