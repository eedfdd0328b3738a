"""Record what one layer launches, and launch the same for other layers of the step.

In a step, layers with equal layouts launch the same kernels on tensors of the same sizes. Only the
layers' tensors differ: queries, entries, cache, weights, outputs. Preparing the launches in Python
takes longer than the GPU needs for a small step. A `Recording` keeps them with all arguments, and
`replay` replaces the pointers to the recorded layer's tensors by pointers to another layer's.

A recording contains what goes through `launch`, `launch_cuda` and `compute`. Other PyTorch
operations are not repeated: in code that may be recorded, use `compute` for everything that reads a
tensor of the layer, or a result computed from one. Views are free.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from operator import sub
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from kvfold.ops.common.compile_ahead import compiling_ahead

DIRECT = "3.6."  # versions of Triton with whose launcher `TritonLaunch` was tried
ALIGNED = 16  # bytes; Triton compiles other code for pointers that are not divisible by it

_thread = threading.local()


class Step(Protocol):
    """One recorded launch. shifts: bytes by which every input of the recording has moved."""

    def run(self, inputs: Sequence[Tensor], shifts: Sequence[int], stream: int) -> None: ...


class Weights:
    """Tensors of a layer that stay where they are, with what a replay asks about them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.pointers = [x.data_ptr() for x in self.tensors]
        self.shapes = [_shape(x) for x in self.tensors]


class Recording:
    """The launches of one layer; see the module. Use it as a context manager while the layer runs.

    inputs, weights: the tensors that differ from layer to layer.
    apart: indices of inputs that may share memory and still move by different distances. Launches
        get them whole, so that each is known by its first byte.
    """

    def __init__(
        self, inputs: Sequence[Tensor], weights: Weights, apart: Sequence[int] = ()
    ) -> None:
        self.weights, self.shapes = weights, [_shape(x) for x in inputs]
        self.pointers = [x.data_ptr() for x in inputs] + weights.pointers
        self.device = inputs[0].device
        self.steps: list[Step] = []
        self.used: list[Tensor] = []  # other tensors of its launches, which must stay alive
        self.storages: dict[int, int] = {}  # pointer of a storage -> first input in it
        self.together: list[tuple[int, int]] = []  # inputs in one storage
        self.inputs, self.apart = [*inputs, *weights.tensors], apart
        for i, x in enumerate(self.inputs):
            if not x.numel():
                continue
            first = self.storages.setdefault(x.untyped_storage().data_ptr(), i)
            if first != i and not (i in apart and first in apart):
                self.together.append((first, i))

    def __enter__(self) -> "Recording":
        assert recording() is None, "a layer is being recorded"
        _thread.recording = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        _thread.recording = None
        self.inputs = []

    def replay(self, inputs: Sequence[Tensor], weights: Weights) -> bool:
        """Launch everything with another layer's tensors. Returns False, with nothing launched, if
        they have other shapes, or lie in memory in another way."""
        if [_shape(x) for x in inputs] != self.shapes or weights.shapes != self.weights.shapes:
            return False
        pointers = [x.data_ptr() for x in inputs] + weights.pointers
        shifts = list(map(sub, pointers, self.pointers))
        if any(shift % ALIGNED for shift in shifts):
            return False
        if any(shifts[a] != shifts[b] for a, b in self.together):
            return False
        stream, tensors = _stream(self.device), [*inputs, *weights.tensors]
        for step in self.steps:
            step.run(tensors, shifts, stream)
        return True

    def moved(self, values: Sequence[Any]) -> list[tuple[int, int]]:
        """(index of a value, input that it lies in) of all tensors among `values` that move. The
        others are kept."""
        places = []
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                which = self.storages.get(value.untyped_storage().data_ptr())
                if which is None:
                    self.used.append(value)
                else:
                    places.append((i, self._one_of(which, value)))
        return places

    def _one_of(self, which: int, value: Tensor) -> int:
        """The input that `value` is, if input `which` lies in the same memory."""
        if which not in self.apart:
            return which
        same = [i for i in self.apart if self.pointers[i] == value.data_ptr()]
        if len(same) != 1:  # then they must move alike
            same = [i for i in self.apart if self._memory(i) == self._memory(which)]
            self.together += [(same[0], i) for i in same[1:]]
        return same[0]

    def _memory(self, i: int) -> int:
        return self.inputs[i].untyped_storage().data_ptr()


