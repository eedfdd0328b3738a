"""Searches for the smallest cache within a perplexity ratio, measured on held-out text.

Shape legend: n windows of `ctx` tokens.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvfold.calibration.documents import calibration_documents, files_of
from kvfold.calibration.text import calibration_windows
from kvfold.compression.compressor import Compressor, Prepared
from kvfold.evaluation.comparison import ORIGINAL
from kvfold.evaluation.perplexity import perplexity
from kvfold.layout import CacheSpec
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress, stage
from kvfold.utils.search import search
from kvfold.utils.tokens import windows

SEARCH_WINDOWS = 16
RUN = 32  # tokens; a window that shares so many with calibration is not held out


def held_out(compressor: Compressor, ctx: int, num_windows: int = SEARCH_WINDOWS) -> Tensor:
    """Return windows [n, ctx] spread over the calibration text that calibration does not read. They
    share no RUN consecutive tokens with what it reads. Raises ValueError if there are
    none.
    """
    files = files_of(compressor.calib)
    used = calibration_windows(
        compressor.tokenizer, compressor.model.config, files, compressor.max_tokens
    )
    taken = {run for window in used.tolist() for run in _runs(window)}
    candidates: list[list[int]] = []
    for document in calibration_documents(files, compressor.tokenizer):
        try:
            candidates += windows(compressor.tokenizer, document.text, ctx).tolist()
        except ValueError:
            continue  # shorter than one window
    free = [ids for ids in candidates if taken.isdisjoint(_runs(ids))]
    if not free:
        raise SettingError(
            "`budget`: calibration reads the whole text, nothing is left to measure perplexity on;"
            " give more text with `calib`, or fewer `max_tokens`"
        )
    step = max(1, len(free) // num_windows)
    return torch.tensor(free[::step][:num_windows])


def _runs(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + RUN]) for i in range(len(ids) - RUN + 1)}


def search_keep(
    prepared: Prepared,
    limit: float,
    *,
    align: int | None = None,
    chunk: int = 512,
    batch: int = 1,
    progress: Progress | None = None,
    applied: Callable[[CacheSpec], AbstractContextManager[Any]] | None = None,
) -> tuple[float, float]:
    """Search for the smallest keep whose perplexity ratio to the original is <= `limit`.

    Returns (keep, ratio), measured on `held_out` text. applied: a context manager that gives the
    model with a plan; None: a folded copy.
    """
    compressor = prepared.compressor
    applied = applied or (lambda spec: nullcontext(prepared.folded_copy(spec)))
    held_out_ids = held_out(compressor, compressor.windows().shape[1])

    def at(model: Any, label: str) -> float:
        report = stage(progress, f"search {label}")
        return perplexity(model, held_out_ids, chunk=chunk, batch=batch, progress=report).perplexity

    original = at(compressor.model, ORIGINAL)

    def ratio_at(keep: float) -> float:
        try:
            spec = prepared.plan(keep, align)
        except ValueError:
            return math.inf  # too small for a dimension in every layer
        with applied(spec) as model:
            return at(model, f"keep {keep:.3f}") / original

    return search(ratio_at, limit)
