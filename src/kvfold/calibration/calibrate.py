"""One streaming pass over calibration text: the statistics that bases and ranks are made from.

The model runs as it is; a registered attention function sees queries, keys and values of every
layer, records their moments, and taps the gradients of the loss where a recipe asks for them.
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
from kvfold.calibration.statistics.reduce import prune, window_topics
from kvfold.models.adapter import Family
from kvfold.models.finite import dtype_name, way_out
from kvfold.models.placed import input_device
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
    """Collect the moments named in `needs` (see QUANTITIES).

    windows [n, T] token ids, no padding. For `rows_reduced`: topics [n] of the windows where they
    are known (None: by `reduce.window_topics`), and the number of k-means centroids. text: a name
    for the windows in the artifact's key, instead of their tokens. saved: where the pass is saved
    as it goes, and goes on from what a stopped one left.

    Gradients are those of the summed loss with labels sampled from the model, in the model's own
    dtype, accumulated in fp64 (squares of `fisher` in fp32); layers of a large model are recomputed
    in the backward pass one at a time, of an offloaded one too. Leaves the model as it was.

    Raises NoGradients where a quantised model's kernels end the gradients, ValueError for gradients
    that are not finite.
    """
    recorder = Recorder(model, family, family.geometry(model.config), needs)
    device = input_device(model)
    generator = torch.Generator(device=device).manual_seed(seed)
    pruned = any(QUANTITIES[name].pruned for name in needs)
    kept = _kept(model, windows, topics, seed) if pruned else []
    key = artifact_key(model, windows if text is None else text, centroids, family.part)
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
            places = shift.moved(torch.arange(ids.shape[1], device=ids.device))[None]
            recorder.run(ids, generator, kept=done in kept, places=places)
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
    """What a saved pass must have been over: its artifact's key and all else that changes sums."""
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
    return State(
        done=done,
        totals=recorder.totals,
        generator=generator.get_state(),
        place=shift.place,
    )


def _check(model: Any, moments: dict[int, dict[str, Moment]], needs: set[str]) -> None:
    """Raises NoGradients where gradients reached no key of a layer, ValueError where statistics are
    not finite."""
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
    """The key of a reusable statistics artifact: same model, text (as windows, or by a name for
    them), ZDC's centroids, and the names of the layers where others are left out (`Family.part`).
    """
    key: dict[str, Any] = {"model": fingerprint(model)}
    if isinstance(text, str):
        key["text"] = text
    else:
        key |= {"text": _digest(text), "tokens": text.numel()}
    if part is not None:
        key["layers"] = list(part)
    return key if centroids is None else {**key, "centroids": centroids}


def _digest(windows: Tensor) -> str:
    return hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()[:32]


def _kept(model: Any, windows: Tensor, topics: Tensor | None, seed: int) -> list[int]:
    """Windows [n, T] that stay after ZDC's topic pruning."""
    if topics is None:
        with torch.no_grad():
            embed = model.get_input_embeddings()
            means = [embed(window.to(input_device(model))).float().mean(0) for window in windows]
        topics = window_topics(torch.stack(means), seed)
    return prune(topics, seed)
