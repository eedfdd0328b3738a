"""The prefill kernel for Hopper, whose language has no interpreter, run as the Python that it is.

What stands in for the device brings copies and products as late as it may, or copies at once: a
buffer that is read too early or overwritten too early gives wrong numbers. Layouts, barriers and
what the compiler makes of it are for `test_prefill_compile` and, on a GPU, `test_prefill_triton`.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import kvfold.ops
from kvfold.ops.prefill_plan import Cut, cut_for
from test_prefill_triton import GPU, RAGGED, Case, poisoned  # noqa: F401

pytestmark = pytest.mark.skipif(GPU, reason="a GPU runs the kernel itself")
SOURCE = Path(kvfold.ops.__path__[0]) / "prefill_gluon.py"


class Value(Tensor):
    """Scalars and tensors of a program."""

    type = SimpleNamespace(layout=None)


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


@dataclass
class Pointer:
    memory: Tensor  # flat
    at: Any

    @classmethod
    def to(cls, x: Tensor) -> "Pointer":
        return cls(x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0),
                   value(x.storage_offset()))  # fmt: skip

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, number: Any) -> "Pointer":
        return Pointer(self.memory, self.at + number)

    def load(self, mask: Any = True, other: float = 0.0) -> Value:
        assert (torch.where(torch.as_tensor(mask), self.at, 0) >= 0).all()
        found = self.memory[torch.where(torch.as_tensor(mask), self.at, 0)]
        return value(torch.where(torch.as_tensor(mask), found, other).to(found.dtype))


@dataclass
class Shared:
    data: Tensor
    shape: tuple = ()

    def __post_init__(self) -> None:
        self.shape = tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, number: Any) -> "Shared":
        return Shared(self.data[int(number)])

    def permute(self, order: tuple) -> "Shared":
        return Shared(self.data.permute(order))


@dataclass
class Product:
    """What a matrix product will be."""

    a: Any
    b: Shared
    acc: Any
    done: Value | None = None

    def end(self) -> Value:
        if self.done is None:
            a = self.a.data if isinstance(self.a, Shared) else self.a
            acc = self.acc.end() if isinstance(self.acc, Product) else self.acc
            self.done = value(a.float() @ self.b.data.float() + acc)
        return self.done


@dataclass
class Device:
    """One program's copies and products on their way. eager: copies arrive at once."""

    eager: bool
    begun: list = field(default_factory=list)
    groups: list = field(default_factory=list)
    products: list = field(default_factory=list)

    def copy(self, to: Shared, source: Pointer, mask: Value) -> None:
        there = mask.expand(to.shape)
        assert (torch.where(there, source.at, 0)[:, ::8] % 8 == 0).all(), "no 16 bytes"
        assert torch.equal(there[:, ::8].repeat_interleave(8, 1), there), "16 bytes in part"
        self.begun.append(lambda: to.data.copy_(source.load(there)))
        if self.eager:
            self.begun.pop()()

    def commit(self) -> None:
        self.groups.append(self.begun)
        self.begun = []

    def wait_group(self, number: int) -> None:
        while len(self.groups) > number:
            for copy in self.groups.pop(0):
                copy()

    def multiply(self, a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False):
        shape = (a.shape[0], b.shape[1])
        assert acc is not None and (not isinstance(acc, Tensor) or acc.shape == shape)
        self.products.append(Product(a, b, acc if use_acc else torch.zeros(shape)))
        return self.products[-1] if is_async else self.wait(0, (self.products[-1],))

    def wait(self, number: int, values: tuple) -> Any:
        while len(self.products) > number:
            self.products.pop(0).end()
        assert all(x.done is not None for x in values), "waited for too little"
        return values[0].done if len(values) == 1 else tuple(x.done for x in values)


