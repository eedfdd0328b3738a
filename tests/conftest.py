"""Tests run beside each other: one thread each is faster than two fighting for two cores."""

import os

import torch

os.environ.setdefault("KVFOLD_COMPILE", "off")  # seconds for every tiny model; its own tests do
if not torch.cuda.is_available():  # kernels are then interpreted; read when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
