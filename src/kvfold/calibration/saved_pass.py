"""A calibration pass on disk: what was measured until now, so that a stopped pass goes on."""

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
from kvfold.utils.files import new_file

logger = logging.getLogger(__name__)
SCHEMA = 1
EVERY = 10.0  # seconds between two saves, at least
SHARE = 20  # saving takes at most one part in so many of the time
_DAMAGED = (OSError, ValueError, RuntimeError, EOFError, KeyError, AttributeError, TypeError)


@dataclass(frozen=True, kw_only=True)
class State:
    """A pass after `done` windows. totals: of every layer by a quantity's name, as of
    `record.Recorder`; generator: the state of what is drawn; place: of `positions.Shift`."""

    done: int
    totals: list[dict[str, Any]]
    generator: Tensor
    place: float


class SavedPass:
    """The file of one pass. say: is told where a pass goes on; clock: in seconds.

    A file of another model, text or settings is ignored, and so is a torn or damaged one. Used in a
    `with` statement, whose block saves the pass's results: the file is removed where that ends
    without an error.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.say, self.clock = path, say, clock
        self.progress: tuple[int, int] | None = None  # windows that are saved, and all of them
        self._due = clock() + EVERY
        self._fails = False

    def begin(self, key: dict[str, Any], total: int) -> State | None:
        """What an earlier pass with this key, over `total` windows, left, or None."""
        self._due = self.clock() + EVERY
        state = self._read(key)
        self.progress = None if state is None else (state.done, total)
        if state is not None and self.say is not None:
            self.say(f"calibration goes on after {state.done} of {total} windows, from {self.path}")
        return state

    def _read(self, key: dict[str, Any]) -> State | None:
        about = _about(key)
        try:
            with zipfile.ZipFile(self.path) as file:
                if file.testzip() is not None:  # checks sums, which torch does not
                    return None
            with torch.serialization.safe_globals([Moment, Sampled]):
                stored = torch.load(self.path, weights_only=True)
            if stored.pop("about") != about:
                return None
            return State(**stored)
        except (*_DAMAGED, pickle.UnpicklingError, zipfile.BadZipFile):
            return None

    def keep(self, key: dict[str, Any], total: int, state: Callable[[], State]) -> None:
        """Save a pass over `total` windows where it is time to. A disk that takes no more does not
        end the pass."""
        begin = self.clock()
        if begin < self._due or self._fails:
            return
        now = state()
        try:
            with new_file(self.path) as scratch, scratch.open("wb") as file:
                torch.save({"about": _about(key), **vars(now)}, file)
        except (OSError, RuntimeError, ValueError) as error:
            self._fails = True
            logger.warning("calibration goes on without being saved: %s", error)
            return
        self.progress = (now.done, total)
        end = self.clock()
        self._due = end + max(EVERY, SHARE * (end - begin))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Keep the file for another try only."""
        if error is None:
            self.remove()

    def remove(self) -> None:
        """Remove the file, and what a killed process left of writing it."""
        for path in (self.path, *self.path.parent.glob(f".{escape(self.path.name)}-*")):
            path.unlink(missing_ok=True)


def saved_beside(output: Path, say: Callable[[str], object] | None = None) -> SavedPass:
    """The pass whose results become the directory `output`."""
    output = output.resolve()
    return SavedPass(output.with_name(f".{output.name}.kvfold-calibration"), say)


def _about(key: dict[str, Any]) -> str:
    return json.dumps({**key, "schema": SCHEMA}, sort_keys=True)
