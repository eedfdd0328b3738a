"""Tests run beside each other: one thread each is faster than two fighting for two cores."""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("KVFOLD_COMPILE", "off")  # seconds for every tiny model; its own tests do
if not torch.cuda.is_available():  # kernels are then interpreted; read when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def still() -> Iterator[None]:
    """Calibration and recovery leave their windows at the first positions, where tests look."""
    from kvfold.compression.positions import Shift

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shift, "draw", lambda *_: None)
        yield
