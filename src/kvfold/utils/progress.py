"""Progress reports for work in named stages."""

from collections.abc import Callable
from itertools import count

Report = Callable[[int, int], None]  # done, total
Progress = Callable[[str, int, int], None]  # what is being done, done, total


def stage(progress: Progress | None, name: str) -> Report | None:
    """The progress callback for one named stage; None without a callback."""
    if progress is None:
        return None
    return lambda done, total: progress(name.strip(), done, total)


def counter(progress: Progress | None, name: str, total: int) -> Callable[[], None]:
    """Begin a stage of `total` equal steps. Returns a function to call after each of them."""
    report = stage(progress, name)
    if report is None:
        return lambda: None
    steps = count(1)
    report(0, total)
    return lambda: report(next(steps), total)
