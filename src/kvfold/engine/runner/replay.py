"""A sequence's context, read once more for a policy that scores rows by it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.base import AttentionContext
from kvfold.attention.metadata import PoolView
from kvfold.attention.replay import ReplayWithGradients, RescoringContext
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.rescoring import Rescoring, as_rescoring
from kvfold.engine.requests.request import Request
from kvfold.utils.chat import reply_words
from kvfold.utils.tokens import encode

Forward = Callable[[Tensor, Tensor, AttentionContext], Tensor]


class Replay:
    """Scores rows of sequences. tokenizer: of the words that ask for a piece; None: there are none.
    forward: tokens and positions int64 [n] through the model. twin: the same model in plain
    PyTorch, for a policy that asks for gradients. learned: positions that the model knows, where it
    learned each (None: it turns keys by any)."""

    def __init__(
        self,
        view: PoolView,
        policy: Policy,
        tokenizer: Any,
        forward: Forward,
        twin: Any = None,
        learned: int | None = None,
    ) -> None:
        self.view, self.policy, self.forward, self.twin = view, policy, forward, twin
        self.learned = learned
        self.tokenizer, self.reply = tokenizer, reply_words(tokenizer) if tokenizer else ""

    @property
    def scorer(self) -> Rescoring:
        """The policy's scorer."""
        scorer = as_rescoring(self.policy)
        assert scorer is not None, f"{self.policy} needs no re-scoring pass"
        return scorer

    def score(self, request: Request) -> None:
        """Give rows a metric that have none yet."""
        while request.num_scored < request.num_computed:
            self.read(request)

    @torch.inference_mode()
    def read(self, request: Request) -> None:
        """The same of one more piece."""
        start = request.num_scored
        piece = range(start, min(start + self.scorer.chunk, request.num_computed))
        self._read(request, piece)
        request.num_scored = piece.stop

    def _read(self, request: Request, piece: range) -> None:
        scorer = self.scorer
        tokens = [*self._words(request, piece), *request.token_ids[piece.start : piece.stop]]
        device, start = self.view.pool.device, request.num_computed
        how = self.view, request.open_slot, start, len(tokens), piece, scorer, self.policy.sinks
        ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        gradients = None
        if scorer.gradient_weighted:
            plain = ReplayWithGradients(*how)
            positions = self._known(plain.positions)
            gradients = scorer.gradient_norms(self.twin, ids, positions, plain)
        context = RescoringContext(*how, gradients)
        self.forward(ids, self._known(context.positions), context)

    def _known(self, positions: Tensor) -> Tensor:
        """Where tokens stand for the model: behind the context, as far as it has learned."""
        if self.learned is None:
            return positions
        over = (positions[-1] + 1 - self.learned).clamp(min=0)
        return (positions - over).clamp(min=0)

    def _words(self, request: Request, piece: range) -> list[int]:
        """What asks for a piece: its beginning, or where the one before it ended."""
        if self.tokenizer is None:
            return []
        scorer, start = self.scorer, piece.start
        ask = encode(self.tokenizer, scorer.follow if start else scorer.prompt)
        led = request.token_ids[max(start - scorer.lead, 0) : start]
        return [*ask, *led, *encode(self.tokenizer, self.reply)]
