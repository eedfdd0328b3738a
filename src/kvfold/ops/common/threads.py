"""Split work among threads, for kernels that release the GIL."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def share(work: Callable[[int, int], object], count: int) -> None:
    """Call work(begin, end) on parts of 0..count, one part per PyTorch thread."""
    number = max(1, min(torch.get_num_threads(), count))
    parts = list(pairwise(count * i // number for i in range(number + 1)))
    if number == 1:
        work(0, count)
    elif (openmp := _openmp()) is not None:
        _in_team(openmp, work, parts)
    else:
        list(_pool(number).map(lambda part: work(*part), parts))


def _in_team(
    openmp: ctypes.CDLL, work: Callable[[int, int], object], parts: list[tuple[int, int]]
) -> None:
    """Run in PyTorch's own OpenMP threads. They spin for milliseconds after its operations, so that
    other threads would get half of a core meanwhile."""
    errors: list[BaseException] = []
    left = iter(parts)

    def body(_: Any) -> None:
        for part in left:
            try:
                work(*part)
            except BaseException as error:  # what a callback raises is lost
                errors.append(error)

    openmp.GOMP_parallel(_BODY(body), None, len(parts), 0)
    if errors:
        raise errors[0]


@lru_cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that PyTorch loaded, if it has GCC's entry points."""
    loaded = ctypes.CDLL(None) if os.name == "posix" else None
    return loaded if hasattr(loaded, "GOMP_parallel") else None


@lru_cache
def _pool(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, thread_name_prefix="kvfold")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads stay with the parent
