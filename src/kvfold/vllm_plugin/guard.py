"""End requests under vLLM whose logits are not finite, with an error in the log.

Shapes: n rows of logits (one per request), V tokens of the vocabulary.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.models.finite import rows_are_finite
from kvfold.vllm_plugin.log import logger

LOG_SECONDS = 1.0  # between two checks of the count on a GPU
MESSAGE = (
    "kvfold: the model's logits were not finite for %d token(s) so far, so no token could be "
    "sampled. Their requests are ended with an end token, so their outputs are cut short; requests "
    "that must not end (ignore_eos, min_tokens) continue with noise. Serve the model with --dtype "
    "float32, or set KVFOLD_BACKEND=reference. If the original model runs in this dtype, report it."
)


class LogitsGuard:
    """Ends requests whose logits are not finite, and logs an error.

    On a GPU nothing waits for the device: bad rows are counted there, and a thread reads the count
        every second.

    end_ids: end tokens of the model. Without any, logits stay as they are.
    """

    def __init__(self, end_ids: Sequence[int]) -> None:
        self.end_ids, self.num_logged = torch.tensor(list(end_ids), dtype=torch.int64), 0
        self.count = self.host_count = torch.zeros((), dtype=torch.int64)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [n, V]: rows that are not finite are changed in place so that an end token is
        sampled."""
        finite = rows_are_finite(logits)
        if logits.is_cuda:
            self._count(~finite)
        elif not bool(finite.all()):
            self.host_count += (~finite).sum()
            self.log_new()
        else:
            return logits
        if len(self.end_ids):
            invalid = ~finite[:, None]
            logits.masked_fill_(invalid, -torch.inf)
            # Token ids on the host would make every step wait for the device.
            end_ids = self.end_ids = self.end_ids.to(logits.device)
            logits[:, end_ids] = logits[:, end_ids].masked_fill(invalid, 0.0)
        return logits

    def _count(self, invalid: Tensor) -> None:
        """Count on the device, and start an asynchronous copy of the count to the host."""
        if not self.count.is_cuda:
            self.count = torch.zeros_like(self.count, device=invalid.device)
            self.host_count = torch.zeros_like(self.host_count).pin_memory()
            threading.Thread(target=self._watch, daemon=True, name="kvfold logits").start()
        self.count += invalid.sum()
        self.host_count.copy_(self.count, non_blocking=True)

    def _watch(self) -> None:
        while True:
            time.sleep(LOG_SECONDS)
            self.log_new()

    def log_new(self) -> None:
        """Log an error once the count has doubled since the last one, so that one request does not
        fill the log."""
        count = int(self.host_count)
        if count and count >= 2 * self.num_logged:
            self.num_logged = count
            logger.error(MESSAGE, count)


def guard_logits(model: Any, model_config: Any) -> None:
    """Make a vLLM model end requests whose logits are not finite."""
    guard, compute = LogitsGuard(end_tokens(model_config)), model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = compute(*args, **kwargs)
        return None if logits is None else guard(logits)

    model.compute_logits = compute_logits


def end_tokens(model_config: Any) -> list[int]:
    """Default end tokens of vLLM's ModelConfig: of generation_config.json, or else of config.json.

    Empty if neither has any, or if vLLM shall stop at such logits (VLLM_RAISE_ON_LOGIT_NANS).
    """
    if os.environ.get("VLLM_RAISE_ON_LOGIT_NANS", "0") not in ("", "0"):
        return []
    ids = model_config.try_get_generation_config().get("eos_token_id")
    if ids is None:
        ids = getattr(model_config.hf_config, "eos_token_id", None)
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]
