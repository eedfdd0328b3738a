"""Windows of text at all positions that a model takes, not only at the first ones.

Keys after RoPE depend on where they stand: a basis made of positions below 1024 loses five times as
much at 2048 (SmolLM2, `swift`, docs/quality.md). Attention sees distances alone, so a window may
begin anywhere, and its keys and their gradients turn with it. Its first token, an attention sink,
stays at position 0 as in every sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvfold.models.adapter import Family
from kvfold.models.rotary import LONG_ROPE, position_limit, rope_type

_GOLDEN = (5**0.5 - 1) / 2


class Shift:
    """A hook before RoPE's tables: all positions but 0 stand `by` further on."""

    def __init__(self, limit: int) -> None:
        self.limit, self.by, self.place = limit, 0, 0.0

    def draw(self, tokens: int) -> None:
        """Where the next window of `tokens` tokens ends: log-uniform from `tokens` to the limit.

        By the golden ratio, not at random: the first few windows are far apart already.
        """
        self.by = int(tokens * max(1.0, self.limit / tokens) ** self.place) - tokens
        self.place = (self.place + _GOLDEN) % 1

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": self.moved(kwargs["position_ids"])}
        x, positions, *more = args
        return (x, self.moved(positions), *more), kwargs

    def moved(self, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens at these positions stand now."""
        return positions + self.by * (positions > 0)


@contextmanager
def shifting(family: type[Family], *models: Any) -> Iterator[Shift]:
    """Models of one config whose windows can be moved; without RoPE, or where its tables depend on
    the longest sequence of a batch, they stay where they are."""
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
