"""Compile kernels in parallel before the first one is needed.

While a `CompileAhead` is entered, launches only compile: `launch` and `launch_cuda` hand their
kernels to threads, and nothing runs on the GPU for them. A trial step of each kind so compiles what
real steps need. What the step computes is meaningless; what kernels would have written is zero, so
that it may be used as an index.

Most of a compilation is MLIR, LLVM, NVRTC and ptxas, which run beside each other in threads.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MOST_THREADS = 32
TRITON_FOLDER = "TRITON_CACHE_DIR"  # an environment variable

_thread = threading.local()


class CompileAhead:
    """Compiles instead of launching while entered, and waits for all compilations at the end.

    device: for which is compiled. report: called with (kernels compiled, all), once all are known.

    A compilation that fails is tried again by the launch that needs it, which raises the error.
    """

    def __init__(
        self, device: torch.device, report: Callable[[int, int], None] | None = None
    ) -> None:
        self.device, self.report = device, report
        self.futures: dict[Any, Future[Any]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "CompileAhead":
        assert compiling_ahead() is None, "kernels are being compiled ahead"
        number = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self.pool = ThreadPoolExecutor(number, "kvfold-compile", self._start_thread)
        self._stack.enter_context(self.pool)
        self._stack.enter_context(_triton_mode(_Loading(self)))
        self._stack.enter_context(ZeroResults())
        _thread.ahead = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        _thread.ahead = None
        with self._stack:
            if kind is not None:
                self.pool.shutdown(cancel_futures=True)
                return
            for done, _future in enumerate(as_completed(self.futures.values()), 1):
                if self.report is not None:
                    self.report(done, len(self.futures))

    def triton(self, kernel: Any, grid: tuple[int, ...], args: Any, options: Any) -> None:
        """Compile a Triton kernel for such arguments."""
        if hasattr(kernel, "warmup"):  # not if it is interpreted
            kernel.warmup(*args, grid=grid, **options)

    def submit(self, key: Any, function: Callable[[], object]) -> Future[Any]:
        """Call `function` in a thread, once per key."""
        if key not in self.futures:
            self.futures[key] = self.pool.submit(function)
        return self.futures[key]

    def _start_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.synchronize()  # which makes its context that of this thread


@contextlib.contextmanager
def keeping_kernels(folder: str | None) -> Iterator[None]:
    """Context manager: kernels are looked up and stored in this folder, by default Triton's own,
    unless it cannot be written."""
    before = os.environ.get(TRITON_FOLDER)
    _set_folder(folder)
    if not _can_be_written():
        _set_folder(before)
    try:
        yield
    finally:
        _set_folder(before)


def _can_be_written() -> bool:
    """Whether Triton's folder exists or can be made, and takes files."""
    try:
        from triton import knobs

        os.makedirs(knobs.cache.dir, exist_ok=True)
    except (ImportError, OSError):  # without Triton nothing is compiled
        return False
    return os.access(knobs.cache.dir, os.W_OK)


def _set_folder(folder: str | None) -> None:
    if folder is None:
        os.environ.pop(TRITON_FOLDER, None)
    else:
        os.environ[TRITON_FOLDER] = folder


def compiling_ahead() -> CompileAhead | None:
    """The `CompileAhead` that this thread has entered."""
    return None if torch.compiler.is_compiling() else getattr(_thread, "ahead", None)


class ZeroResults(TorchDispatchMode):
    """Fills new tensors with zeros."""

    EMPTY = (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function.overloadpacket in self.EMPTY else result


class _Loading(Executor):
    """Runs Triton's compilations in the threads of a `CompileAhead`, and loads each kernel."""

    def __init__(self, ahead: CompileAhead) -> None:
        self.ahead = ahead

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            compiled = function(*args, **options)
            _ = compiled.run  # compiles the launcher, and loads the binary
            return compiled

        return self.ahead.submit(function, compile_and_load)


def _triton_mode(executor: Executor) -> contextlib.AbstractContextManager[object]:
    """Triton's mode in which `warmup` compiles in an executor. Versions without it compile in the
    calling thread."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return contextlib.nullcontext()
    mode: contextlib.AbstractContextManager[object] = AsyncCompileMode(executor, ignore_errors=True)
    return mode
