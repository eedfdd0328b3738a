"""Tests run beside each other: one thread each is faster than two fighting for two cores."""

import gc
import math
import os
import signal
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("KVFOLD_COMPILE", "off")  # seconds for every tiny model; its own tests do
if not torch.cuda.is_available():  # kernels are then interpreted; read when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background commands with SIGINT ignored, which commands under test inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

try:
    from hypothesis import settings
except ImportError:  # as in `make test-vllm`, which asks for none of its tests
    pass
else:  # the same examples on every machine; `make soak` looks for others
    settings.register_profile("fixed", derandomize=True, deadline=None)
    settings.register_profile("explore", deadline=None)
    settings.load_profile("fixed")


def pytest_collection_finish() -> None:
    """No collection of garbage looks again through what was imported, which is most of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Random numbers do not depend on the tests that a worker ran before."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a slow machine prints to stderr, where commands are to say nothing else."""
    monkeypatch.setattr("kvfold.cli.common.FIRST", math.inf)


@pytest.fixture(scope="module")
def still() -> Iterator[None]:
    """Calibration and recovery leave their windows at the first positions, where tests look."""
    from kvfold.calibration.positions import Shift

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shift, "draw", lambda *_: None)
        yield
