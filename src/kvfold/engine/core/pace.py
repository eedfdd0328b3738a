"""Limit the prompt tokens of a step, so that requests that decode are not delayed too long."""

FIRST, LEAST = 128, 32  # prompt tokens per step: before any measurement, and at the slowest


class PrefillPace:
    """Adapts the prompt tokens of a step to the measured duration of steps.

    seconds: target duration of a step (None: no target, and nothing is measured).
    max_tokens: most prompt tokens of a step in which other requests decode.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.max_tokens: float = float("inf") if seconds is None else FIRST

    def record(self, tokens: int, seconds: float) -> None:
        """Adapt to a step that took `seconds` and prefilled `tokens` prompt tokens. A step with few
        prompt tokens says little, unless it was slow."""
        if self.seconds is None or not tokens:
            return
        if 2 * tokens >= self.max_tokens or seconds > self.seconds:
            fitting = tokens * self.seconds / max(seconds, 1e-9)
            self.max_tokens = max(LEAST, min(fitting, 2 * self.max_tokens))
