"""Logits that are not finite, under vLLM: nothing is served from them in silence.

Shapes: n rows of logits (one a request), V tokens of the vocabulary.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.models.finite import rows_are_finite

logger = logging.getLogger("vllm.kvfold")  # which vLLM's handlers print
EVERY = 1.0  # seconds between looks at what a GPU has counted
MESSAGE = (
    "kvfold: the model's logits were not finite for %d token(s) so far, so that nothing could be "
    "chosen. Their requests end there as by an end token: these answers are cut short, and noise "
    "where a request may not end (ignore_eos, min_tokens). Serve the model with --dtype float32, "
    "or set KVFOLD_BACKEND=reference; where the original model runs in this dtype, report it."
)


class LogitsGuard:
    """Ends requests whose logits are not finite, and logs an error. On a GPU nothing waits for the
    device: rows are counted there, and a thread reads the count every second.

    ends: end tokens of the model, none of which leaves logits as they are.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends, self.told = torch.tensor(list(ends), dtype=torch.int64), 0
        self.count = self.host = torch.zeros((), dtype=torch.int64)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [n, V], of which rows that are not finite are changed in place so that they choose
        an end token."""
        finite = rows_are_finite(logits)
        if logits.is_cuda:
            self._count(~finite)
        elif not bool(finite.all()):
            self.host += (~finite).sum()
            self.tell()
        else:
            return logits
        if len(self.ends):
            bad = ~finite[:, None]
            logits.masked_fill_(bad, -torch.inf)
            # Numbers of tokens that lie on the host would wait for the device, in every step.
            ends = self.ends = self.ends.to(logits.device)
            logits[:, ends] = logits[:, ends].masked_fill(bad, 0.0)
        return logits

    def _count(self, bad: Tensor) -> None:
        """On the device, whose count is on its way to the host when this returns."""
        if not self.count.is_cuda:
            self.count = torch.zeros_like(self.count, device=bad.device)
            self.host = torch.zeros_like(self.host).pin_memory()
            threading.Thread(target=self._watch, daemon=True, name="kvfold logits").start()
        self.count += bad.sum()
        self.host.copy_(self.count, non_blocking=True)

    def _watch(self) -> None:
        while True:
            time.sleep(EVERY)
            self.tell()

    def tell(self) -> None:
        """Log where there are more rows than when it was last logged: twice as many, so that one
        request does not fill the log."""
        count = int(self.host)
        if count and count >= 2 * self.told:
            self.told = count
            logger.error(MESSAGE, count)


def guard_logits(model: Any, model_config: Any) -> None:
    """Let a model of vLLM's end requests whose logits are not finite."""
    guard, compute = LogitsGuard(end_tokens(model_config)), model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = compute(*args, **kwargs)
        return None if logits is None else guard(logits)

    model.compute_logits = compute_logits


def end_tokens(model_config: Any) -> list[int]:
    """Tokens that end a request by default, of vLLM's ModelConfig: those of generation_config.json,
    else of config.json; none where neither names one, or vLLM is to end the engine itself."""
    if os.environ.get("VLLM_RAISE_ON_LOGIT_NANS", "0") not in ("", "0"):
        return []
    found = model_config.try_get_generation_config().get("eos_token_id")
    if found is None:
        found = getattr(model_config.hf_config, "eos_token_id", None)
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]
