"""Logits that are changed before a token is chosen, in rows that ask for it: biases, penalties of
what was said, and ends that come too early.

Shapes: n rows, V vocabulary, e entries that change, each of another row or token.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfold.engine.request import Request
from kvfold.ops.common.launch import upload
from kvfold.spec.layout import Ints


@dataclass(frozen=True, kw_only=True)
class Edits:
    """Entry i is logits[rows[i], tokens[i]], in the order of vLLM: bias[i] is added, then a
    positive one divided by repetition[i] and another multiplied with it, then penalty[i] taken off.

    rows, tokens int64 [e]; the others fp32 [e].
    """

    rows: Ints
    tokens: Ints
    bias: np.ndarray
    repetition: np.ndarray
    penalty: np.ndarray

    @torch.inference_mode()  # as logits are
    def apply(self, logits: Tensor) -> "Applied":
        """Change logits [n, V], in place."""
        device = logits.device
        at = upload(self.rows, device), upload(self.tokens, device)
        bias, repetition, penalty = (
            upload(x, device) for x in (self.bias, self.repetition, self.penalty)
        )
        raw = logits[at]
        found = raw + bias
        found = torch.where(found > 0, found / repetition, found * repetition) - penalty
        logits[at] = found
        return Applied(logits, at, raw)


@dataclass(frozen=True)
class Applied:
    """Edits that are in place in logits [n, V]: at (rows, tokens) these were raw, fp32 [e]."""

    logits: Tensor
    at: tuple[Tensor, Tensor]
    raw: Tensor

    @torch.inference_mode()
    def undo(self) -> None:
        self.logits[self.at] = self.raw


def edits_of(requests: Sequence[Request], eos_ids: Collection[int]) -> Edits | None:
    """What the next tokens of requests, one a row, ask for; None: nothing."""
    asked = [(i, x) for i, x in enumerate(requests) if x.sampling.edits]
    found = [_edits(row, request, eos_ids) for row, request in asked]
    if not any(len(x.rows) for x in found):
        return None
    columns = [np.concatenate(x) for x in zip(*(vars(x).values() for x in found), strict=True)]
    return Edits(**dict(zip(vars(found[0]), columns, strict=True)))


def _edits(row: int, request: Request, eos_ids: Collection[int]) -> Edits:
    """One row's, each token once."""
    wanted = request.sampling
    bias = {int(token): value for token, value in wanted.logit_bias}
    if request.num_outputs < wanted.min_tokens:
        ends = (() if wanted.ignore_eos else eos_ids, wanted.stop_token_ids)
        bias |= {token: -float("inf") for some in ends for token in some}
    counts = request.seen() if wanted.penalises else {}
    tokens = list(bias.keys() | counts.keys())
    said = np.array([counts.get(token, 0) for token in tokens], dtype=np.float32)
    penalty = wanted.frequency_penalty * said + wanted.presence_penalty * (said > 0)
    repeated = np.array([token in counts for token in tokens], dtype=bool)
    return Edits(
        rows=np.full(len(tokens), row),
        tokens=np.array(tokens, dtype=np.int64),
        bias=np.array([bias.get(token, 0.0) for token in tokens], dtype=np.float32),
        repetition=np.where(repeated, wanted.repetition_penalty, 1).astype(np.float32),
        penalty=penalty.astype(np.float32),
    )
