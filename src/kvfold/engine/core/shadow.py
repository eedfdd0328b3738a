"""Shadow scoring: a sample of finished requests is scored again by the original model, to measure
while serving what compression loses."""

import logging
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf, isfinite
from typing import Any

import numpy as np

from kvfold.engine.requests.request import Request, TokenLogprobs
from kvfold.engine.runner.original import OriginalPass
from kvfold.models.adapter import Family

logger = logging.getLogger(__name__)

LIMIT = 4096  # most tokens of a request that is scored, prompt and answer
QUEUE = 8  # most finished requests that wait to be scored
CHUNK = 512  # most tokens of the original model between two steps
EVERY = 8  # steps between two chunks, while requests run
LOSSES = (-1.0, -0.1, -0.01, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # bounds of the histogram, in nats


@dataclass(kw_only=True)
class ShadowTotals:
    """What was measured since the engine started.

    The loss of a token is its log-probability in the step that sampled it, from the compressed
    cache and before temperature and other settings, minus that under the original model after the
    same tokens. It is positive where the original model finds the answer less likely. Its mean over
    answers sampled at temperature 1 estimates the KL divergence of the served model from the
    original. In greedy answers gains and losses may cancel out, because quantisation also flattens
    the distribution: look at `num_differing` then.

    num_scored, num_dropped, num_skipped, num_failed: drawn requests that were scored; that came
        while `QUEUE` others waited; that have over `LIMIT` tokens; whose scoring raised an error.
    num_tokens: scored answer tokens. num_differing: those of them where the likeliest token of the
        two models differs.
    positive, negative: sums of the losses above 0, and of the losses below 0 without their sign, in
        nats.
    histogram: tokens by loss: those up to each bound of `LOSSES`, then those above the last.
    """

    num_scored: int = 0
    num_dropped: int = 0
    num_skipped: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_differing: int = 0
    positive: float = 0.0
    negative: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(LOSSES) + 1))

    @property
    def loss(self) -> float:
        """Mean loss of a token in nats; 0 before any was scored."""
        return (self.positive - self.negative) / max(self.num_tokens, 1)

    def add(self, served: list[TokenLogprobs], original: list[TokenLogprobs]) -> None:
        """Count the answer of one request. Raises ValueError, and counts nothing, if a
        log-probability is not finite."""
        pairs = list(zip(served, original, strict=True))
        losses = [x.chosen - y.chosen for x, y in pairs]
        if not all(map(isfinite, losses)):
            raise ValueError("a log-probability is not finite")
        self.num_scored += 1
        self.num_tokens += len(pairs)
        self.num_differing += sum(x.top[0][0] != y.top[0][0] for x, y in pairs)
        for loss in losses:
            self.positive += max(loss, 0.0)
            self.negative += max(-loss, 0.0)
            self.histogram[bisect_left(LOSSES, loss)] += 1


class Shadow:
    """Draws requests, and scores them between the engine's steps, one after the other.

    model: the original model, a causal LM of transformers. family: its logits.
    share: of the requests that are drawn, in (0, 1]. seed: other seeds draw other requests.

    Uses the memory of one uncompressed sequence of at most `LIMIT` tokens.
    """

    def __init__(self, model: Any, family: type[Family], share: float, seed: int = 0) -> None:
        assert 0 < share <= 1, share
        self.model, self.family, self.share, self.seed = model.eval(), family, share, seed
        self.totals = ShadowTotals()
        self._waiting: deque[Request] = deque()
        self._current: tuple[Request, OriginalPass] | None = None
        self._steps = 0  # since the last chunk

    def draws(self, request: Request) -> bool:
        """Whether a request is in the sample: by a hash of its prompt and its own seed, so that a
        replay of the same requests draws the same ones."""
        key = f"{self.seed} {request.sampling.seed} ".encode()
        prompt = np.asarray(request.token_ids[: request.num_prompt], dtype="<i8").tobytes()
        digest = blake2b(key + prompt, digest_size=8).digest()
        return int.from_bytes(digest, "little") < int(self.share * 2**64)

    @property
    def has_work(self) -> bool:
        """Whether a request waits to be scored, or is being scored."""
        return bool(self._current or self._waiting)

    def offer(self, request: Request) -> None:
        """Queue a finished request, if it was drawn and has an answer."""
        if request.served is None or not request.num_outputs or request.finish_reason == "error":
            return
        if len(request.token_ids) > LIMIT:
            self.totals.num_skipped += 1
        elif len(self._waiting) == QUEUE:
            self.totals.num_dropped += 1
        else:
            self._waiting.append(request)

    def run_if_idle(self, *, running: int = 0, waiting: int = 0, most: float = inf) -> None:
        """After a step, compute a chunk if the engine has room: whenever nothing runs; in every
        `EVERY`th step if requests run; never while requests wait.

        most: tokens of a chunk while requests run, as for prompts.
        """
        self._steps += 1
        if waiting or (running and self._steps < EVERY):
            return
        self._advance(int(min(CHUNK, most)) if running else CHUNK)

    def _advance(self, count: int) -> None:
        """Compute at most `count` tokens of the current request, if there is one. An error is
        logged and counted."""
        if not self.has_work:
            return
        self._steps = 0
        current, self._current = self._current, None  # stays None after an error or interrupt
        try:
            request, scoring = current or self._start(self._waiting.popleft())
            scoring.advance(count)
            if scoring.is_done:
                assert request.served is not None
                self.totals.add(request.served, scoring.scores)
            else:
                self._current = request, scoring
        except Exception:
            self.totals.num_failed += 1
            logger.exception("a request could not be scored by the original model")

    def _start(self, request: Request) -> tuple[Request, OriginalPass]:
        ids = request.token_ids
        return request, OriginalPass(self.model, self.family, ids, request.num_prompt)
