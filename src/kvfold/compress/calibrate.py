"""One streaming pass over calibration text: the statistics that bases and ranks are made from.

The model runs as it is; a registered attention function sees queries, keys and values of every
layer, records their moments, and taps the gradients of the loss where a recipe asks for them.
Shapes: B windows, T tokens, Hq / Hk query / KV heads, G = Hq / Hk, d head dim, D width.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.compress.record import GRADIENTS, Recorder
from kvfold.compress.statistics import Statistics, fingerprint
from kvfold.compress.support import support
from kvfold.models.adapter import Family

Progress = Callable[[int, int], None]


def calibrate(
    model: Any,
    family: type[Family],
    windows: Tensor,
    needs: set[str],
    *,
    topics: Tensor | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Statistics:
    """Collect the moments named in `needs` (see statistics.QUANTITIES).

    windows [n, T] token ids, no padding; topics [n] the document each window came from (for
    `rows_reduced`). Gradients are those of the summed loss with labels sampled from the model, in
    the model's own dtype, accumulated in fp64; layers are recomputed in the backward pass one at a
    time. Leaves the model as it was.
    """
    geometry = family.geometry(model.config)
    statistics = Statistics(artifact_key(model, windows))
    supports = [
        support(family, attention, geometry) if "kv" in needs else None
        for attention in family.attentions(model)
    ]
    recorder = Recorder(model, family, geometry, statistics, needs, supports)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    with recorder.installed(gradients=bool(needs & GRADIENTS)):
        for done, window in enumerate(windows):
            ids = window[None].to(model.device)
            recorder.start(ids.shape[1], generator)
            if needs & GRADIENTS:
                recorder.backward_from_sampled_labels(ids)
            else:
                with torch.no_grad():
                    model.base_model(input_ids=ids, use_cache=False)
            if progress is not None:
                progress(done + 1, len(windows))
    if "rows_reduced" in needs:
        recorder.reduce_rows(topics, seed)
    return statistics


def artifact_key(model: nn.Module, windows: Tensor) -> dict[str, Any]:
    """What makes a saved statistics artifact reusable: same model, same tokens."""
    text = hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()[:32]
    return {"model": fingerprint(model), "text": text, "tokens": windows.numel()}
