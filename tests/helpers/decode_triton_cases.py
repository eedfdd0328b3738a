"""What tests of decode triton share with others."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from kvfold.ops.common.plan import stream_k
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode import triton as decode_triton
from kvfold.ops.decode.triton import DecodePlan, plan_layers
from pages import Case, error

GPU = torch.cuda.is_available()


LIMITS = {torch.float16: 1e-3, torch.bfloat16: 5e-3}


LSE = 1e-3


right_dot, right_casts = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float


def widen(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """bf16, whose bits the interpreter multiplies as integers, as fp32."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)


def dot(self, a, b, *rest):
    return right_dot(self, widen(a), widen(b), *rest)


def cast(x, source, target, mode):
    """bf16 as PyTorch rounds: the interpreter rounds ties up and loses a mantissa's carry."""
    if (source, target) == (tl.float32, tl.bfloat16):
        there = torch.from_numpy(x.view("float32").copy()).bfloat16()
        return there.view(torch.uint16).numpy()
    return right_casts(x, source, target, mode)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch) -> Iterator[None]:
    """What is allocated and not written is NaN; interpreted bf16 is right."""
    if not GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        monkeypatch.setattr(interpreter, "_convert_float", cast)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def cut(case: Case, tuning: Tuning, num_slices: int) -> DecodePlan:
    """A plan of exactly so many slices, down to one tile each."""
    q, pages, slots, _ = case.args
    groups, counts = pages.groups, pages.lengths[slots]
    queries = q.shape[1] // len(groups)
    plan = plan_layers([groups], counts, queries, tuning=tuning, num_slices=num_slices)[0]
    tiles = -(-counts.flatten() // tuning.block)
    cost = torch.arange(1, len(groups) + 1, device=q.device).repeat(len(counts))
    return replace(plan, slices=stream_k(tiles, cost, 1, num_slices))


def run(case: Case, tuning: Tuning, num_slices: int) -> tuple[Tensor, Tensor]:
    q, pages, slots, scale = case.args
    return decode_triton.decode(q, pages, slots, scale, plan=cut(case, tuning, num_slices))


def check(case: Case, out: Tensor, lse: Tensor, slack: float = 0.0) -> None:
    """slack: of scores, in log2, from queries that are rounded more than others."""
    q = case.args[0]
    assert out.dtype is q.dtype and out.shape == case.out.shape and lse.dtype is torch.float32
    empty = case.lse.isinf()
    # Eight roundings to fp32 of what is twice a score, before the codes' middle is taken off.
    rounding = 16 * 2.0**-24 * float(case.lse[~empty].abs().max())
    assert error(out, case.out) <= LIMITS.get(q.dtype, LIMITS[torch.float16]) + rounding + slack
    assert torch.equal(lse.cpu().isinf(), empty) and not out.cpu()[empty].any()
    assert ((lse.cpu().double() - case.lse)[~empty].abs() <= LSE + rounding + slack).all()
