"""Runs one pass over calibration text, and collects the statistics that bases and ranks read.

The model itself is unchanged: a registered attention function sees the queries, keys and values of
every layer, and records their moments and, where a recipe needs them, the gradients of the loss.
Shapes: B windows, T tokens, Hq / Hk query / KV heads, G = Hq / Hk, d head dim, D width.
"""

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.calibration.positions import Shift, shifting
from kvfold.calibration.saved_pass import SavedPass, State
from kvfold.calibration.statistics import QUANTITIES, Moment, NoGradients, Statistics
from kvfold.calibration.statistics.record import Recorder
from kvfold.calibration.statistics.reduce import num_centroids, prune, window_topics
from kvfold.models.adapter import Family
from kvfold.models.devices import input_device
from kvfold.models.finite import dtype_name, way_out
from kvfold.models.weights import fingerprint
from kvfold.utils.progress import Report


def calibrate(
    model: Any,
    family: type[Family],
    windows: Tensor,
    needs: set[str],
    *,
    topics: Tensor | None = None,
    text: str | None = None,
    centroids: int | None = None,
    seed: int = 0,
    progress: Report | None = None,
    saved: SavedPass | None = None,
) -> Statistics:
    """Collect the moments named in `needs` (keys of QUANTITIES). The model is left unchanged.

    windows [n, T]: token ids without padding. topics [n]: of the windows, and centroids: of
    k-means, both for `rows_reduced` (None: by `reduce.window_topics`, and by its default). text: a
    name for the windows in the artifact's key, instead of their tokens. saved: the file that the
    pass is saved to as it runs; a stopped pass continues from it.

    Gradients are those of the summed loss with labels sampled from the model. They are computed in
    the model's dtype and accumulated in fp64 (the squares of `fisher` in fp32). Layers of large and
    of offloaded models are recomputed in the backward pass, one at a time.

    Raises NoGradients where gradients end in a quantised model's kernels, and ValueError for
    statistics that are not finite.
    """
    recorder = Recorder(model, family, family.geometry(model.config), needs)
    device = input_device(model)
    generator = torch.Generator(device=device).manual_seed(seed)
    pruned = any(QUANTITIES[name].pruned for name in needs)
    kept_windows = _pruned_windows(model, windows, topics, seed) if pruned else []
    key = artifact_key(model, windows if text is None else text, centroids, family.layer_names)
    pass_key = {} if saved is None else _pass_key(model, windows, needs, seed, key)
    with recorder.installed(), shifting(family, model) as shift:
        start = 0
        if saved is not None and (state := saved.begin(pass_key, len(windows))) is not None:
            start, recorder.totals, shift.place = state.done, state.totals, state.place
            generator.set_state(state.generator)
        if progress is not None:
            progress(0, len(windows) - start)
        for done, window in enumerate(windows[start:], start):
            ids = window[None].to(device)
            shift.draw(ids.shape[1])
            positions = shift.moved(torch.arange(ids.shape[1], device=ids.device))[None]
            recorder.run(ids, generator, unpruned=done in kept_windows, positions=positions)
            if saved is not None:
                state_now = partial(_state, done + 1, recorder, generator, shift)
                saved.keep(pass_key, len(windows), state_now)
            if progress is not None:
                progress(done + 1 - start, len(windows) - start)
    moments = recorder.moments(centroids, seed)
    _check(model, moments, needs)
    return Statistics(key, moments, through_weights=tuple(recorder.through_weights))


def _pass_key(
    model: Any, windows: Tensor, needs: set[str], seed: int, key: dict[str, Any]
) -> dict[str, Any]:
    """The key of a saved pass: the artifact's key, and everything else that changes the sums."""
    devices = sorted({str(x.device) for x in model.parameters()})
    return {
        **key,
        "text": _digest(windows),
        "windows": list(windows.shape),
        "needs": sorted(needs),
        "seed": seed,
        "dtype": dtype_name(model),
        "devices": devices,
    }


def _state(done: int, recorder: Recorder, generator: torch.Generator, shift: Shift) -> State:
    """The state of a pass after `done` windows."""
    return State(
        done=done,
        totals=recorder.totals,
        generator=generator.get_state(),
        place=shift.place,
    )


def _check(model: Any, moments: dict[int, dict[str, Moment]], needs: set[str]) -> None:
    """Raises NoGradients where a layer's keys received no gradients, and ValueError for statistics
    that are not finite."""
    for index, stored in moments.items():
        if missing := sorted(needs - stored.keys()):
            raise NoGradients(f"{', '.join(missing)} of layer {index} were not seen")
        for name, moment in stored.items():
            if not bool(moment.second.isfinite().all()):
                raise ValueError(
                    f"{QUANTITIES[name].meaning}: not finite in layer {index} in"
                    f" {dtype_name(model)}; {way_out(model)}"
                )


def artifact_key(
    model: nn.Module,
    text: Tensor | str,
    centroids: int | None = None,
    part: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """The key of a statistics artifact, by which it may be reused.

    It has the model's fingerprint, the text (the windows' tokens, or a name for them), the number
    of ZDC's centroids, and the names of the layers where only a part is measured (`Family.part`).
    """
    key: dict[str, Any] = {"model": fingerprint(model), "centroids": num_centroids(centroids)}
    if isinstance(text, str):
        key["text"] = text
    else:
        key |= {"text": _digest(text), "tokens": text.numel()}
    if part is not None:
        key["layers"] = list(part)
    return key


def _digest(windows: Tensor) -> str:
    return hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()[:32]


def _pruned_windows(model: Any, windows: Tensor, topics: Tensor | None, seed: int) -> list[int]:
    """Indices of the windows [n, T] that remain after ZDC's topic pruning."""
    if topics is None:
        with torch.no_grad():
            embed = model.get_input_embeddings()
            means = [embed(window.to(input_device(model))).float().mean(0) for window in windows]
        topics = window_topics(torch.stack(means), seed)
    return prune(topics, seed)
