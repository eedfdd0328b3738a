"""StreamingLLM: by age alone."""

from torch import Tensor

from kvfold.cache.eviction.base import Policy, RowsView


class Recency(Policy):
    """The oldest token goes first."""

    def score(self, view: RowsView) -> Tensor:
        return view.positions.float()


def streaming() -> Recency:
    """StreamingLLM: the first 4 tokens and the most recent ones."""
    return Recency(name="streaming", sinks=4)
