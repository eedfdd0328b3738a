"""How many tokens of prompts a step reads beside requests that decode, by the time steps take."""

FIRST, LEAST = 128, 32  # tokens of prompts: before anything is measured, and at the slowest


class Pace:
    """Keeps steps near a time. seconds: of one (None: of any length, and nothing is measured).

    most: tokens of prompts in a step while others decode.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.most: float = float("inf") if seconds is None else FIRST

    def took(self, tokens: int, seconds: float) -> None:
        """A step read so many tokens of prompts. A step of few says little, unless it was slow."""
        if self.seconds is None or not tokens:
            return
        if 2 * tokens >= self.most or seconds > self.seconds:
            fitting = tokens * self.seconds / max(seconds, 1e-9)
            self.most = max(LEAST, min(fitting, 2 * self.most))
