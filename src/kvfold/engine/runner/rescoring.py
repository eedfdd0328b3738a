"""Re-scoring pass: run a sequence's prompt again, so that a policy can score its cache entries by
it (KVzip)."""

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


class Rescorer:
    """Scores cache entries by a re-scoring pass.

    tokenizer: for the prompt that asks the model to repeat a segment (None: there is none).
    forward: runs tokens and positions int64 [n] through the model.
    twin: the same model in plain PyTorch, for policies that need gradients.
    learned: number of positions of a model with learned position embeddings (None: it uses RoPE).
    """

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
        """Score all entries that have no score yet."""
        while request.num_scored < request.num_computed:
            self.rescore_segment(request)

    @torch.inference_mode()
    def rescore_segment(self, request: Request) -> None:
        """Re-score the next prompt segment."""
        start = request.num_scored
        segment = range(start, min(start + self.scorer.chunk, request.num_computed))
        self._rescore(request, segment)
        request.num_scored = segment.stop

    def _rescore(self, request: Request, segment: range) -> None:
        scorer = self.scorer
        tokens = [
            *self._question(request, segment),
            *request.token_ids[segment.start : segment.stop],
        ]
        device, start = self.view.pool.device, request.num_computed
        slot, sinks = request.open_slot, self.policy.sinks
        settings = self.view, slot, start, len(tokens), segment, scorer, sinks
        ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        gradients = None
        if scorer.gradient_weighted:
            gradient_context = ReplayWithGradients(*settings)
            positions = self._legal_positions(gradient_context.positions)
            gradients = scorer.gradient_norms(self.twin, ids, positions, gradient_context)
        context = RescoringContext(*settings, gradients)
        self.forward(ids, self._legal_positions(context.positions), context)

    def _legal_positions(self, positions: Tensor) -> Tensor:
        """Positions limited to those that the model has learned. Else the tokens follow the
        context."""
        if self.learned is None:
            return positions
        over = (positions[-1] + 1 - self.learned).clamp(min=0)
        return (positions - over).clamp(min=0)

    def _question(self, request: Request, segment: range) -> list[int]:
        """Token ids that ask the model to repeat a segment: the beginning of the text, or what
        follows the previous segment."""
        if self.tokenizer is None:
            return []
        scorer, start = self.scorer, segment.start
        question = encode(self.tokenizer, scorer.follow if start else scorer.prompt)
        lead_in = request.token_ids[max(start - scorer.lead, 0) : start]
        return [*question, *lead_in, *encode(self.tokenizer, self.reply)]
