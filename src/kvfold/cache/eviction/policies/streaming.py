"""The StreamingLLM policy: keep the first and the most recent tokens."""

from torch import Tensor

from kvfold.cache.eviction.base import Policy, RowsView


class Recency(Policy):
    """Evict the oldest token first."""

    def score(self, view: RowsView) -> Tensor:
        return view.positions.float()


def streaming() -> Recency:
    """StreamingLLM: keep the first 4 tokens and the most recent ones."""
    return Recency(name="streaming", sinks=4)
