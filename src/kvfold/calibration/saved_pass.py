"""Saves a calibration pass to disk as it runs, so that a stopped pass continues."""

import json
import logging
import pickle
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from kvfold.calibration.statistics.moments import Moment
from kvfold.calibration.statistics.quantities import Sampled
from kvfold.utils.errors import first_line
from kvfold.utils.files import new_file

logger = logging.getLogger(__name__)
SCHEMA = 2  # 1: gradient-weighted statistics had names that end in `_felt`
EVERY = 10.0  # seconds between two saves, at least
SHARE = 20  # saving takes at most 1 / SHARE of the time
_DAMAGED = (OSError, ValueError, RuntimeError, EOFError, KeyError, AttributeError, TypeError)


@dataclass(frozen=True, kw_only=True)
class State:
    """A pass after `done` windows. totals: sums of every layer by the name of the quantity, as in
    `record.Recorder`. generator: state of the random numbers. place: of `positions.Shift`."""

    done: int
    totals: list[dict[str, Any]]
    generator: Tensor
    place: float


class SavedPass:
    """The file of one calibration pass.

    Used in a `with` statement whose block saves the results: the file is removed if the block ends
    without an error. A file of another model, text or settings is ignored, and so is a damaged one.
    say: is called with a line when a pass continues. clock: returns seconds.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.say, self.clock = path, say, clock
        self.progress: tuple[int, int] | None = None  # windows saved, and windows in all
        self._due = clock() + EVERY
        self._fails = False

    def begin(self, key: dict[str, Any], total: int) -> State | None:
        """The state that an earlier pass with this key, over `total` windows, saved; or None."""
        self._due = self.clock() + EVERY
        state = self._read(key)
        self.progress = None if state is None else (state.done, total)
        if state is not None and self.say is not None:
            self.say(f"calibration goes on after {state.done} of {total} windows, from {self.path}")
        return state

    def _read(self, key: dict[str, Any]) -> State | None:
        header = _header(key)
        try:
            with zipfile.ZipFile(self.path) as file:
                if file.testzip() is not None:  # checks sums, which torch does not
                    return None
            with torch.serialization.safe_globals([Moment, Sampled]):
                stored = torch.load(self.path, weights_only=True)
            if stored.pop("about") != header:
                return None
            return State(**stored)
        except (*_DAMAGED, pickle.UnpicklingError, zipfile.BadZipFile):
            return None

    def keep(self, key: dict[str, Any], total: int, state: Callable[[], State]) -> None:
        """Save the state of a pass over `total` windows, if enough time has passed since the last
        save. After an error of the disk the pass goes on without being saved."""
        begin = self.clock()
        if begin < self._due or self._fails:
            return
        now = state()
        try:
            with new_file(self.path) as scratch, scratch.open("wb") as file:
                torch.save({"about": _header(key), **vars(now)}, file)
        except (OSError, RuntimeError, ValueError) as error:
            self._fails = True
            logger.warning(
                "calibration cannot be saved in %s, so it starts anew if it is stopped now: %s",
                self.path,
                first_line(error),
            )
            return
        self.progress = (now.done, total)
        end = self.clock()
        self._due = end + max(EVERY, SHARE * (end - begin))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Remove the file, unless there was an error."""
        if error is None:
            self.remove()

    def remove(self) -> None:
        """Remove the file, and partial files that a killed process left."""
        for path in (self.path, *self.path.parent.glob(f".{escape(self.path.name)}-*")):
            path.unlink(missing_ok=True)


def saved_beside(output: Path, say: Callable[[str], object] | None = None) -> SavedPass:
    """The saved pass of an output directory: a hidden file beside it."""
    output = output.resolve()
    return SavedPass(output.with_name(f".{output.name}.kvfold-calibration"), say)


def _header(key: dict[str, Any]) -> str:
    return json.dumps({**key, "schema": SCHEMA}, sort_keys=True)
