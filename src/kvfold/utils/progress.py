"""Progress reports for work in named stages."""

from collections.abc import Callable

Report = Callable[[int, int], None]  # done, total
Progress = Callable[[str, int, int], None]  # what is being done, done, total


def stage(progress: Progress | None, name: str) -> Report | None:
    """The progress callback for one named stage; None without a callback."""
    if progress is None:
        return None
    return lambda done, total: progress(name.strip(), done, total)