def names(device: Device, program: int) -> dict[str, Any]:
    """What the kernel's file imports."""

    def multiple_of(x: Any, number: int) -> Any:
        assert (x % number == 0).all(), "not a multiple"
        return x

    def store(to: Pointer, x: Tensor, mask: Tensor) -> None:
        there = mask.expand(x.shape)
        to.memory[to.at.expand(x.shape)[there]] = x[there].to(to.memory.dtype)

    def binary(function: Callable) -> Callable:
        return lambda x, y: value(function(torch.as_tensor(x), torch.as_tensor(y)))

    def nothing(*_: Any, **__: Any) -> None:
        pass

    gl = SimpleNamespace(
        constexpr=lambda x: x, static_range=range, int32=torch.int64, int64=torch.int64,
        float32=torch.float32, program_id=lambda _: value(program), multiple_of=multiple_of,
        arange=lambda first, last, _=None: value(torch.arange(first, last)),
        load=lambda at, *mask: at.load(*mask), store=store, thread_barrier=nothing,
        zeros=lambda shape, dtype, _: value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, _: value(torch.full(shape, x, dtype=dtype)),
        where=torch.where, exp2=torch.exp2, log2=torch.log2, max=torch.amax, sum=torch.sum,
        minimum=binary(torch.minimum), maximum=binary(torch.maximum),
        cdiv=lambda x, y: -(-x // y), convert_layout=lambda x, *_, **__: x,
        inline_asm_elementwise=lambda _, __, args, **___: args[0],
        allocate_shared_memory=lambda dtype, shape, _: Shared(
            torch.full(shape, torch.nan, dtype=dtype)
        ),
        NVMMASharedLayout=SimpleNamespace(get_default_for=nothing), BlockedLayout=nothing,
        SliceLayout=nothing, DotOperandLayout=nothing, NVMMADistributedLayout=nothing,
    )  # fmt: skip
    return {
        "gl": gl,
        "gluon": SimpleNamespace(
            jit=lambda function=None, **_: function or (lambda x: x),
            constexpr_function=lambda function: function,
        ),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=device.copy,
            commit_group=device.commit,
            wait_group=device.wait_group,
        ),
        "fence_async_shared": nothing,
        "warpgroup_mma": device.multiply,
        "warpgroup_mma_wait": device.wait,
    }


class Kernel:
    """Stands for the kernel in a launch."""

    def __init__(self, eager: bool) -> None:
        tree = ast.parse(SOURCE.read_text())
        tree.body = [x for x in tree.body if not isinstance(x, ast.ImportFrom)]
        self.code, self.eager = compile(tree, str(SOURCE), "exec"), eager

    def __getitem__(self, grid: tuple[int]) -> Callable:
        self.grid = grid
        return self

    def __call__(self, *args: Any, num_warps: int, maxnreg: int | None, **constants: Any) -> None:
        assert num_warps * 16 == constants["BM"]
        for program in range(*self.grid):
            device = Device(self.eager)
            space = names(device, program)
            exec(self.code, space)
            kernel = space["prefill_kernel"]
            kinds = {Tensor: Pointer.to, int: value, float: lambda x: x}
            given = [kinds[type(x)](x) for x in args]
            inspect.signature(kernel).bind(*given, **constants)
            kernel(*given, **constants)
            assert not (device.products or device.begun or device.groups)


@pytest.fixture(params=[False, True], ids=["late", "at-once"])
def kernel(request, monkeypatch) -> Kernel:
    made = Kernel(request.param)
    monkeypatch.setattr(kvfold.ops, "prefill_gluon", SimpleNamespace(prefill_kernel=made), False)
    return made


def cut(rows: int = 64, stages: int = 2, pairs: int = 64) -> Cut:
    return Cut(pairs=pairs, rows=rows, warps=pairs // 16, stages=stages, hopper=True)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_a_chunk_behind_a_prefix(kernel: Kernel, group: int, stages: int) -> None:
    Case.of(((32, 32),), ((300,),), 33, group=group, first=243).check(cut(stages=stages))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 129])
@pytest.mark.parametrize("first", [0, 137])
def test_counts_around_a_tile(kernel: Kernel, count: int, first: int) -> None:
    Case.of(((16, 16), (16, 16)), ((count, 70),), 20, first=first).check(cut())


@pytest.mark.parametrize("stages", [2, 3])
def test_heads_of_any_rank_and_sequences(kernel: Kernel, stages: int) -> None:
    """Of every class, with counts of their own, one with nothing."""
    ranks = (*RAGGED, (96, 128), (16, 0), (0, 8), (8, 264))
    counts = ((200, 16), (70, 190), (0, 33))
    case = Case.of(ranks, counts, 21, group=2, first=150, owner=(1, 0, 0, 1, 0, 0, 1, 1))
    shift = torch.arange(3)[:, None] * 20
    case.options["queries"] = case.options["queries"] + shift
    case.check(cut(stages=stages))


def test_queries_with_strides(kernel: Kernel) -> None:
    case = Case.of(((32, 16),) * 2, ((100, 90),), 50, group=4, first=50)
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    case.check(cut(rows=128, pairs=128))


def test_rows_that_no_query_of_a_tile_sees_may_be_anything(kernel: Kernel) -> None:
    case = Case.of(((16, 16),), ((100,),), 10, first=70)
    want, _ = case.check(cut())
    case.keys.data[:, 80:] = torch.nan
    assert torch.equal(case.check(cut())[0], want)


def test_cuts_for_hopper() -> None:
    for widths in ((128, 0, 128), (64, 32, 128), (256, 0, 256), (32, 0, 32)):
        for few in (False, True):
            how = cut_for(widths, few, hopper=True)
            assert how.hopper and how.pairs == (64 if few else 128)
    assert cut_for((128, 0, 128), few=False, hopper=True).rows == 128
    with pytest.raises(AssertionError):
        Cut(stages=1, hopper=True)
