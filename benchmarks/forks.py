"""Calls in processes of their own: what is imported and allocated goes with them. vLLM's search for
kernels takes one of Numba's modules amiss (0.32), where kvfold has imported it."""

import os
import traceback
from multiprocessing import get_context
from threading import Lock
from typing import Any

import torch

FORKS = Lock()  # two at once are refused by filelock


def forked(call: Any, *args: Any) -> Any:
    """What a call returns, made in a process of its own. Raises RuntimeError."""
    context: Any = get_context("spawn" if torch.cuda.is_initialized() else "fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_forked, args=(theirs, call, *args))
    with FORKS:
        child.start()
    theirs.close()
    try:
        done, found = ours.recv()
    except EOFError:
        done, found = False, "its process died"
    child.join()
    if not done:
        raise RuntimeError(found)
    return found


def _forked(pipe: Any, call: Any, *args: Any) -> None:
    # A fork's pool of threads is made when it is asked for, at which two threads at once fail.
    torch.set_num_threads(torch.get_num_threads())
    try:
        pipe.send((True, call(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # without what the parent would do at its end