def recording() -> Recording | None:
    """The recording of this thread, while a layer is being recorded."""
    return None if torch.compiler.is_compiling() else getattr(_thread, "recording", None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, for a Triton kernel."""
    compiled, active = launch_once(kernel, grid, *args, **options), recording()
    if active is None or compiling_ahead() is not None:
        return
    if compiled is None:  # interpreted
        names, count = list(options), len(args)

        def interpreted(*values: Any) -> None:
            kernel[grid](*values[:count], **dict(zip(names, values[count:], strict=True)))

        active.steps.append(Call(active, interpreted, (*args, *options.values())))
    else:
        active.steps.append(TritonLaunch(active, kernel, compiled, grid, args, options))


def launch_once(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Like `launch`, for what a step does once for all layers: it is not recorded. Returns the
    compiled kernel, or None."""
    ahead = compiling_ahead()
    if ahead is not None:
        return ahead.triton(kernel, grid, args, options)
    return kernel[grid](*args, **options)


def launch_cuda(
    compiled: Callable[[], Any],
    grid: int,
    threads: int,
    args: Sequence[Tensor | int | float],
    shared: int,
) -> None:
    """Launch a kernel of `torch.cuda._compile_kernel` on the current stream: `grid` programs of
    `threads` threads and `shared` bytes of shared memory. Integers are passed as C `int`, floats as
    `double`.

    compiled: returns the kernel, after compiling it if it is new.
    """
    ahead, active = compiling_ahead(), recording()
    if ahead is not None:
        ahead.submit(compiled, compiled)
        return
    kernel = compiled()
    if active is None:
        kernel(grid=(grid, 1, 1), block=(threads, 1, 1), args=list(args), shared_mem=shared)
        return
    step = CudaLaunch(active, kernel, grid, threads, args, shared)
    step.run((), [0] * len(active.pointers), _stream(active.device))
    active.steps.append(step)


def compute(function: Callable[..., Tensor], *args: Any, out: Tensor | None = None) -> Tensor:
    """`function(*args)`, a PyTorch operation, into `out` if it is given. It is repeated for other
    layers with the result's memory as `out`. Autograd works outside of a recording."""
    active = recording()
    if out is None:
        result = function(*args)
    elif active is None and torch.is_grad_enabled():  # which `out=` does not support
        result = out.copy_(function(*args))
    else:
        result = function(*args, out=out)
    if active is not None:

        def repeated(*values: Any) -> None:
            function(*values[:-1], out=values[-1])

        active.steps.append(Call(active, repeated, (*args, result)))
    return result


def copy(to: Tensor, source: Tensor) -> Tensor:
    """Copy `source` to `to`, of the same shape."""
    to.copy_(source)
    active = recording()
    if active is not None:
        active.steps.append(Call(active, torch.Tensor.copy_, (to, source)))
    return to


def contiguous(x: Tensor) -> Tensor:
    """`x.contiguous()`, which copies unless x is contiguous."""
    if recording() is None or x.is_contiguous():
        return x.contiguous()
    return copy(torch.empty_like(x, memory_format=torch.contiguous_format), x)


class TritonLaunch:
    """A launch of a compiled Triton kernel, without Triton's own look at the arguments."""

    def __init__(
        self, active: Recording, kernel: Any, compiled: Any, grid: tuple[int, ...],
        args: tuple[Any, ...], options: dict[str, Any],
    ) -> None:  # fmt: skip
        rest = (options.get(name, default) for name, default in _parameters(kernel)[len(args) :])
        values, sizes = [*args, *rest], (*grid, 1, 1)[:3]
        pointers = [x.data_ptr() if isinstance(x, Tensor) else x for x in values]
        if _triton_version().startswith(DIRECT):
            # What `compiled[grid](.., stream=stream)` does, without hooks of profilers.
            hooks = None, None, None
            head = [*sizes, 0, compiled.function, compiled.packed_metadata, *hooks]
            self.launch, self.stream = compiled.run, 3
        else:
            head = [0]
            self.launch, self.stream = partial(_launch_on, compiled[sizes]), 0
        self.values = head + pointers
        self.moved = [(i + len(head), which, pointers[i]) for i, which in active.moved(values)]

    def run(self, inputs: Sequence[Tensor], shifts: Sequence[int], stream: int) -> None:
        values = self.values
        values[self.stream] = stream
        for i, which, pointer in self.moved:
            values[i] = pointer + shifts[which]
        self.launch(*values)


def _launch_on(launch: Callable[..., None], stream: int, *values: Any) -> None:
    launch(*values, stream=stream)


@lru_cache
def _triton_version() -> str:
    return version("triton")


class CudaLaunch:
    """A launch of a kernel that PyTorch has compiled from CUDA C++, by the driver."""

    def __init__(
        self, active: Recording, kernel: Any, grid: int, threads: int,
        args: Sequence[Tensor | int | float], shared: int,
    ) -> None:  # fmt: skip
        self.values = [_c_value(x) for x in args]
        addresses = [ctypes.addressof(x) for x in self.values]
        self.parameters = (ctypes.c_void_p * len(args))(*addresses)
        self.sizes = grid, 1, 1, threads, 1, 1, shared
        self.function, self.library = kernel.func, torch.cuda._utils._get_gpu_runtime_library()
        self.moved = [(self.values[i], self.values[i].value, x) for i, x in active.moved(args)]

    def run(self, inputs: Sequence[Tensor], shifts: Sequence[int], stream: int) -> None:
        for value, pointer, which in self.moved:
            value.value = pointer + shifts[which]
        result = self.library.cuLaunchKernel(
            self.function, *self.sizes, ctypes.c_void_p(stream), self.parameters, None
        )
        if result:
            torch.cuda._utils._check_cuda(result)


class Call:
    """A call of a function with tensors, as PyTorch's operations and interpreted kernels are."""

    def __init__(
        self, active: Recording, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.function, self.args = function, list(args)
        self.moved = [(i, which, _view(args[i], active, which)) for i, which in active.moved(args)]
        for i, _, _ in self.moved:
            self.args[i] = None  # the recorded layer's tensor is not kept

    def run(self, inputs: Sequence[Tensor], shifts: Sequence[int], stream: int) -> None:
        args = list(self.args)
        for i, which, view in self.moved:
            args[i] = view(inputs[which])
        self.function(*args)


def _view(tensor: Tensor, active: Recording, which: int) -> Callable[[Tensor], Tensor]:
    """A function that returns, for an input of another layer, the view of it that `tensor` is of
    the recorded layer's input `which`."""
    owner = active.inputs[which]
    if tensor.dtype is not owner.dtype:
        offset = tensor.data_ptr() - owner.data_ptr()
        return partial(_other_dtype, like=tensor.new_empty(0), shape=_shape(tensor), offset=offset)
    offset = (tensor.data_ptr() - owner.data_ptr()) // owner.itemsize
    shape, stride, _ = _shape(tensor)
    if (shape, stride, offset) == (owner.shape, owner.stride(), 0):
        return lambda x: x
    return lambda x: x.as_strided(shape, stride, x.storage_offset() + offset)


def _other_dtype(owner: Tensor, *, like: Tensor, shape: Any, offset: int) -> Tensor:
    storage = owner.untyped_storage()
    first = (owner.data_ptr() + offset - storage.data_ptr()) // like.itemsize
    return like.new_empty(0).set_(storage, first, *shape[:2])


@lru_cache
def _parameters(kernel: Any) -> list[tuple[str, Any]]:
    """The parameters of a Triton kernel with their defaults."""
    return [(name, x.default) for name, x in kernel.signature.parameters.items()]


def _shape(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


def _c_value(x: Tensor | int | float) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    return ctypes.c_int(x) if isinstance(x, int) else ctypes.c_double(x)


def _stream(device: torch.device) -> int:
    """The current stream of a GPU, as an address."""
    if device.type != "cuda":
        return 0
    return torch.cuda.current_stream(device).cuda_stream
