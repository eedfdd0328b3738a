"""Moves windows of text to later positions, so that all positions of a model are calibrated on.

Keys after RoPE depend on their position: a basis from positions below 1024 loses five times as much
at 2048 (SmolLM2, `swift`, docs/lab/smollm2.md). Attention depends on distances alone, so a window
may begin at any position; its keys and their gradients are rotated with it. Its first token, an
attention sink, stays at position 0, as in every sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvfold.models.adapter import Family
from kvfold.models.rotary import LONG_ROPE, position_limit, rope_type

_GOLDEN = (5**0.5 - 1) / 2


class Shift:
    """A forward pre-hook of RoPE modules that adds `by` to all positions but 0.

    place: state of `draw`, in [0, 1).
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.by, self.place = limit, 0, 0.0

    def draw(self, tokens: int) -> None:
        """Choose the end of the next window of `tokens` tokens, log-uniform from `tokens` to the
        limit.

        The sequence follows the golden ratio, not random numbers, so that the first few windows are
        far apart already.
        """
        self.by = int(tokens * max(1.0, self.limit / tokens) ** self.place) - tokens
        self.place = (self.place + _GOLDEN) % 1

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": self.moved(kwargs["position_ids"])}
        x, positions, *more = args
        return (x, self.moved(positions), *more), kwargs

    def moved(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions after the shift."""
        return positions + self.by * (positions > 0)


@contextmanager
def shifting(family: type[Family], *models: Any) -> Iterator[Shift]:
    """Within it, the positions of models of one config are shifted.

    Models without RoPE, or whose tables depend on the longest sequence of a batch, are not shifted.
    """
    config = models[0].config
    rotaries = {id(x): x for model in models for x in family.rotaries(model)}
    fixed = not rotaries or rope_type(config) in LONG_ROPE
    shift = Shift(0 if fixed else position_limit(config) or 0)
    hooks = [x.register_forward_pre_hook(shift, with_kwargs=True) for x in rotaries.values()]
    try:
        yield shift
    finally:
        for hook in hooks:
            hook.remove()
