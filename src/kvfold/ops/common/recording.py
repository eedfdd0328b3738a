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
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNED = 16  # bytes; Triton compiles other code for pointers that are not divisible by it

_thread = threading.local()


class Step(Protocol):
    """One recorded launch. shifts: bytes by which every input of the recording has moved."""

    def run(self, inputs: Sequence[Tensor], shifts: Sequence[int], stream: int) -> None: ...


class Recording:
    """The launches of one layer; see the module. Use it as a context manager while the layer runs.

    inputs: the layer's tensors, which differ from layer to layer.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.shapes = [_shape(x) for x in inputs]
        self.pointers = [x.data_ptr() for x in inputs]
        self.device = inputs[0].device
        self.steps: list[Step] = []
        self.kept: dict[int, Tensor] = {}  # tensors that launches use, by storage
        self.storages: dict[int, int] = {}  # pointer of a storage -> first input in it
        for i, x in enumerate(inputs):
            if x.numel():
                self.storages.setdefault(x.untyped_storage().data_ptr(), i)
        owners = (self.storages.get(x.untyped_storage().data_ptr(), -1) for x in inputs)
        self.owners = [i if owner < 0 else owner for i, owner in enumerate(owners)]

    def __enter__(self) -> "Recording":
        assert recording() is None, "a layer is being recorded"
        _thread.recording = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        _thread.recording = None

    def replay(self, inputs: Sequence[Tensor]) -> bool:
        """Launch everything with `inputs` in place of the recorded layer's. Returns False, with
        nothing launched, if they have other shapes, or lie in memory in another way."""
        if len(inputs) != len(self.pointers):
            return False
        shifts = [x.data_ptr() - at for x, at in zip(inputs, self.pointers, strict=True)]
        if any(shift % ALIGNED for shift in shifts):
            return False
        if any(shifts[i] != shifts[owner] for i, owner in enumerate(self.owners)):
            return False
        if any(_shape(x) != shape for x, shape in zip(inputs, self.shapes, strict=True)):
            return False
        stream = _stream(self.device)
        for step in self.steps:
            step.run(inputs, shifts, stream)
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the recording keeps, besides the inputs."""
        return sum(x.untyped_storage().nbytes() for x in self.kept.values())

    def input_of(self, tensor: Tensor) -> int | None:
        """The input whose memory `tensor` lies in; None if it is no layer's, and then kept."""
        storage = tensor.untyped_storage().data_ptr()
        which = self.storages.get(storage)
        if which is None:
            self.kept[storage] = tensor
        return which

    def moved(self, values: Sequence[Any]) -> list[tuple[int, int]]:
        """(index of a value, input that it lies in) of all tensors among `values` that move."""
        places = []
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and (which := self.input_of(value)) is not None:
                places.append((i, which))
        return places


def recording() -> Recording | None:
    """The recording of this thread, while a layer is being recorded."""
    return None if torch.compiler.is_compiling() else getattr(_thread, "recording", None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, for a Triton kernel."""
    compiled = kernel[grid](*args, **options)
    active = recording()
    if active is None:
        return
    if compiled is None:  # interpreted
        names = list(options)
        active.steps.append(
            Call(
                active,
                lambda *values: kernel[grid](
                    *values[: len(args)], **dict(zip(names, values[len(args) :], strict=True))
                ),
                (*args, *options.values()),
            )
        )
    else:
        active.steps.append(TritonLaunch(active, kernel, compiled, grid, args, options))


def launch_cuda(
    kernel: Any, grid: int, threads: int, args: Sequence[Tensor | int | float], shared: int
) -> None:
    """Launch a kernel of `torch.cuda._compile_kernel` on the current stream: `grid` programs of
    `threads` threads and `shared` bytes of shared memory. Integers are passed as C `int`, floats as
    `double`."""
    active = recording()
    if active is None:
        kernel(grid=(grid, 1, 1), block=(threads, 1, 1), args=list(args), shared_mem=shared)
        return
    step = CudaLaunch(active, kernel, grid, threads, args, shared)
    step.run((), [0] * len(active.pointers), _stream(active.device))
    active.steps.append(step)


def compute(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`: a PyTorch operation that is repeated for other layers, then with the
    result's memory as `out`."""
    result = function(*args)
    active = recording()
    if active is not None:
        active.steps.append(
            Call(active, lambda *values: function(*values[:-1], out=values[-1]), (*args, result))
        )
    return result


def copy(to: Tensor, source: Tensor) -> Tensor:
    """Copy `source` to `to`, of the same shape."""
    to.copy_(source)
    active = recording()
    if active is not None:
        active.steps.append(Call(active, torch.Tensor.copy_, (to, source)))
    return to


def add(a: Tensor, b: Tensor, to: Tensor) -> Tensor:
    """Write a + b to `to`."""
    torch.add(a, b, out=to)
    active = recording()
    if active is not None:
        active.steps.append(Call(active, lambda *x: torch.add(x[0], x[1], out=x[2]), (a, b, to)))
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
        known = {name: x for name, x in options.items() if name in kernel.signature.parameters}
        bound = kernel.signature.bind(*args, **known)
        bound.apply_defaults()
        values = list(bound.arguments.values())
        self.launch = compiled[(*grid, 1, 1)[:3]]
        self.values = [x.data_ptr() if isinstance(x, Tensor) else x for x in values]
        self.moved = [(i, which, self.values[i]) for i, which in active.moved(values)]

    def run(self, inputs: Sequence[Tensor], shifts: Sequence[int], stream: int) -> None:
        values = self.values
        for i, which, pointer in self.moved:
            values[i] = pointer + shifts[which]
        self.launch(*values, stream=stream)


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
        torch.cuda._utils._check_cuda(result)


class Call:
    """A call of a function with tensors, as PyTorch's operations and interpreted kernels are."""

    def __init__(
        self, active: Recording, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.function, self.args = function, list(args)
        self.moved = [(i, which, args[i], args[i].data_ptr()) for i, which in active.moved(args)]

    def run(self, inputs: Sequence[Tensor], shifts: Sequence[int], stream: int) -> None:
        args = self.args
        for i, which, tensor, pointer in self.moved:
            args[i] = _at(tensor, inputs[which], pointer + shifts[which])
        self.function(*args)


def _at(like: Tensor, owner: Tensor, pointer: int) -> Tensor:
    """A tensor like `like` at an address in the memory of `owner`."""
    storage = owner.untyped_storage()
    offset = (pointer - storage.data_ptr()) // like.itemsize
    return like.new_empty(0).set_(storage, offset, like.shape, like.stride())


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
