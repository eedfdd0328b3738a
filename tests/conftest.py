"""Tests run beside each other: one thread each is faster than two fighting for two cores."""

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
